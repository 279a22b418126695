"""This package is helpers for tests of training code: yours and ours."""

from trainer_lib.testing.processes import reset_states, run_processes

__all__ = ["reset_states", "run_processes"]
