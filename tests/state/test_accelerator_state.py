"""The settings of the engine."""

from typing import Any

import pytest

from tests.trainer.tasks import arguments, network, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, FullyShardedDataParallelPlugin, UnsupportedError
from trainer_lib.foundation.environment import patch_environment
from trainer_lib.options.enums import PrecisionType
from trainer_lib.state import AcceleratorState, PartialState


def test_it_knows_what_the_process_knows() -> None:
    state = AcceleratorState(cpu=True)
    assert state.initialized
    assert (state.num_processes, state.device.type, state.is_main_process) == (1, "cpu", True)
    assert repr(state).endswith("Mixed precision type: no\n")
    with pytest.raises(AttributeError):
        state.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("value", ["bf16", "BF16", PrecisionType.BF16])
def test_precision_in_any_form(value: Any) -> None:
    assert AcceleratorState(mixed_precision=value, cpu=True).mixed_precision == "bf16"
    assert AcceleratorState().mixed_precision == "bf16", "all instances are one"


def test_precision_of_the_launcher_and_of_the_script() -> None:
    with patch_environment(accelerate_mixed_precision="fp16"):
        assert AcceleratorState(cpu=True).mixed_precision == "fp16"
        AcceleratorState._reset_state()
        assert AcceleratorState(mixed_precision="no", cpu=True).mixed_precision == "no"


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            "bf61",
            ConfigurationError,
            "Unknown precision 'bf61'. Known: bf16, bf16-true, fp16, fp8, no. Did you mean 'bf16'?",
        ),
        ("fp16-true", UnsupportedError, "mixed_precision='fp16-true' is not supported by this version"),
    ],
)
def test_other_precisions_are_refused(value: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        AcceleratorState(mixed_precision=value, cpu=True)
    assert str(caught.value).startswith(message)
    assert AcceleratorState(mixed_precision="bf16").mixed_precision == "bf16", "the next attempt starts afresh"


def test_another_precision_comes_too_late_until_the_first_is_released() -> None:
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    AcceleratorState(mixed_precision="bf16")
    with pytest.raises(ConfigurationError, match=r"mixed_precision='no' came too late: .*free_memory"):
        AcceleratorState(mixed_precision="no")
    state.release()
    assert AcceleratorState(mixed_precision="no").mixed_precision == "no"


def test_engines_that_are_not_there_are_refused() -> None:
    with (
        patch_environment(accelerate_use_tp="1"),
        pytest.raises(UnsupportedError, match="ACCELERATE_USE_TP requests tensor"),
    ):
        AcceleratorState(cpu=True)


def test_it_forms_and_leaves_the_world() -> None:
    def body() -> list[int]:
        state = AcceleratorState()
        size = state.num_processes
        state.wait_for_everyone()
        state.destroy_process_group()
        return [size, state.group.size]

    assert run_world(body, timeout=60) == [[2, 1]] * 2


def test_reset() -> None:
    AcceleratorState(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state()
    assert PartialState().initialized
    assert AcceleratorState().mixed_precision == "no"
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not PartialState._shared_state


def test_a_missing_attribute_is_the_states_own_and_a_reset_is_told() -> None:
    state, partial = AcceleratorState(cpu=True), PartialState()
    with pytest.raises(
        AttributeError, match=r"^'AcceleratorState' .* 'mixed_precison'. Did you mean 'mixed_precision'"
    ):
        _ = state.mixed_precison
    with pytest.raises(AttributeError, match=r"^'PartialState' .* 'devise'. Did you mean 'device'"):
        _ = partial.devise  # type: ignore[attr-defined]
    AcceleratorState._reset_state(reset_partial_state=True)
    for kind, left in (("AcceleratorState", state), ("PartialState", partial)):
        with pytest.raises(AttributeError, match=rf"`{kind}` object .* 'device'. This happens if `{kind}._reset_state"):
            _ = left.device


def test_an_error_inside_a_property_of_a_state_names_what_the_property_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = property(lambda state: state.device.nothing)
    state, partial = AcceleratorState(cpu=True), PartialState()
    for kind in (PartialState, AcceleratorState):
        monkeypatch.setattr(kind, "broken", broken, raising=False)
        for asked in (state, partial):
            with pytest.raises(AttributeError, match=r"'torch.device' object has no attribute 'nothing'"):
                _ = asked.broken  # type: ignore[attr-defined]


def test_an_accelerator_that_nobody_has_any_more_makes_room_for_other_settings() -> None:
    first = Accelerator(mixed_precision="bf16", cpu=True)
    with pytest.raises(ConfigurationError, match=r"'no' came too late: .* delete the last reference .*free_memory"):
        Accelerator(mixed_precision="no")
    assert Accelerator().mixed_precision == "bf16", "settings are shared while one lives"
    first.keeps_itself = first  # type: ignore[attr-defined]  # a cycle
    del first
    assert Accelerator(mixed_precision="no").mixed_precision == "no"
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"
    assert Accelerator().mixed_precision == "no", "the default, as if there had been no other"


def test_trainers_one_after_the_other_have_settings_of_their_own() -> None:
    plugin = FullyShardedDataParallelPlugin()
    precisions: list[Any] = []
    models = [network() for _ in range(4)]  # which outlive their trainers
    options: list[dict[str, Any]] = [{"mixed_precision": "bf16"}, {}, {"fsdp": plugin}, {}]
    for model, more in zip(models, options, strict=True):
        model_trainer = trainer(arguments(max_steps=2, **more), model=model)
        precisions.append(
            (
                model_trainer.fit().state.step,
                model_trainer.accelerator.mixed_precision,
                model_trainer.accelerator.state.is_fsdp2,
            )
        )
        del model_trainer
    assert precisions == [(2, "bf16", False), (2, "no", False), (2, "no", True), (2, "no", False)]


def test_a_trainer_says_which_settings_another_one_has() -> None:
    other = trainer(arguments(mixed_precision="bf16"))
    with pytest.raises(ConfigurationError, match=r"an Accelerator or Trainer in this process already uses 'bf16'"):
        trainer(arguments())
    other.accelerator.free_memory()
    assert trainer(arguments()).accelerator.mixed_precision == "no"
