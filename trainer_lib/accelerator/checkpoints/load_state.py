"""Load a checkpoint: find an undamaged one, check that its parts fit, and give each its state."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer_lib.accelerator.checkpoints import accelerator_parts, third_party_state
from trainer_lib.accelerator.checkpoints.checkpoints import Checkpoints, check_names, saved_pickles
from trainer_lib.accelerator.checkpoints.saving_ranks import meet_to_load
from trainer_lib.checkpointing.format.layout import AUTOMATIC_FOLDER, automatic_number, committed
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_parts import (
    Part,
    StateOptions,
    Weights,
    check_counts,
    check_kinds,
    kinds_of,
)
from trainer_lib.checkpointing.load.fallback import OpenedCheckpoint, open_verified, set_aside
from trainer_lib.checkpointing.load.find import find_state, newest_state
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.checkpointing.third_party.imported_state import ImportedState
from trainer_lib.checkpointing.third_party.third_party import library_of
from trainer_lib.collectives.agreement import raise_on_all_ranks
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedError,
    TrainerLibError,
    unknown,
)
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)


def load(
    checkpoints: Checkpoints,
    input_dir: str | AnyPath | None,
    load_kwargs: Mapping[str, Any] | None,
    load_model_kwargs: Mapping[str, Any],
    allow_pickle: bool,
    safe_serialization: bool,
) -> None:
    """Load a checkpoint for `load_state`."""
    engine, group = checkpoints.engine, checkpoints.engine.group
    options = _load_options(engine.device, load_kwargs, load_model_kwargs, allow_pickle, safe_serialization)
    meet_to_load(checkpoints)
    folder, opened = _open_newest_undamaged(checkpoints, input_dir)
    manifest = opened.manifest
    if saved_pickles(folder):
        options = replace(options, safe_serialization=False)
    try:
        parts = accelerator_parts.collect(engine, checkpoints.leads, checkpoints.holders(), options.strict, manifest)
        with raise_on_all_ranks(group, "load_state", CheckpointError):
            check_counts(manifest.parts, third_party_state.required_parts(parts, manifest), str(folder))
            check_kinds(manifest.kinds, kinds_of(parts), str(folder))
        third_party_state.report_left_out(manifest, folder)
        _warn_of_another_world_size(engine.world_size, manifest.world_size)
        with raise_on_all_ranks(group, "load_state", CheckpointError):
            _restore(checkpoints, parts, opened, options)
    finally:
        opened.release()
    _continue_numbering(checkpoints, manifest)


def _open_newest_undamaged(
    checkpoints: Checkpoints, input_dir: str | AnyPath | None
) -> tuple[AnyPath, OpenedCheckpoint | ImportedState]:
    """Return the checkpoint to load, with all checksums verified; by default the newest undamaged one."""
    group = checkpoints.engine.group
    # Ranks share the reading of a common folder; with one folder a machine, each rank reads all of it.
    readers = (0, 1) if checkpoints.project.save_on_each_node else (group.rank, group.size)
    is_named = input_dir is not None and not _is_latest(input_dir)
    damage: list[str] = []
    while True:
        try:
            folder = checkpoints.leaders_choice(
                lambda: _source(checkpoints, input_dir if is_named else None), "load_state", group
            )
        except CheckpointError as error:
            if damage:  # no undamaged checkpoint is left: say why
                raise CheckpointError(" ".join([*damage, str(error)])) from error
            raise
        if isinstance(folder, Path) and library_of(folder) is not None:
            with_run = any(getattr(part, "is_run_state", False) for part in checkpoints.engine.prepared.custom_objects)
            with raise_on_all_ranks(group, "load_state", CheckpointError):
                return folder, ImportedState(folder, with_run)
        try:
            opened = open_verified(folder, group, "load_state", *readers)
        except DamagedError as error:
            if is_named:
                raise
            renamed = set_aside(folder, group, "load_state", checkpoints.leads)
            damage.append(f"{error} It is now called {renamed.name}.")
            continue
        if damage:
            _logger.warning("%s Loading %s instead.", " ".join(damage), folder)
        return folder, opened


def _is_latest(input_dir: str | AnyPath) -> bool:
    return input_dir == "latest" and committed(path_at("latest").absolute()) is None


def _source(checkpoints: Checkpoints, input_dir: str | AnyPath | None) -> AnyPath:
    if checkpoints.background.hang is None:
        checkpoints.background.wait()
    if input_dir is not None:
        return find_state(input_dir)
    return newest_state(checkpoints.project_folder("load_state"))


def _restore(
    checkpoints: Checkpoints, parts: list[Part], opened: OpenedCheckpoint | ImportedState, options: StateOptions
) -> None:
    engine, manifest, folder = checkpoints.engine, opened.manifest, opened.folder
    bare = engine.bare_models()
    models = list(bare)
    with raise_on_all_ranks(engine.group, "load_state", CheckpointError):
        for hook in list(checkpoints.load_hooks.values()):
            hook(models, str(folder))
    remaining = {id(model) for model in models}
    for part in parts:
        if isinstance(part, Weights) and id(bare[part.index]) not in remaining:
            continue
        if part.name not in manifest.parts:
            third_party_state.warn_missing(part, manifest, folder)
            continue
        with raise_on_all_ranks(engine.group, "load_state", CheckpointError):
            state = opened.read(part, options)
            if manifest.origin is not None:
                with _errors_name_part(part, folder):
                    state = third_party_state.translated(engine, part, state)
        with _errors_name_part(part, folder):
            part.stateful.load_state_dict(state)
    for name in sorted(set(manifest.parts) - {part.name for part in parts}):
        _logger.warning(
            "The checkpoint %s has a %s, and no prepared object to load it into. It is ignored.", folder, name
        )


@contextmanager
def _errors_name_part(part: Part, folder: AnyPath) -> Generator[None]:
    """Name the part in the error if its state does not fit the prepared object."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, TrainerLibError):
            raise
        raise CheckpointError(f"The {part.stem} in {folder} cannot be loaded: {error!r}.") from error


