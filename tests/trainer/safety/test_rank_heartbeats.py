"""Ranks that ask each other where they are, without a store."""

import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.worlds import run_world
from trainer_lib import PartialState
from trainer_lib.trainer.safety.rank_heartbeats import Answers, Peers, _process

Told = tuple[dict[int, Any], set[int]]


def _told(answers: Answers) -> Told:
    return answers.facts, answers.refused


@pytest.mark.parametrize("is_one_host", [True, False])
def test_ranks_answer_each_other_until_they_close(is_one_host: bool) -> None:
    def body() -> tuple[bool, Told, Told]:
        group = PartialState(cpu=True).group
        named = socket.gethostname
        if not is_one_host:  # so that they listen on all addresses, and look for those that others can reach
            socket.gethostname = lambda: f"{named()}-{group.rank}"
        try:
            peers = Peers(group, lambda: {"step": group.rank + 5}, "127.0.0.1")
        finally:
            socket.gethostname = named
        serving = threading.Thread(target=peers.serve, args=(60.0,))
        other = 1 - group.rank
        answers: list[Answers] = []
        if group.rank == 0:  # it asks while the other one serves, and then the other way round
            answers.append(peers.ask([other], 10.0))
            group.barrier()
            serving.start()
            group.barrier()
        else:
            serving.start()
            group.barrier()
            peers.close()
            serving.join()
            answers.append(Answers())
            peers._is_closed = False
            answers[0] = peers.ask([other], 10.0)
            group.barrier()
        if serving.is_alive():
            peers.close()
            serving.join()
        can_answer = peers.can_answer
        peers.release()
        group.barrier()
        late = Peers(group, dict, None)
        if group.rank == 1:
            late.release()
        group.barrier()
        gone = late.ask([1], 10.0) if group.rank == 0 else Answers()
        if group.rank == 0:
            late.release()
        return can_answer, _told(answers[0]), _told(gone)

    zero, rank_one = run_world(body, timeout=60)
    assert zero == (True, ({1: {"step": 6}}, set()), ({}, {1}))
    assert rank_one == (True, ({0: {"step": 5}}, set()), ({}, set()))


def test_a_rank_without_its_token_is_not_answered() -> None:
    def body() -> bytes:
        group = PartialState(cpu=True).group
        peers = Peers(group, lambda: {"step": 1}, None)
        serving = threading.Thread(target=peers.serve, args=(60.0,))
        serving.start()
        with socket.create_connection(("127.0.0.1", peers._cards[group.rank]["port"]), timeout=10) as connection:
            connection.sendall(b"0" * 32)
            received = connection.recv(100)
        peers.close()
        serving.join()
        peers.release()
        return received

    assert run_world(body, timeout=60) == [b"", b""]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says there which process it is")
def test_only_the_process_that_was_told_of_is_killed() -> None:
    def body() -> tuple[bool, bool, int]:
        group = PartialState(cpu=True).group
        peers = Peers(group, dict, None)
        sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        card = peers._cards[1 - group.rank]
        card["process"] = {**(_process(sleeping.pid) or {}), "began": "0"}  # its number was given away again
        other = peers.kill(1 - group.rank)
        card["process"] = _process(sleeping.pid)
        itself = peers.kill(1 - group.rank)
        code = sleeping.wait(10)
        peers.release()
        return other, itself, code

    assert run_world(body, timeout=60) == [(False, True, -9)] * 2
