"""`optimizer_in_backward` in a Trainer: the same run, with the norm in its log, and errors for what needs gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.tasks import arguments, network, trainer
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    AcceleratorState,
    ConfigurationError,
    FullyShardedDataParallelPlugin,
    MemoryKwargs,
    NonFiniteError,
    PartialState,
    UnsupportedError,
)
from trainer_lib.callbacks import GradientNorms


def _run(in_backward: bool, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    model = network()
    given = arguments(log_every=1, max_grad_norm=None, optimizer_in_backward=in_backward, **options)
    made = trainer(given, model=model)
    history = made.fit().history
    prepared: Any = made.run.model
    state = made.accelerator.strategy.model_state(prepared)
    weights = {name: value.clone() for name, value in state.items()}
    made.accelerator.free_memory()
    return weights, [{name: entry[name] for name in ("loss", "grad_norm")} for entry in history if "loss" in entry]


def test_a_run_is_the_same() -> None:
    weights, history = _run(True)
    expected, ordinary = _run(False)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert history
    for entry, other in zip(history, ordinary, strict=True):
        assert entry == pytest.approx(other, rel=1e-6)


def test_sweeps_before_and_after_a_run_change_neither() -> None:
    def run(in_backward: bool, sweeps: bool = True) -> tuple[Any, list[list[float]]]:
        model, losses = network(), list[list[float]]()
        given = arguments(max_grad_norm=None, optimizer_in_backward=in_backward, max_steps=4)
        made = trainer(given, model=model)
        if sweeps:
            losses.append(made.find_learning_rate(1e-3, 1.0, updates=10).losses)
        made.fit()
        if sweeps:
            losses.append(made.find_learning_rate(1e-3, 1.0, updates=10).losses)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        made.accelerator.free_memory()
        return weights, losses

    weights, losses = run(True)
    torch.testing.assert_close(weights, run(True, sweeps=False)[0], rtol=0, atol=0)
    assert losses == run(False)[1]


def test_a_sharded_run_is_the_same() -> None:
    def body() -> bool:
        (weights, history), (expected, ordinary) = _run(True, fsdp=True), _run(False, fsdp=True)
        norms = [pytest.approx(entry, rel=1e-6) for entry in ordinary] == history
        return norms and all(torch.equal(weights[name], expected[name]) for name in expected)

    assert run_world(body, (), 2, timeout=120) == [True, True]


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    def weights(in_backward: bool, **options: Any) -> Any:
        model = network()
        given = arguments(max_grad_norm=None, optimizer_in_backward=in_backward, save_every=1, **options)
        trainer(given, model=model).fit()
        return model.state_dict()

    whole = weights(True, output_dir=tmp_path / "whole", max_steps=4)
    weights(True, output_dir=tmp_path / "parts", max_steps=2, schedule_steps=4)
    resumed = weights(True, output_dir=tmp_path / "parts", max_steps=4, resume="extend")
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_gradients_that_are_not_finite_end_the_run() -> None:
    model = network()
    first: Any = next(module for module in model.modules() if isinstance(module, nn.Linear))
    before = first.weight.detach().clone()
    first.weight.register_hook(lambda gradient: gradient * float("nan"))
    made = trainer(arguments(max_grad_norm=None, optimizer_in_backward=True), model=model)
    with pytest.raises(NonFiniteError, match="the other weights are updated already") as caught:
        made.fit()
    assert "weight" in str(caught.value)
    torch.testing.assert_close(first.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0: clipping needs the norm .* Give max_grad_norm=None"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2: no gradients stay"),
        ({"per_device_train_batch_size": "auto"}, 'per_device_train_batch_size="auto": parts'),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16': its scaler"),
        ({"on_nonfinite": "skip"}, 'on_nonfinite="skip": NaN'),
        ({"loss_spike": 3.0}, "loss_spike=3.0: a spike"),
    ],
)
def test_arguments_that_need_gradients_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"optimizer_in_backward=True does not work with {message}"):
        arguments(**{"max_grad_norm": None, "optimizer_in_backward": True, **options})


def test_callbacks_that_need_gradients_are_refused() -> None:
    given = arguments(max_grad_norm=None, optimizer_in_backward=True)
    with pytest.raises(UnsupportedError, match="callbacks that need gradients"):
        trainer(given, callbacks=[GradientNorms()]).fit()


def test_blocks_that_recompute_and_offload_at_once_are_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    for options, message in (
        ({"activation_offload": True}, "activation_offload=True does not work with fsdp.activation_checkpointing=True"),
        ({"gradient_checkpointing": True}, "and fsdp.activation_checkpointing=True set the same thing"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            arguments(fsdp=plugin, **options)
    memory = MemoryKwargs(activation_offload=True)
    with pytest.raises(ConfigurationError, match="activation_offload=True does not work with activation_checkpointing"):
        Accelerator(cpu=True, kwargs_handlers=[memory], fsdp_plugin=plugin)
    PartialState._reset_state()
    AcceleratorState._reset_state()
    given = arguments(gradient_checkpointing=True)
    with pytest.raises(ConfigurationError, match="the accelerator was made with options that save activations too"):
        trainer(given, accelerator=Accelerator(cpu=True, kwargs_handlers=[memory]))


def test_an_accelerator_that_was_made_otherwise_is_refused() -> None:
    given = arguments(max_grad_norm=None, optimizer_in_backward=True)
    with pytest.raises(ConfigurationError, match="optimizer_in_backward=True contradicts the accelerator"):
        trainer(given, accelerator=Accelerator(cpu=True))