def _warn_of_another_world_size(now: int, saved: int) -> None:
    if saved == now:
        return
    new = f"{saved} to {now - 1}" if now - saved > 1 else f"{saved}"
    _logger.warning_once(
        "The checkpoint was saved with world size %d and is loaded with world size %d: each sample still comes once, "
        "in the same order.%s",
        saved,
        now,
        f" New ranks ({new}) derive their random generators from (seed, rank, step)." if now > saved else "",
    )


def _continue_numbering(checkpoints: Checkpoints, manifest: Manifest) -> None:
    project = checkpoints.project
    if project.automatic_checkpoint_naming and project.project_dir is not None:
        # Number after the newest even if an older one was loaded, so that no checkpoint replaces another.
        folder = checkpoints.project_folder("load_state") / AUTOMATIC_FOLDER
        numbers = [manifest.iteration, *(automatic_number(path.name) for path in storage_of(folder).states())]
        project.iteration = max((number for number in numbers if number is not None), default=-1) + 1


def _load_options(
    device: torch.device,
    load_kwargs: Mapping[str, Any] | None,
    load_model_kwargs: Mapping[str, Any],
    allow_pickle: bool,
    safe_serialization: bool,
) -> StateOptions:
    if load_kwargs:
        raise ConfigurationError(
            f"load_kwargs={dict(load_kwargs)!r} are options of torch.load, which load_state does not use. Leave them "
            "out; allow_pickle=True and safe_serialization=False allow pickles."
        )
    check_names(load_model_kwargs, ("strict", "map_location"), "load_state")
    map_location = load_model_kwargs.get("map_location", "cpu")
    if map_location not in ("cpu", "on_device"):
        raise ConfigurationError(unknown("map_location", map_location, ["cpu", "on_device"]))
    return StateOptions(
        allow_pickle=allow_pickle,
        safe_serialization=safe_serialization,
        strict=load_model_kwargs.get("strict", True),
        device="cpu" if map_location == "cpu" else str(device),
    )
