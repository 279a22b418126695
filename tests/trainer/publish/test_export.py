"""Exported programs compute the same as the model, and the model does not change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.tasks import arguments, points
from tests.worlds import run_world
from trainer_lib import ConfigurationError, Trainer, TrainingArguments
from trainer_lib.callbacks import EMA
from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import MissingPackageError, PreparationError, UnsupportedError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))


def trained(args: TrainingArguments | None = None, **options: Any) -> Trainer:
    trainer = Trainer(
        network(), args or arguments(max_steps=4), train_dataset=points(), loss_fn=cross_entropy, **options
    )
    trainer.fit()
    return trainer


def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return what a model computes as its author wrote it, evaluating."""
    plain = network()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return plain.eval()(inputs)


def assert_same_program(path: Path, model: nn.Module, *, to: float = 1e-6) -> None:
    exported = torch.export.load(path)
    assert exported.example_inputs is None  # which would be samples of the data
    program = exported.module()
    for rows in (1, 5, 33):  # of any number of samples
        inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(program(inputs), outputs(model, inputs), rtol=to, atol=to)


def everything(model: nn.Module) -> dict[str, Any]:
    """Return all that an export has to leave alone."""
    modules = {name: (module.training, sorted(vars(module))) for name, module in model.named_modules()}
    return {**modules, **{name: value.clone() for name, value in model.state_dict().items()}}


class KeepsOutputs(nn.Module):
    """A network that keeps what it computed in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.kept: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        if self.training:
            self.kept = [outputs]
        return outputs


def test_a_model_that_keeps_its_outputs_is_exported(tmp_path: Path) -> None:
    model = KeepsOutputs()
    trainer = Trainer(model, arguments(max_steps=2), train_dataset=points(), loss_fn=cross_entropy)
    trainer.fit()
    (kept,) = model.kept
    trainer.export(tmp_path / "model.pt2")
    assert model.kept[0] is kept
    inputs = torch.randn(5, 6)
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(inputs), model.layer(inputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [(1, {"mixed_precision": "bf16", "compile": "eager", "gradient_accumulation_steps": 2}), (2, {})],
)
def test_a_program_computes_what_the_model_does(processes: int, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.pt2"

    def body() -> None:
        trainer = trained(arguments(max_steps=4, **options))
        model = trainer.unwrapped_model
        model.train()
        before, drawn = everything(model), torch.get_rng_state()
        trainer.export(path)
        after = everything(model)
        assert before.keys() == after.keys()
        assert all(
            torch.equal(before[name], after[name]) if isinstance(before[name], Tensor) else before[name] == after[name]
            for name in before
        )
        assert torch.equal(torch.get_rng_state(), drawn)
        if trainer.accelerator.is_main_process:  # whose running statistics are taken
            assert_same_program(path, model)

    run_world(body, num_processes=processes, timeout=100)
    assert [path.name for path in path.parent.iterdir()] == ["model.pt2"]


class Exporting(Modifier):
    """Exports in the midst of training, and keeps the weights of then."""

    def __init__(self, path: Path) -> None:
        self.path, self.weights = path, dict[str, Tensor]()

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.state.step == 3:
            run.trainer.export(self.path, example=torch.randn(1, 6))
            self.weights = {name: value.clone() for name, value in run.trainer.unwrapped_model.state_dict().items()}


def test_the_average_is_exported(tmp_path: Path) -> None:
    during = Exporting(tmp_path / "during.pt2")
    trainer = trained(arguments(max_steps=4, eval_every=3), eval_dataset=points(8), callbacks=[EMA(0.5), during])
    trainer.export("memory://programs/after.pt2")
    (tmp_path / "after.pt2").write_bytes(fsspec.filesystem("memory").cat("programs/after.pt2"))
    assert_same_program(tmp_path / "after.pt2", trainer.unwrapped_model)
    averaged = network()
    averaged.load_state_dict(during.weights)  # of an evaluation, in which the average is in place
    assert_same_program(during.path, averaged)
    with pytest.raises(AssertionError):
        assert_same_program(during.path, trainer.unwrapped_model)


@pytest.mark.slow
def test_a_model_of_transformers_takes_texts_of_any_length(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config: Any = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    rows = [
        {"input_ids": torch.randint(9, (4,)), "attention_mask": torch.ones(4, dtype=torch.long), "labels": i % 2}
        for i in range(4)
    ]
    trainer = Trainer(model, arguments(max_steps=1, gradient_checkpointing=True), train_dataset=rows)
    trainer.fit()
    trainer.export(tmp_path / "bert.pt2", dynamic=(0, 1))
    program: Any = torch.export.load(tmp_path / "bert.pt2").module()
    model.eval()
    for size, length in ((1, 3), (5, 7)):
        batch = {
            "input_ids": torch.randint(9, (size, length)),
            "attention_mask": (torch.arange(length) < 2).long().expand(size, -1),
        }
        with torch.no_grad():
            expected = model(**batch).logits
        torch.testing.assert_close(program(**batch).logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # torch's own
def test_an_onnx_program_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    trainer = trained()
    trainer.export(tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    onnx: Any = pytest.importorskip("onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"))
    runtime: Any = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for rows in (1, 7):
        inputs = torch.randn(rows, 6)
        (actual,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        torch.testing.assert_close(
            torch.from_numpy(actual), outputs(trainer.unwrapped_model, inputs), rtol=1e-5, atol=1e-6
        )


def test_without_onnx_it_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingPackageError, match=r"onnx is not installed.*trainer_lib\[export\]"):
        trained().export(tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


class Choosing(nn.Module):
    """Takes one way or another by what it computes, which no program can."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Trainer], str, dict[str, Any]]] = {
    "an unknown ending": (ConfigurationError, "'model.bin' ends in none of .pt2, .onnx", trained, "model.bin", {}),
    "an unknown format": (ConfigurationError, "Unknown format 'onx'.*'onnx'", trained, "model.onnx", {"format": "onx"}),
    "an ending that torch does not take": (ConfigurationError, ".pt2", trained, "model.bin", {"format": "torch"}),
    "nothing to call it with": (
        ConfigurationError,
        r"export\(path, example=inputs\)",
        lambda: Trainer(network(), arguments()),
        "model.pt2",
        {},
    ),
    "several models": (
        ConfigurationError,
        "There are 2 models",
        lambda: Trainer({"a": network(), "b": network()}, arguments()),
        "model.pt2",
        {},
    ),
    "a model that chooses": (
        UnsupportedError,
        "cannot export this Choosing",
        lambda: Trainer(Choosing(), arguments()),
        "model.pt2",
        {"example": torch.randn(2, 6)},
    ),
    "a scripted model": (
        UnsupportedError,
        r"Save it instead: trainer.unwrapped_model.save\('model.pt'\)",
        lambda: Trainer(torch.jit.script(network()), arguments()),
        "model.pt2",
        {"example": torch.randn(2, 6)},
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_told(case: str, tmp_path: Path) -> None:
    kind, words, make, name, options = REFUSED[case]
    trainer = make()
    with pytest.raises(kind, match=words):
        trainer.export(tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_sharded_model_is_refused_by_name(tmp_path: Path) -> None:
    def body() -> str:
        trainer = Trainer(network(), arguments(fsdp=True), train_dataset=points(), loss_fn=cross_entropy)
        with pytest.raises(PreparationError) as caught:
            trainer.export(tmp_path / "model.pt2")
        return str(caught.value)

    for message in run_world(body, timeout=60):
        assert message.startswith("0.weight is sharded, and an export needs whole weights. Save with save_model")
