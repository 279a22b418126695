"""DiLoCo in loops by hand: rounds of local updates that end with a step of an outer optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, DiLoCo, LocalSGD
from trainer_lib.launchers import run_forked

UPDATES = 8


def _train(
    folder: Path | None, kind: type[LocalSGD], ends_at: int = UPDATES, resumes: bool = False, **options: Any
) -> Any:
    """Train; return this rank's weights after each update, and what is left after the last round."""
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=1e-2))
    inputs, targets, _ = toy.data()
    rounds = kind(accelerator, network, 3, **options)
    accelerator.register_for_checkpointing(rounds)
    own: dict[int, list[Tensor]] = {}
    with rounds:
        if resumes:
            assert folder is not None
            accelerator.load_state(str(folder / "state"))
        for update in range(rounds.num_steps, ends_at):
            rows = slice(update * 4 + accelerator.process_index, update * 4 + accelerator.process_index + 4)
            accelerator.backward(toy.losses(network, inputs[rows], targets[rows]).mean())
            optimizer.step()
            optimizer.zero_grad()
            rounds.step()
            own[update] = [weight.detach().clone() for weight in network.parameters()]
            if folder is not None and update == 4 and not resumes:
                accelerator.save_state(str(folder / "state"))
    return own, [weight.detach().clone() for weight in network.parameters()]


def test_an_outer_step_of_one_without_momentum_is_local_sgd() -> None:
    averaged = run_world(lambda: _train(None, LocalSGD), (), 2)
    stepped = run_world(lambda: _train(None, DiLoCo, outer_learning_rate=1.0, outer_momentum=0.0), (), 2)
    for (_, weights), (_, expected) in zip(stepped, averaged, strict=True):
        toy.assert_same(weights, expected, rtol=1e-5)
    with_momentum = run_world(lambda: _train(None, DiLoCo), (), 2)[0][1]
    assert not any(map(torch.allclose, with_momentum, averaged[0][1]))


def test_outer_steps_are_those_of_sgd_with_nesterov_momentum() -> None:
    accelerator = Accelerator(cpu=True)
    network, start = nn.Linear(1, 1, bias=False), nn.Parameter(torch.ones(1, 1))
    nn.init.ones_(network.weight)
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.125))
    outer = torch.optim.SGD([start], lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(accelerator, network, 2) as rounds:
        for learned in (1.0, 0.0, -2.0):  # in the second round no weight changes, and the momentum still moves them
            for _ in range(2):
                accelerator.backward(network(torch.tensor([[learned]])).sum())
                optimizer.step()
                optimizer.zero_grad()
                rounds.step()
            start.grad = torch.full((1, 1), 2 * 0.125 * learned)
            outer.step()
            torch.testing.assert_close(network.weight, start, rtol=1e-6, atol=0)


def test_a_loop_resumes_within_a_round_bit_by_bit(tmp_path: Path) -> None:
    whole = run_world(_train, (None, DiLoCo), 2)
    run_world(_train, (tmp_path, DiLoCo, 5), 2)
    resumed = run_world(lambda: _train(tmp_path, DiLoCo, resumes=True), (), 2)
    for (own, weights), (expected_own, expected) in zip(resumed, whole, strict=True):
        assert list(own) == [5, 6, 7]
        for update, values in own.items():
            assert all(map(torch.equal, values, expected_own[update]))
        assert all(map(torch.equal, weights, expected))


def _load_outside(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, _ = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=1e-2))
    accelerator.register_for_checkpointing(LocalSGD(accelerator, network, 3))
    accelerator.load_state(str(folder / "state"))
    return caplog.text


def test_a_load_outside_of_the_context_says_that_ranks_get_the_mean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_world(_train, (tmp_path, LocalSGD, 5), 2)
    main, _ = run_forked(lambda: _load_outside(tmp_path, caplog), (), 2)
    assert "saved within LocalSGD or DiLoCo and is loaded outside: all ranks continue with the mean" in main


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outer_learning_rate": 0}, "outer_learning_rate must be"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be at least 0 and less than 1 \(got 1\.0\)"),
        ({"outer_momentum": True}, r"outer_momentum must be at least 0 and less than 1 \(got True\)"),
        ({"local_sgd_steps": 0}, "local_sgd_steps must be a whole number"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], words: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    arguments: dict[str, Any] = {"local_sgd_steps": 2, **options}
    with pytest.raises(ConfigurationError, match=words):
        DiLoCo(accelerator, model, **arguments)
