"""Scripts that make DeepSpeed's engine themselves, and DeepSpeed's optimizers for CPUs."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.strategies.test_deepspeed import needs_deepspeed
from trainer_lib import ConfigurationError, MissingPackageError, UnsupportedError
from trainer_lib.foundation.imports import is_deepspeed_available
from trainer_lib.launchers import run_forked
from trainer_lib.state import PartialState
from trainer_lib.strategies.deepspeed.deepspeed_runtime import started
from trainer_lib.strategies.deepspeed.engine_model import EngineModel
from trainer_lib.utils.deepspeed import DeepSpeedEngineWrapper, map_pytorch_optim_to_deepspeed

INPUTS = torch.arange(24.0).reshape(6, 4) / 10  # 3 micro-batches: the second window is short


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


@needs_deepspeed
@pytest.mark.slow
def test_a_wrapped_engine_updates_where_a_window_ends() -> None:
    def body() -> tuple[list[float], list[float | None]]:
        state = PartialState(cpu=True)
        state.form_group()
        package = started(state.device)
        network = model()
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0, "steps_per_print": None,
        }  # fmt: skip
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, *_ = package.initialize(model=network, optimizer=optimizer, config=config, dist_init_required=False)
        wrapped = DeepSpeedEngineWrapper(engine)
        norms: list[float | None] = []
        for number in range(3):
            batch = INPUTS[2 * number + dist.get_rank()]
            wrapped.backward(engine(batch).square().mean(), sync_gradients=number != 0)
            norms.append(wrapped.get_global_grad_norm())
        engine.destroy()
        return network.weight.flatten().tolist(), norms

    by_hand = model()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    expected: list[Any] = []
    for window in (INPUTS[:4], INPUTS[4:]):
        loss = by_hand(window).square().mean()
        (loss if len(window) == 4 else loss / 2).backward()  # the engine divides by the steps of a whole window
        expected.append(torch.nn.utils.get_total_norm([p.grad for p in by_hand.parameters() if p.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
    for weights, norms in run_forked(body, (), 2, timeout=100):
        assert weights == pytest.approx(by_hand.weight.flatten().tolist(), rel=1e-6)
        assert norms[1:] == pytest.approx([float(norm) for norm in expected], rel=1e-5)


def test_a_prepared_model_is_no_engine() -> None:
    for value in (None, model(), EngineModel(model())):
        with pytest.raises(ConfigurationError, match=r"needs the engine that deepspeed.initialize returns .got"):
            DeepSpeedEngineWrapper(value)


def test_methods_of_an_engine_say_what_does_the_same() -> None:
    prepared: Any = EngineModel(model())
    with pytest.raises(
        AttributeError, match=r"no 'save_16bit_model' of DeepSpeed's engine\. Use accelerator.save_model"
    ):
        prepared.save_16bit_model("folder")
    with pytest.raises(AttributeError, match=r"Use accelerator\.backward"):
        prepared.backward(torch.ones(()))
    assert not hasattr(prepared, "load_checkpoint")
    prepared.module.step = 3
    assert prepared.step == 3
    with pytest.raises(AttributeError, match="object has no attribute 'unknown'"):
        _ = prepared.unknown


def test_an_optimizer_without_a_counterpart_is_returned() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    assert map_pytorch_optim_to_deepspeed(optimizer) is optimizer


@pytest.mark.skipif(is_deepspeed_available(), reason="DeepSpeed is installed")
def test_without_deepspeed_the_extra_is_named() -> None:
    with pytest.raises(MissingPackageError, match=r"trainer_lib\[deepspeed\]"):
        map_pytorch_optim_to_deepspeed(torch.optim.AdamW(model().parameters()))


@needs_deepspeed
def test_options_without_a_counterpart_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="DeepSpeedCPUAdam has no amsgrad"):
        map_pytorch_optim_to_deepspeed(torch.optim.AdamW(model().parameters(), amsgrad=True))


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad])
def test_optimizers_for_cpus_train_as_those_of_torch(kind: Any, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--soak"):
        pytest.skip("DeepSpeed compiles its optimizers, for minutes: --soak")
    weights: list[Any] = []
    for mapped in (False, True):
        network = model()
        groups: Any = [{"params": [network.weight], "lr": 0.3}, {"params": [network.bias], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=0.1, weight_decay=0.2)
        optimizer = map_pytorch_optim_to_deepspeed(optimizer) if mapped else optimizer
        for _ in range(3):
            network(INPUTS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append((type(optimizer).__name__, network.weight.detach(), network.bias.detach()))
    assert weights[1][0].startswith("DeepSpeedCPU")
    torch.testing.assert_close(weights[1][1:], weights[0][1:], rtol=1e-5, atol=1e-6)
