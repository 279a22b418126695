"""What saving and loading share: the rank that leads, the project's folder, hooks and facts, the background save."""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_lib.accelerator.engine import Engine
from trainer_lib.checkpointing.save.background import BackgroundSaves
from trainer_lib.collectives.agreement import HeldError, gather_checked
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, UnwritableError, unknown
from trainer_lib.options.project_options import ProjectConfiguration
from trainer_lib.process_group import ProcessGroup

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]
Facts = Callable[[], Mapping[str, Any]]


# The processes, by their id, and the folders that each saved weights to as pickles: it loads those without a warning.
_saved_as_pickles: set[tuple[int, str]] = set()


class Checkpoints:
    """The state that saving and loading share.

    Args:
        engine: What is saved.
        project: The folder, the naming, and how many checkpoints to keep.

    Attributes:
        background: The thread that writes checkpoints.
        infinite_buffers: Buffers that may hold infinities, such as masks: they do not mark a checkpoint as non-finite.
        holders: Returns objects by name, besides models and loaders, whose random generators belong to the state.
        prefix_of_buffers: What the names of buffers begin with in the state of registered objects; "": it has none.
    """

    engine: Engine
    project: ProjectConfiguration

    def __init__(self, engine: Engine, project: ProjectConfiguration) -> None:
        self.engine, self.project = engine, project
        self.background: BackgroundSaves = BackgroundSaves()
        self.infinite_buffers: frozenset[str] = frozenset()
        self.holders: Callable[[], Mapping[str, Any]] = dict
        self.prefix_of_buffers: str = ""
        self.save_hooks: dict[int, SaveHook] = OrderedDict()
        self.load_hooks: dict[int, LoadHook] = OrderedDict()
        self.facts: dict[int, Facts] = OrderedDict()

    @property
    def leader(self) -> int:
        """The rank that writes what all ranks have, and chooses folders: rank 0, or the first of each machine."""
        state = self.engine.state
        return state.process_index - state.local_process_index if self.project.save_on_each_node else 0

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.engine.rank == self.leader

    def on_save(self, hook: SaveHook) -> RemovableHandle:
        """Register a hook that runs before a checkpoint is written."""
        _check_hook(hook, "register_save_state_pre_hook", "models, weights, output_dir")
        return _registered(self.save_hooks, hook)

    def on_load(self, hook: LoadHook) -> RemovableHandle:
        """Register a hook that runs before a checkpoint is loaded."""
        _check_hook(hook, "register_load_state_pre_hook", "models, input_dir")
        return _registered(self.load_hooks, hook)

    def add_facts(self, facts: Facts) -> RemovableHandle:
        """Register a function that returns facts for the manifest."""
        if not callable(facts):
            raise ConfigurationError(f"register_state_facts takes a function without arguments (got {facts!r}).")
        return _registered(self.facts, facts)

    def leaders_choice(self, choose: Callable[[], AnyPath], operation: str, group: ProcessGroup) -> AnyPath:
        """Return the path that the leader chooses; raise on all ranks of the group if `choose` fails on one."""
        path, error = None, HeldError(operation, CheckpointError)
        with error.held():
            try:
                path = str(choose())
            except OSError as failure:
                kind = CheckpointError if operation == "load_state" else UnwritableError
                raise kind(f"{failure.filename} cannot be read: {failure.strerror}.") from failure
        reports = gather_checked(group, error.pack(path), operation, CheckpointError)
        error.raise_first([report for report, _ in reports])
        return path_at(reports[self.leader][1])

    def project_folder(self, verb: str) -> AnyPath:
        """Return the folder of automatic naming; raise without one."""
        project = self.project
        if not project.automatic_checkpoint_naming or project.project_dir is None:
            raise ConfigurationError(
                f"{verb}() needs a folder. Call {verb}(folder), or give Accelerator(project_config="
                "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True))."
            )
        return path_at(project.project_dir).resolve()


def note_pickles(folder: AnyPath, are_pickles: bool) -> None:
    """Note whether this process saved weights to a folder as pickles."""
    (_saved_as_pickles.add if are_pickles else _saved_as_pickles.discard)((os.getpid(), str(folder.resolve())))


def saved_pickles(folder: AnyPath) -> bool:
    """Whether this process saved weights to a folder as pickles, and so trusts them."""
    return (os.getpid(), str(folder.resolve())) in _saved_as_pickles


def check_names(arguments: Mapping[str, Any], known: tuple[str, ...], verb: str) -> None:
    """Raise for an argument that a method does not take."""
    for name in arguments:
        if name not in known:
            raise ConfigurationError(unknown(f"argument of {verb}", name, known))


def _registered(hooks: dict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _check_hook(hook: Any, verb: str, takes: str) -> None:
    if not callable(hook):
        raise ConfigurationError(f"{verb} takes a function of ({takes}) (got {hook!r}).")
