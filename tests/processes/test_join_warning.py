"""The warning about ranks that do not join a world in time."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from trainer_lib import WorldError, process_group
from trainer_lib.foundation.environment import patch_environment
from trainer_lib.foundation.launcher_variables import World
from trainer_lib.processes.join_warning import JoinWarning
from trainer_lib.processes.ports import free_port
from trainer_lib.state import PartialState


def warning_of(rank: int, size: int, address: str = "127.0.0.1") -> JoinWarning:
    world = World(
        rank=rank, size=size, local_rank=0, local_size=1, launcher="srun", master_addr=address, master_port=1,
        variables=f"SLURM_PROCID={rank}, SLURM_STEP_NUM_TASKS={size}",
    )  # fmt: skip
    return JoinWarning(world, f"{address}:1", 30)


@pytest.mark.parametrize(
    ("present", "size", "teller", "text"),
    [
        ((0, 2), 4, 0, "Rank 0 of 4 has waited 30 seconds at 127.0.0.1:1 for ranks 1, 3. Check that all"),
        ((1, 2), 3, 1, "Rank 1 of 3 has waited 30 seconds at 127.0.0.1:1 for rank 0. Check that all"),
        ((0,), 20, 0, "for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more. Check that all"),
    ],
)
def test_the_lowest_rank_that_is_present_names_those_that_are_missing(
    caplog: pytest.LogCaptureFixture, present: tuple[int, ...], size: int, teller: int, text: str
) -> None:
    store = dist.HashStore()
    warnings = {rank: warning_of(rank, size) for rank in present}
    for warning in warnings.values():
        assert warning.reached(store) is store
    for warning in warnings.values():
        warning.log()
    (message,) = caplog.messages
    assert message.startswith(f"Rank {teller} of {size} ")
    assert text in message
    assert message.endswith(
        f"To run this process alone, unset its variables SLURM_PROCID={teller}, SLURM_STEP_NUM_TASKS={size}."
    )


def test_no_rank_is_named_once_all_have_joined(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    warnings = [warning_of(rank, 2) for rank in range(2)]
    for warning in warnings:
        warning.reached(store)
    for warning in warnings:
        warning.log()
    assert not caplog.messages


def test_a_rank_that_cannot_reach_the_others_says_where_it_looks(caplog: pytest.LogCaptureFixture) -> None:
    warning_of(1, 2).log()
    warning_of(1, 2, "no-such-host.invalid").log()
    reachable, unknown = caplog.messages
    assert "Rank 1 of 2 has waited 30 seconds to reach 127.0.0.1:1, where the ranks meet. Check that all" in reachable
    assert "'no-such-host.invalid' is unknown here (" in unknown
    assert "): set MASTER_ADDR to the address of the first machine. Check that all" in unknown


@pytest.mark.parametrize(
    ("rank", "text"),
    [(0, "for rank 1."), (1, "where the ranks meet.")],
    ids=["rank 0", "rank 1"],
)
def test_a_rank_that_waits_alone_is_not_silent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rank: int, text: str
) -> None:
    monkeypatch.setattr(process_group, "_TIME_TO_JOIN", 0.2)
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with patch_environment(**variables), pytest.raises(WorldError, match="could not join the world of 2"):
        PartialState(cpu=True, timeout=timedelta(seconds=1))
    (message,) = [message for message in caplog.messages if "has waited" in message]
    assert message.startswith(f"Rank {rank} of 2 has waited 0.2 seconds")
    assert text in message
