"""Parts of sequences with DeepSpeed's ZeRO: the numbers of one process that has whole sequences."""

import functools
import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.strategies.test_deepspeed import needs_deepspeed
from tests.trainer.fit.test_sequence_parts import llama, trained
from trainer_lib import Accelerator, DeepSpeedPlugin, ParallelismConfig
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.launchers import run_forked
from trainer_lib.utils import DeepSpeedSequenceParallelConfig

LENGTH = 16


@pytest.fixture(scope="module")
def package() -> Any:
    """Import DeepSpeed once, for all forked processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # imports inductor
        return importlib.import_module("deepspeed")


def parallelism(**sizes: Any) -> ParallelismConfig:
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length=LENGTH, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_backend="deepspeed", sp_handler=handler, **sizes)


def mean_over_ranks(model: Any, targets: Tensor, outputs: Any, group: Any) -> Tensor:
    """Return the loss as a script for Ulysses computes it: the mean over the targets of all parts."""
    loss = model.loss_function(
        logits=outputs.logits, labels=None, shift_labels=targets, vocab_size=model.config.vocab_size
    )
    losses = differentiable.all_gather(loss, group=group)
    counts = differentiable.all_gather((targets != -100).sum(), group=group)
    total = sum(loss * count for loss, count in zip(losses, counts, strict=True) if count > 0)
    assert isinstance(total, Tensor)
    return total / torch.stack(list(counts)).sum()


def script(stage: int | None, sizes: dict[str, int]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train a model of transformers as a script for Ulysses does; without a stage, as one for whole sequences."""
    parts = llama()
    plugin = None if stage is None else DeepSpeedPlugin(zero_stage=stage)
    config = None if stage is None else parallelism(**sizes)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=config)
    rows = [sample["input_ids"].repeat(4)[:LENGTH] for sample in parts["train_dataset"]]
    data: Any = [{"input_ids": row, "labels": torch.where(row % 3 == 0, -100, row)} for row in rows]
    loader: Any = DataLoader(data, batch_size=4 // sizes.get("dp_replicate_size", 1))
    network = parts["model"]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    held_out = accelerator.deepspeed_ulysses_dl_adapter(DataLoader(data, batch_size=8), model) if stage else None
    losses: list[float] = []
    evaluations: list[float] = []
    for batch in loader:
        if held_out is not None:  # an evaluation in the body of the loop, on parts of other sequences
            evaluations.append(evaluated(model, held_out))
        weight: Tensor | None = None
        if stage is None:
            loss = model(**batch).loss
        else:
            assert batch["input_ids"].shape[1] * sizes["sp_size"] == LENGTH
            assert "labels" not in batch
            mesh = accelerator.torch_device_mesh
            assert mesh is not None
            targets = batch.pop("shift_labels")
            outputs = model(**batch)
            if mesh["sp"].size() == accelerator.num_processes:
                loss = mean_over_ranks(accelerator.unwrap_model(model), targets, outputs, mesh["sp"].get_group())
            else:  # where the function of torch mistakes the ranks of a group
                loss = F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), reduction="sum")
                weight = (targets != -100).sum()
        if weight is None:
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
            accelerator.backward(loss)
        else:
            losses.append((accelerator.reduce(loss.detach()) / accelerator.reduce(weight)).item())
            accelerator.backward(loss, weight=weight)
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return losses, evaluations, weights


@functools.cache
def whole() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return what one process finds with whole sequences."""
    return run_forked(script, (None, {}), 1, timeout=100)[0]


def evaluated(model: Any, loader: Any) -> float:
    with torch.no_grad():
        for batch in loader:
            targets = batch.pop("shift_labels")
            return float(model(**batch).logits.sum() + targets.sum())
    return 0.0


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional")  # scripts use it
@pytest.mark.parametrize(
    ("stage", "sizes"), [(3, {"sp_size": 2}), (2, {"sp_size": 2, "dp_replicate_size": 2}), (1, {"sp_size": 4})]
)
def test_a_script_for_ulysses_trains_as_one_process_does(stage: int, sizes: dict[str, int]) -> None:
    alone = whole()
    world = sizes["sp_size"] * sizes.get("dp_replicate_size", 1)
    results = run_forked(script, (stage, sizes), world, timeout=200)
    assert len(alone[0]) == 4
    for losses, evaluations, _ in results:
        assert losses == pytest.approx(alone[0], rel=2e-6)
        assert len(evaluations) == 4
    weights = results[0][2]
    assert list(weights) == list(alone[2])
    for name, value in alone[2].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_trainer_has_the_numbers_of_whole_sequences() -> None:
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}

    def body(sizes: dict[str, Any]) -> list[tuple[float, float]]:
        options: dict[str, Any] = {} if not sizes else {"deepspeed": config}
        return trained(llama(), ParallelismConfig(**sizes) if sizes else None, max_steps=3, **options)

    (expected,) = run_forked(body, ({},), 1, timeout=100)
    for logs in run_forked(body, ({"sp_size": 2},), 2, timeout=100):
        for (loss, norm), (expected_loss, expected_norm) in zip(logs, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert norm == pytest.approx(expected_norm, rel=2e-6)


def test_an_adapter_needs_ranks_that_share_sequences() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match=r"each rank has whole ones here. Give .*sp_size"):
        accelerator.deepspeed_ulysses_dl_adapter(
            DataLoader(torch.utils.data.TensorDataset(torch.ones(2))), torch.nn.Linear(1, 1)
        )


def test_sizes_that_split_a_model_are_refused() -> None:
    def body() -> str:
        plugin = DeepSpeedPlugin(zero_stage=0)
        with pytest.raises(UnsupportedError) as error:
            Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=ParallelismConfig(tp_size=2))
        assert not dist.is_initialized() or dist.get_world_size() == 2
        return str(error.value)

    assert all("tp_size=2 splits the model, and DeepSpeed" in message for message in run_forked(body, (), 2))
