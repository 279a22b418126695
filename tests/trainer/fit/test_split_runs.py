"""The Trainer with split matrices or stages of a pipeline: the run of one process, resumed on any mesh too."""

from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.strategies.split import (
    LENGTH,
    WITH_LOGITS,
    WITH_VOCABULARY,
    Plain,
    bert,
    data,
    gpt2,
    llama,
    mixtral,
    model_of,
)
from tests.trainer.fit.meshes import MESHES, OF_EXPERTS, PAGE, replicas_of, with_table
from tests.worlds import run_world
from trainer_lib import Accelerator, ParallelismConfig, Trainer, TrainingArguments
from trainer_lib.callbacks import EMA, LabelSmoothing
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.utils import TorchPipelineParallelConfig, TorchTensorParallelConfig

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer with bias returns a view


TOKENS = torch.zeros(2, LENGTH, dtype=torch.long)
EXAMPLE = {"input_ids": TOKENS, "labels": TOKENS}


class _Began(Callback):
    """Notes the step at which training begins."""

    step = -1

    def on_fit_begin(self, run: Run) -> None:
        self.step = run.state.step


class _Dies(Modifier):
    """Ends a run between two updates."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == self._after:
            raise InterruptedError


def _run(
    mesh: str, folder: Path | None = None, dies_after: int | None = None, kind: Any = Plain, **options: Any
) -> Any:
    samples, begins_at, began = options.pop("samples", 45), options.pop("begins_at", 0), _Began()
    plan = options.pop("plan", WITH_VOCABULARY if kind in (Plain, Tied) else None)
    handler = TorchTensorParallelConfig(plan=plan)
    sizes: dict[str, Any] = MESHES[mesh][1]
    if mesh.endswith("_traced"):
        sizes = {**sizes, "pp_handler": TorchPipelineParallelConfig(example_inputs=EXAMPLE)}
    replicas = replicas_of(mesh)
    args: dict[str, Any] = {
        "max_steps": 20, "learning_rate": 0.05, "optimizer": "sgd", "use_cpu": True, "progress_bar": False,
        "log_every": 1, "per_device_train_batch_size": 4 // replicas, "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "eval_every": 8, "per_device_eval_batch_size": 2, "output_dir": folder, "seed": 3, "max_tokens": 10**9,
        "save_every": 4 if folder else None,
    } | options  # fmt: skip
    if sizes:
        args["parallelism"] = ParallelismConfig(**sizes, tp_handler=handler)
    trainer = Trainer(
        model_of(kind),
        TrainingArguments(**args),
        train_dataset=data(samples),
        eval_dataset=data(7),
        metrics=["accuracy"],
        callbacks=[EMA(0.9), began, *([] if dies_after is None else [_Dies(dies_after)])],
    )
    try:
        result = trainer.fit()
    except InterruptedError:
        return None
    finally:
        assert began.step == begins_at
    logged = [[entry["loss"], entry["grad_norm"]] for entry in result.history if "loss" in entry]
    metrics = {name: value for name, value in trainer.evaluate().items() if not name.endswith("_per_second")}
    metrics |= {f"at step {entry['step']}": entry["eval_loss"] for entry in result.history if "eval_loss" in entry}
    state = trainer.run.state
    return (
        torch.tensor(logged),
        metrics,
        trainer.predict(data(5)).predictions.shape,
        (state.step, state.samples, state.tokens),
    )


def assert_as_one_process(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual[0], expected[0][-len(actual[0]) :], rtol=1e-6, atol=0)
    assert actual[1] == pytest.approx(expected[1], rel=1e-6)
    assert actual[2:] == expected[2:]


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    """Return the length of the runs: an epoch of three updates and two of the next; longer with `--soak`."""
    return 20 if request.config.getoption("--soak") else 5


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2_dp2", "tp4", "pp2_dp2", "pp2_dp2_traced"])
def test_each_step_is_that_of_one_process(mesh: str, steps: int) -> None:
    def run(mesh: str) -> Any:
        return _run(mesh, samples=21, max_steps=steps, eval_every=2)

    (expected,) = run_world(run, ("one",), 1)
    for actual in run_world(run, (mesh,), MESHES[mesh][0], timeout=150):
        assert_as_one_process(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2_dp2", "pp2_dp2"])
def test_a_replica_without_samples_takes_part(mesh: str) -> None:
    def run(mesh: str) -> Any:
        return _run(mesh, samples=17, max_steps=4)  # the last window of an epoch is one sample

    (expected,) = run_world(run, ("one",), 1)
    for actual in run_world(run, (mesh,), MESHES[mesh][0], timeout=150):
        assert_as_one_process(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh"), [(llama, "tp2_sp2"), (bert, "tp2_cp2")])
def test_other_models_split_sequences_and_matrices(kind: Any, mesh: str) -> None:
    def run(mesh: str) -> Any:
        return _run(mesh, kind=kind, samples=21, max_steps=3)

    (expected,) = run_world(run, ("one",), 1)
    for actual in run_world(run, (mesh,), MESHES[mesh][0], timeout=150):
        assert_as_one_process(actual, expected)


@pytest.mark.slow
def test_a_loss_of_parts_of_sequences_is_computed_from_split_logits() -> None:
    def run(mesh: str) -> Any:
        return _run(mesh, plan=WITH_LOGITS, samples=21, max_steps=3)

    (expected,) = run_world(run, ("one",), 1)
    for actual in run_world(run, ("tp2_cp2",), 4, timeout=150):
        assert_as_one_process(actual, expected)


class Tied(Plain):
    """A plain module whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


