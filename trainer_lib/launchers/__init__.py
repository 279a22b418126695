"""This package is starting one function on several processes, from a notebook, a test or a script."""

from trainer_lib.launchers.fork import run_forked

__all__ = ["run_forked"]
