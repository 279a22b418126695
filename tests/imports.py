"""Modules that a test has imported again."""

import importlib
import sys

import pytest

SAVING = "trainer_lib.accelerator.checkpoints.save_state"  # what only a save imports


def as_if_not_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next import of a module of a package run it again, until the test ends."""
    package, _, attribute = name.rpartition(".")
    monkeypatch.setattr(sys.modules[package], attribute, importlib.import_module(name))
    monkeypatch.delitem(sys.modules, name)