_MODELS = {"plain": Plain, "tied plain": Tied, "tied": partial(gpt2, 2)}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9}},
}
# Each mesh resumes what the mesh before it saved. On eight ranks the state is that of momentum, and where weights are
# split along three dimensions they have few shapes: for each shape and each operation of an optimizer, torch tries
# thousands of layouts there, on each rank.
CHAINS = [
    ("plain", "adamw", "tp2_dp2", "tp2_fsdp2", "one", "tp2", "tp4"),
    ("plain", "adamw", "one", "tp2_fsdp2", "pp2_tp2", "pp2", "pp2", "one"),
    ("plain", "adamw", "dp2", "pp2_dp2", "tp2", "one", "pp2", "pp2_fsdp2"),
    ("tied plain", "momentum", "pp2", "tp2_hsdp4", "one"),
    ("tied", "sgd", "tp2_fsdp2", "pp2_fsdp2", "one", "tp2_sp2", "dp2", "tp2"),
    ("tied plain", "adamw", "pp2_traced", "tp2", "pp2_traced"),
    ("tied", "momentum", "pp2", "tp2_cp2_fsdp2", "tp2_cp2", "one"),
    ("tied", "sgd", "tp2_sp2_fsdp2", "tp2_cp2_dp2", "pp2_tp2_cp2", "pp2_cp2", "pp2_sp2_fsdp2", "pp2_sp2", "pp2_tp2"),
]


@cache
def _of_one_process(model: str, optimizer: str, steps: int) -> Any:
    def whole() -> Any:
        options: dict[str, Any] = {"samples": 21, "eval_every": 2, "learning_rate": 0.003, **_OPTIMIZERS[optimizer]}
        return _run("one", kind=_MODELS[model], max_steps=steps, **options)

    (expected,) = run_world(whole, (), 1)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_a_run_resumes_on_other_meshes(chain: tuple[str, ...], tmp_path: Path, steps: int) -> None:
    """Each mesh trains as one process does: the last one's history holds the steps and evaluations of all.

    Every third window is the last one of an epoch: a batch of four samples, and one of a single sample.
    """
    model, optimizer, *meshes, last = chain
    end = max(steps, 2 * len(meshes) + 2)

    def run(mesh: str, begins_at: int, dies_after: int | None) -> Any:
        options: dict[str, Any] = {"samples": 21, "eval_every": 2, "learning_rate": 0.003, **_OPTIMIZERS[optimizer]}
        options |= {"save_every": 2, "resume": "auto", "max_steps": end, "begins_at": begins_at}
        return _run(mesh, tmp_path, dies_after, kind=_MODELS[model], **options)

    for number, mesh in enumerate(meshes):
        died = run_world(run, (mesh, 2 * number, 2 * number + 2), MESHES[mesh][0], timeout=150)
        assert died == [None] * MESHES[mesh][0]
    for actual in run_world(run, (last, 2 * len(meshes), None), MESHES[last][0], timeout=150):
        assert len(actual[0]) == end, "the history of the run begins with the steps before the resume"
        assert_as_one_process(actual, _of_one_process(model, optimizer, end))


@pytest.mark.slow
def test_a_run_of_experts_resumes_on_other_meshes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": partial(mixtral, output_router_logits=False)}
    options |= {"max_steps": 2 * len(OF_EXPERTS) + 2, "eval_every": 2}

    def run(mesh: str, begins_at: int, dies_after: int | None) -> Any:
        return _run(mesh, tmp_path, dies_after, resume="auto", save_every=2, begins_at=begins_at, **options)

    def whole() -> Any:
        return _run("one", **options)

    (expected,) = run_world(whole, (), 1)
    for number, mesh in enumerate(OF_EXPERTS):
        assert set(run_world(run, (mesh, 2 * number, 2 * number + 2), MESHES[mesh][0], timeout=150)) == {None}
    for actual in run_world(run, ("one", 2 * len(OF_EXPERTS), None), 1):
        assert_as_one_process(actual, expected)


@pytest.mark.slow
def test_a_loss_that_balances_experts_is_averaged_over_micro_batches() -> None:
    def run(mesh: str, **options: Any) -> Any:
        return _run(mesh, kind=mixtral, samples=21, max_steps=3, **options)

    def one() -> Any:
        return run("one", per_device_train_batch_size=2, gradient_accumulation_steps=4)

    (expected,) = run_world(one, (), 1)
    for actual in run_world(run, ("tp2_dp2",), 4, timeout=150):
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=0)


def _smoothed(parallelism: ParallelismConfig | None, folder: Path) -> list[float]:
    args = TrainingArguments(
        max_steps=4, optimizer="sgd", use_cpu=True, progress_bar=False, log_every=1, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, seed=3, parallelism=parallelism,
    )  # fmt: skip
    trainer = Trainer(model_of(gpt2), args, train_dataset=data(45), callbacks=[LabelSmoothing(0.1)])
    with patch.object(Accelerator, "backward_window", side_effect=AssertionError("needs each micro-batch")):
        result = trainer.fit()
    trainer.save_model(folder)
    return [entry["loss"] for entry in result.history if "loss" in entry]


@pytest.mark.slow
def test_a_callback_gets_each_micro_batch_of_a_pipeline(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    (expected,) = run_world(_smoothed, (None, tmp_path / "one"), 1)
    for actual in run_world(_smoothed, (ParallelismConfig(pp_size=2), tmp_path / "two"), 2):
        assert actual == pytest.approx(expected, rel=1e-6)
    saved = [GPT2LMHeadModel.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two")]
    torch.testing.assert_close(saved[1], saved[0], rtol=1e-5, atol=1e-6)


def test_the_table_of_meshes_is_current() -> None:
    text = PAGE.read_text()
    assert text == with_table(text), "Write it by: python -m tests.trainer.fit.meshes"
