"""The same random numbers in every run, and on every process where they have to be the same."""

import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from trainer_lib import ConfigurationError, UnsupportedError, set_seed
from trainer_lib.launchers import run_forked
from trainer_lib.options.enums import RNGType
from trainer_lib.seeding import synchronize_rng_state, synchronize_rng_states
from trainer_lib.state import PartialState, is_initialized

HAS_ACCELERATOR = torch.accelerator.is_available()


def draw() -> list[float]:
    numbers = [random.random(), float(np.random.rand()), float(torch.rand(1)), float(torch.randn(1))]
    if HAS_ACCELERATOR:
        numbers.append(float(torch.rand(1, device=torch.accelerator.current_accelerator())))
    return numbers


def test_every_generator_is_seeded() -> None:
    assert set_seed(42) is None  # type: ignore[func-returns-value]
    first = draw()
    second = draw()
    set_seed(42)
    assert draw() == first != second
    set_seed(43)
    assert all(ours != theirs for ours, theirs in zip(draw(), first, strict=True))
    assert not is_initialized(), "a plain seed needs no world"


def test_seeds_are_what_other_libraries_make_of_them() -> None:
    set_seed(7)
    assert random.random() == random.Random(7).random()
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(7)).item()
    assert np.random.rand() == np.random.RandomState(7).rand()


@pytest.mark.parametrize("seed", [0, 2**32 - 1, np.int64(5), torch.tensor(5)])
def test_seeds_may_be_any_kind_of_whole_number(seed: Any) -> None:
    set_seed(seed)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", None, True])
def test_other_seeds_are_refused(seed: Any) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigurationError, match=r"seed must be a whole number from 0 to 4294967295 \(got"):
        set_seed(seed)
    assert torch.equal(torch.get_rng_state(), before)


def test_each_process_may_have_a_seed_of_its_own() -> None:
    def body(device_specific: bool) -> list[float]:
        set_seed(5, device_specific=device_specific)
        return draw()

    first, second = run_forked(body, (False,), timeout=60)
    assert first == second
    first, second = run_forked(body, (True,), timeout=60)
    assert first != second
    set_seed(6)
    assert draw() == second

    def overflow() -> str:
        PartialState(cpu=True)
        try:
            set_seed(2**32 - 1, device_specific=True)
        except ConfigurationError as error:
            return str(error)
        return ""

    first, second = run_forked(overflow, timeout=60)
    assert first == ""
    assert "seed plus the rank must be" in second


def test_deterministic_means_torch_too() -> None:
    def body() -> list[Any]:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.backends.cudnn.benchmark = True
        set_seed(1)
        before = torch.are_deterministic_algorithms_enabled()
        set_seed(1, deterministic=True)
        return [
            before,
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ["CUBLAS_WORKSPACE_CONFIG"],
        ]

    assert run_forked(body, num_processes=1, timeout=60) == [[False, True, False, ":4096:8"]]


def test_generators_become_those_of_the_first_process() -> None:
    def body() -> list[float]:
        rank = PartialState().process_index
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(10 + rank)
        synchronize_rng_states(["torch", RNGType.GENERATOR], generator)
        drawn = [torch.rand(1).item(), torch.rand(1, generator=generator).item()]
        torch.manual_seed(rank)
        generator.manual_seed(10 + rank)
        synchronize_rng_state()
        synchronize_rng_state(generator=generator)
        return [*drawn, torch.rand(1).item(), torch.rand(1, generator=generator).item()]

    expected = [torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() for seed in (0, 10)]
    assert run_forked(body, num_processes=4, timeout=60) == [expected * 2] * 4


def test_generators_that_are_not_there_are_refused() -> None:
    PartialState(cpu=True)
    with pytest.raises(ConfigurationError, match=r"Unknown generator 'numpy'. Known: .*torch"):
        synchronize_rng_states(["numpy"])
    with pytest.raises(ConfigurationError, match=r"Give generator=torch.Generator\(\)"):
        synchronize_rng_states(["generator"])
    with pytest.raises(UnsupportedError, match=r"rng_types has 'xla', .*no xla device. Available: torch, generator"):
        synchronize_rng_state("xla")


def test_generators_of_devices_that_are_not_there_are_left_out_of_a_list(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    synchronize_rng_states(["xla", "torch"])
    assert [record.message for record in caplog.records] == [
        "rng_types: 'xla' is left out, since this machine has no such device."
    ]


@pytest.mark.skipif(not HAS_ACCELERATOR, reason="needs an accelerator")
def test_the_accelerators_generator() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    PartialState()
    set_seed(3)
    synchronize_rng_states([device.type])
    first = torch.rand(2, device=device)
    set_seed(3)
    assert torch.equal(torch.rand(2, device=device), first)
