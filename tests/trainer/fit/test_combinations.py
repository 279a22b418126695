"""Modifiers, precisions and adapters on several ranks, under accumulation and with a short tail, as on one process."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.callbacks.by_hand import Named, assert_close, assert_equal, trained
from tests.callbacks.test_observers import all_of
from tests.callbacks.test_weight_averaging import uneven
from tests.trainer import hugging_face
from tests.trainer.tasks import network, points
from tests.worlds import run_world
from trainer_lib import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, ParallelismConfig
from trainer_lib.callbacks import (
    EMA,
    SAM,
    SWA,
    AccumulationSchedule,
    AdaptiveClipping,
    ClipValue,
    Freeze,
    GradualUnfreezing,
    LabelSmoothing,
)
from trainer_lib.events import Callback

# 8 samples an update, of which the last has 6: a rank has a whole batch in it and one that only repeats samples.
SAMPLES = 46
TWO: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
FOUR: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "parallelism": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
}
FULL_RANK = {"matrix_approximation_rank": 16, "start_powerSGD_iter": 2, "min_compression_rate": 0.01}

MODIFIERS: dict[str, Callable[[], Callback]] = {
    "none": Callback,
    "value": lambda: ClipValue(0.02),
    "adaptive": lambda: AdaptiveClipping(0.1),
    "smoothing": lambda: LabelSmoothing(0.2),
    "freeze": lambda: Freeze("0.*", until="4 steps"),
    "unfreeze": lambda: GradualUnfreezing("2.*", "0.*", every="3 steps"),
    "sam": lambda: SAM(0.5),
    "asam": lambda: SAM(2.0, adaptive=True),
    "ema": lambda: EMA(0.5),
    "swa": lambda: SWA(0.2, every=1),
    "schedule": lambda: AccumulationSchedule({0: 1, 1: 2}),
}


def sharding() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(min_num_params=1, auto_wrap_policy="size_based_wrap")


def modified(**options: Any) -> dict[str, Named]:
    """Return the weights after a run with each modifier, of a network whose shards are uneven."""
    outcomes: dict[str, Named] = {}
    rows = options.get("per_device_train_batch_size")
    for name, make in MODIFIERS.items():
        more: dict[str, Any] = {"num_train_epochs": 2 if name == "schedule" else 1, **options}
        if rows is not None:
            more["fsdp"] = sharding()
        if rows is not None and name == "schedule":  # it says itself how many batches an update is of
            more |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2 * rows}
        outcomes[name] = trained(make(), model=uneven(), train_dataset=points(SAMPLES), max_grad_norm=0.5, **more)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "options"), [(2, TWO), (4, FOUR)], ids=["sharded", "hybrid"])
def test_modifiers_of_uneven_shards_are_those_of_one_process(ranks: int, options: dict[str, Any]) -> None:
    expected = modified()
    for actual in run_world(lambda: modified(**options), (), ranks, timeout=120):
        for name, weights in expected.items():
            assert_close(actual[name], weights)


@pytest.mark.parametrize(
    ("hook", "options", "tolerance"),
    [
        ("fp16", {}, 1e-4),
        ("bf16", {}, 1e-3),
        pytest.param("batched_power_sgd", FULL_RANK, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_compressed_gradients_of_accumulated_updates(hook: str, options: dict[str, Any], tolerance: float) -> None:
    def two() -> Named:
        ddp = DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options)  # pyright: ignore[reportArgumentType]
        return trained(train_dataset=points(SAMPLES), ddp=ddp, **TWO)

    expected = trained(train_dataset=points(SAMPLES))
    first, second = run_world(two)
    assert_equal(first, second)
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp"])
def test_callbacks_that_only_look_change_nothing_on_two_ranks(is_sharded: bool) -> None:
    def run(looks: bool) -> Named:
        with tempfile.TemporaryDirectory() as folder:
            return trained(
                *(all_of(Path(folder)) if looks else []),
                model=network(dropout=0.2),
                train_dataset=points(SAMPLES),
                eval_dataset=points(13),
                eval_every=3,
                log_every=2,
                save_every=3,
                optimizer="adamw",
                output_dir=folder,
                fsdp=sharding() if is_sharded else None,
                **TWO,
            )

    for without, with_them in zip(run_world(run, (False,)), run_world(run, (True,)), strict=True):
        assert_equal(with_them, without)


@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
def test_fp16_with_accumulation_on_two_ranks(is_sharded: bool) -> None:
    """The scaler leaves out updates that overflow, which are the same ones on two ranks."""

    def two() -> Named:
        return trained(
            model=uneven(),
            train_dataset=points(SAMPLES),
            mixed_precision="fp16",
            fsdp=sharding() if is_sharded else None,
            **TWO,
        )

    expected = trained(model=uneven(), train_dataset=points(SAMPLES), mixed_precision="fp16")
    whole = trained(model=uneven(), train_dataset=points(SAMPLES))
    first, second = run_world(two)
    assert_equal(first, second)
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=2e-3)
        torch.testing.assert_close(value, whole[name], rtol=0, atol=2e-3)


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = hugging_face.model()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks by the old name
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))


def adapters(**options: Any) -> Named:
    outcome = trained(
        model=adapted(),
        train_dataset=hugging_face.rows(22, ragged=True),
        loss_fn=None,
        gradient_checkpointing=True,
        learning_rate=0.1,
        **options,
    )
    return {name: weight for name, weight in outcome.items() if "lora" in name}


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp"])
def test_adapters_with_activation_checkpointing_and_accumulation(is_sharded: bool) -> None:
    expected = adapters()
    fsdp = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    options: dict[str, Any] = {**TWO, "fsdp": fsdp if is_sharded else None}
    assert expected
    for actual in run_world(lambda: adapters(**options), (), 2, timeout=120):
        assert_close(actual, expected)
