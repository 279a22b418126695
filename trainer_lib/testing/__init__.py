"""Helpers to test training code: run a function on several ranks, reset shared state."""

from trainer_lib.testing.processes import reset_states, run_processes

__all__ = ["reset_states", "run_processes"]
