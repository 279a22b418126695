"""Options of a run that change how it is computed, and that it leaves no trace of."""

import gc
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, UnsupportedError
from trainer_lib.events import Callback, Run


class Looks(Callback):
    """Looks at torch's settings while training."""

    def on_step_end(self, run: Run) -> None:
        del run
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.precision = torch.get_float32_matmul_precision()
        self.anomaly = torch.is_anomaly_enabled()
        self.collects = gc.isenabled()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_settings_of_torch_hold_while_training_and_no_longer() -> None:
    looks = Looks()
    options = arguments(max_steps=2, deterministic=True, tf32=True, use_cpu=False, detect_anomaly=True, gc_every=1)
    trainer(options, callbacks=[looks]).fit()
    assert (looks.deterministic, looks.precision, looks.anomaly, looks.collects) == (True, "high", True, False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.is_anomaly_enabled()
    assert gc.isenabled()


def test_a_process_that_only_warns_of_random_results_does_so_again_after_a_run() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        trainer(arguments(max_steps=1, deterministic=True, use_cpu=False)).fit()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradient_checkpointing_changes_nothing_but_memory() -> None:
    def blocks() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(6, 2))

    plain, saving = blocks(), blocks()
    trainer(arguments(), model=plain).fit()
    trainer(arguments(gradient_checkpointing=True), model=saving).fit()
    torch.testing.assert_close(plain.state_dict(), saving.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "gradient_checkpointing_policy": "matmul"},
        {"activation_offload": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_policy": ["aten.addmm"], "activation_offload": True},
    ],
)
def test_what_is_kept_of_activations_changes_nothing(options: dict[str, Any]) -> None:
    def weights(**options: Any) -> Any:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)]
        model = nn.Sequential(*layers, nn.Linear(6, 2))
        trainer(arguments(max_steps=3, **options), model=model).fit()
        return model.state_dict()

    torch.testing.assert_close(weights(**options), weights(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_checkpointing_policy": "matmul"}, "gradient_checkpointing_policy='matmul' has no effect without"),
        ({"gradient_checkpointing_policy": "dots"}, 'gradient_checkpointing_policy must be "matmul", "attention"'),
        ({"gradient_checkpointing_policy": print}, "A function goes to the engine"),
    ],
)
def test_wrong_policies_of_activation_checkpointing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments(**options)


def test_gradient_checkpointing_of_every_second_block() -> None:
    def runs(**options: Any) -> list[int]:
        calls = [0] * 3
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)], nn.Linear(6, 2))
        for index in range(3):

            def count(*_: Any, index: int = index) -> None:
                calls[index] += 1

            cast("Any", model[index])[0].register_forward_hook(count)
        trainer(arguments(max_steps=1, **options), model=model).fit()
        return calls

    once = runs()
    assert runs(gradient_checkpointing=True, gradient_checkpointing_every=2) == [2 * once[0], once[1], 2 * once[2]]
    with pytest.raises(ConfigurationError, match="gradient_checkpointing_every=2 has no effect without"):
        arguments(gradient_checkpointing_every=2)


@pytest.mark.slow
def test_compiled() -> None:
    plain, compiled = network(), network()
    first = trainer(arguments(log_every=1), model=plain)
    losses = [entry["loss"] for entry in first.fit().history]
    first.accelerator.free_memory()
    result = trainer(arguments(log_every=1, compile="aot_eager"), model=compiled)
    assert [entry["loss"] for entry in result.fit().history] == pytest.approx(losses, rel=1e-6)
    result.accelerator.free_memory()
    torch._dynamo.reset()


def test_synchronized_batch_norm_needs_an_accelerator() -> None:
    def body() -> str:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        with pytest.raises(UnsupportedError, match="not on CPUs") as caught:
            trainer(arguments(sync_batchnorm=True), model=model).fit()
        return str(caught.value)

    assert len(run_world(body, (), 2, timeout=60)) == 2


def test_seeds_make_runs_equal() -> None:
    def losses(**options: int | None) -> list[float]:
        result = trainer(arguments(log_every=1, **options), model=network(dropout=0.5)).fit()
        return [entry["loss"] for entry in result.history]

    assert losses() == losses() == losses(seed=42)
    assert losses(seed=1) != losses(seed=2)
    # The order of the data alone.
    assert losses(seed=1, data_seed=7) != losses(seed=1)


def test_bf16_trains_nearly_the_same() -> None:
    def final(**options: str) -> float:
        model_trainer = trainer(arguments(num_train_epochs=4, **options), eval_dataset=points(20))
        loss = model_trainer.fit().metrics["eval_loss"]
        model_trainer.accelerator.free_memory()
        return loss

    assert final(mixed_precision="bf16") == pytest.approx(final(), rel=0.05)


def test_processes_draw_different_numbers() -> None:
    class Draws(Callback):
        def on_step_end(self, run: Run) -> None:
            del run
            self.drawn = float(torch.rand(()))

    def body() -> float:
        draws = Draws()
        trainer(arguments(max_steps=1), callbacks=[draws]).fit()
        return draws.drawn

    first, second = run_world(body, (), 2, timeout=60)
    assert first != second
