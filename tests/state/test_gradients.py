"""The window of gradients, as its readers see it."""

from dataclasses import dataclass

import pytest
import torch

from trainer_lib import Accelerator, ConfigurationError, GradientAccumulationPlugin
from trainer_lib.state import GradientState
from trainer_lib.state.accumulation_window import GradientWindow, sum_from_mean
from trainer_lib.state.gradient_state import Rows


@dataclass(eq=False)
class Loader:
    end_of_dataloader: bool = False
    others_read_on: bool = False
    remainder: int = -1
    rows: Rows | None = None


def test_defaults() -> None:
    state = GradientState()
    assert state.initialized
    assert (state.num_steps, state.sync_gradients, state.adjust_scheduler, state.sync_with_dataloader) == (
        1,
        True,
        True,
        True,
    )
    assert (state.active_dataloader, state.in_dataloader, state.end_of_dataloader, state.remainder) == (
        None,
        False,
        False,
        -1,
    )
    assert not state.is_xla_gradients_synced
    assert "Sync Gradients: True\n" in repr(state)


def test_all_instances_are_one_and_a_new_plugin_counts() -> None:
    first = GradientState()
    GradientState(
        GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False, sync_with_dataloader=False)
    ).sync_gradients = False
    assert (first.num_steps, first.adjust_scheduler, first.sync_with_dataloader) == (4, False, False)
    assert not first.sync_gradients
    assert GradientState().num_steps == 4
    GradientState._reset_state()
    assert GradientState().num_steps == 1


def test_options_of_accumulation_are_read_and_set_by_name() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(sync_each_batch=True))
    state = accelerator.gradient_state
    assert state.plugin_kwargs["sync_each_batch"]
    assert state.plugin_kwargs.get("num_steps") == 1
    state.plugin_kwargs.update({"num_steps": 4, "sync_with_dataloader": False})
    assert (accelerator.gradient_accumulation_steps, state.sync_with_dataloader) == (4, False)


def test_a_loop_that_counts_its_micro_batches_sets_which_of_them_updates() -> None:
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    after = []
    for is_last in (False, True):
        accelerator.gradient_state._set_sync_gradients(is_last)
        accelerator.backward(weight / 2)
        optimizer.step()
        after.append((accelerator.sync_gradients, weight.item()))
    assert after == [(False, 0.0), (True, -1.0)]


def test_the_innermost_loader_is_the_active_one() -> None:
    state = GradientState()
    outer, inner = Loader(remainder=3), Loader(end_of_dataloader=True, remainder=5)
    state.add_dataloader(outer)
    state.add_dataloader(inner)
    assert state.active_dataloader is inner
    assert state.dataloader_references == [None, outer, inner]
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (True, True, 5)
    state.remove_dataloader(outer)  # abandoned in the middle, and closed late
    assert state.active_dataloader is inner
    state.remove_dataloader(inner)
    state.remove_dataloader(inner)
    assert not state.in_dataloader


def test_a_loader_may_be_read_in_two_loops_at_a_time() -> None:
    state, loader = GradientState(), Loader()
    state.add_dataloader(loader)
    state.add_dataloader(loader)
    state.remove_dataloader(loader)
    assert state.active_dataloader is loader
    between = Loader()
    state.add_dataloader(between)
    state.add_dataloader(loader)
    state.remove_dataloader(loader)  # of the inner loop, which ends first
    assert state.active_dataloader is between


@pytest.mark.parametrize(
    ("waits_for_all", "others_read_on", "ends"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_the_end_of_this_ranks_data_ends_a_window_unless_it_waits_for_all(
    waits_for_all: bool, others_read_on: bool, ends: bool
) -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=4))
    window = GradientWindow(state, num_ranks=2)
    window.waits_for_all = waits_for_all
    state.add_dataloader(Loader(end_of_dataloader=True, others_read_on=others_read_on))
    window.begin_micro_batch(())
    assert state.sync_gradients is ends


@pytest.mark.parametrize("weight", [0, 2, torch.tensor(0), torch.tensor(2)])
def test_the_sum_behind_a_mean_of_nothing_is_zero(weight: int | torch.Tensor) -> None:
    mean = torch.tensor(1.5 if weight else torch.nan)
    assert sum_from_mean(mean, weight).item() == (3.0 if weight else 0.0)


def test_an_optimizer_has_one_weight_in_a_window() -> None:
    window = GradientWindow(GradientState())
    window.open_share(("one",))
    window.open_share(("other",))
    with pytest.raises(ConfigurationError, match="Name the same optimizers in each backward"):
        window.open_share(("one", "third"))


def test_counts_that_are_taken_over_replace_those_of_this_rank() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=4))
    here, there = GradientWindow(state), GradientWindow(state)
    here.begin_micro_batch(("ours",))
    there.begin_micro_batch(("theirs",))
    here.take_over(there.state_dict(["theirs"], []), ["theirs"])
    assert here.unfinished() == ["theirs"]
