"""LOMO and AdaLomo by name: the numbers of SGD and of lomo-optim, the same run after a resume and on shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.tasks import arguments, network, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, UnsupportedError
from trainer_lib.foundation.errors import NonFiniteError
from trainer_lib.options.memory_options import MemoryKwargs
from trainer_lib.trainer.optim.lomo import AdaLomo, Lomo


def weights_after(optimizer: str, **options: Any) -> dict[str, Tensor]:
    model = network()
    made = trainer(arguments(optimizer=optimizer, max_grad_norm=None, **options), model=model)
    made.fit()
    gradients = [parameter.grad for parameter in model.parameters() if optimizer != "sgd"]
    prepared: Any = made.run.model
    state = made.accelerator.strategy.model_state(prepared)
    made.accelerator.free_memory()
    assert gradients == [None] * len(gradients)
    return {name: value.clone() for name, value in state.items()}


def test_lomo_trains_as_sgd_does() -> None:
    torch.testing.assert_close(weights_after("lomo"), weights_after("sgd"), rtol=0, atol=0)


def test_adalomo_has_the_numbers_of_lomo_optim(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("lomo_optim")
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)  # where the package keeps its states

    def by_hand(steps: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        step = steps(model)
        for number in range(4):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
            step(model(inputs).square().mean(), 0.1 / (1 + number))
        return [parameter.detach() for parameter in model.parameters()]

    def ours(model: nn.Module) -> Any:
        optimizer = AdaLomo(model.parameters(), weight_decay=0.3, clip_grad_value=0.05)

        def step(loss: Tensor, rate: float) -> None:
            loss.backward()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

        return step

    options = {"loss_scale": None, "weight_decay": 0.3, "clip_grad_value": 0.05}
    theirs = by_hand(lambda model: package.AdaLomo(model, **options).fused_backward)
    torch.testing.assert_close(by_hand(ours), theirs, rtol=1e-6, atol=1e-7)


def test_a_resumed_run_of_adalomo_is_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_every": 1, "learning_rate": 0.1}
    whole = weights_after("adalomo", output_dir=tmp_path / "whole", max_steps=4, **options)
    weights_after("adalomo", output_dir=tmp_path / "parts", max_steps=2, schedule_steps=4, **options)
    resumed = weights_after("adalomo", output_dir=tmp_path / "parts", max_steps=4, resume="extend", **options)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_shards_are_updated_as_whole_weights_are() -> None:
    def body(**options: Any) -> list[dict[str, Tensor]]:
        return [weights_after(name, learning_rate=0.1, **options) for name in ("lomo", "adalomo")]

    alone = body(per_device_train_batch_size=8)
    shards = run_world(lambda: body(per_device_train_batch_size=4, fsdp=True), (), 2, timeout=120)[0]
    torch.testing.assert_close(shards, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            r"optimizer='lomo' does not work with max_grad_norm=1.0: clipping .* Give max_grad_norm=None, or take ano",
        ),
        ({"max_grad_norm": None, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2: no gradients stay"),
    ],
)
def test_arguments_that_need_gradients_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments(optimizer="lomo", **options)


def test_wrong_values_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigurationError, match=r"clip_grad_value must be above 0, or None .got 0"):
        Lomo([weight], clip_grad_value=0)
    with pytest.raises(ConfigurationError, match=r"decay_rate must be below 0 .got 0\.8"):
        AdaLomo([weight], decay_rate=0.8)


def test_bfloat16_weights_are_computed_in_single_precision() -> None:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 2.0)
    AdaLomo([weight], lr=0.25).step()
    assert weight.dtype is torch.bfloat16
    assert weight.tolist() == [[0.75, 0.75], [0.75, 0.75]]


def test_a_loaded_state_of_bfloat16_weights_is_not_rounded() -> None:
    def optimizer() -> AdaLomo:
        torch.manual_seed(0)
        return AdaLomo(nn.Linear(5, 3, dtype=torch.bfloat16).parameters(), lr=0.1)

    def step(adalomo: AdaLomo, seed: int) -> None:
        for parameter in adalomo.param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        adalomo.step()

    whole, resumed = optimizer(), optimizer()
    step(whole, 0)
    resumed.load_state_dict(whole.state_dict())
    for mine, other in zip(whole.state.values(), resumed.state.values(), strict=True):
        torch.testing.assert_close(other, mine, rtol=0, atol=0)


def test_an_accelerator_that_keeps_gradients_is_refused_by_the_name_of_the_optimizer() -> None:
    given = arguments(optimizer="lomo", max_grad_norm=None)
    message = r"optimizer='lomo' contradicts the accelerator.*Take another optimizer, or make .*in_backward=True"
    with pytest.raises(ConfigurationError, match=message):
        trainer(given, accelerator=Accelerator(cpu=True))


def test_errors_of_a_run_name_the_optimizer_that_asks_for_it() -> None:
    model = network()
    weight = next(iter(model.parameters()))
    weight.register_hook(lambda gradient: gradient * float("nan"))
    made = trainer(arguments(optimizer="adalomo", max_grad_norm=None), model=model)
    with pytest.raises(NonFiniteError, match=r"With optimizer='adalomo' .*, or take another optimizer, so that no"):
        made.fit()
    made.accelerator.free_memory()

    def body() -> str:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[MemoryKwargs(optimizer_in_backward=True)])
        model = network()
        with pytest.raises(UnsupportedError) as caught:
            accelerator.prepare(model, Lomo(model.parameters()))
        accelerator.free_memory()
        return str(caught.value)

    for message in run_world(body, num_processes=2):
        assert message.startswith("optimizer='lomo' updates parameters while the backward runs, and DDP reduces")
        assert message.endswith("(fsdp=True, or an fsdp_plugin), or take another optimizer.")
