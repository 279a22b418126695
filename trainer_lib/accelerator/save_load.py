"""Save and load a checkpoint: choose the folder, collect the parts, write or read the files, number it."""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_lib.accelerator import accelerator_parts, third_party_state
from trainer_lib.accelerator.checkpoint_facts import make_manifest
from trainer_lib.accelerator.checkpoints import Checkpoints
from trainer_lib.checkpointing.format.layout import AUTOMATIC_FOLDER, automatic_name, committed, state_folder
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
from trainer_lib.checkpointing.save import retention
from trainer_lib.checkpointing.save.background import BackgroundSaves
from trainer_lib.checkpointing.save.uploading import CheckpointUploader, writer_for
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.collectives.agreement import gather_checked, raise_on_all_ranks
from trainer_lib.filesystem.remote_paths import AnyPath, is_url, path_at
from trainer_lib.foundation.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedError,
    TrainerLibError,
    UnreachableError,
    UnsupportedError,
    UnwritableError,
    unknown,
)
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.tensor_files.file_contents import Content

_logger = get_logger(__name__)


def save(
    checkpoints: Checkpoints,
    output_dir: str | AnyPath | None,
    safe_serialization: bool,
    allow_pickle: bool,
    background: bool,
    save_model_kwargs: Mapping[str, Any],
) -> AnyPath:
    """Save a checkpoint for `save_state`, and return its folder."""
    engine, group = checkpoints.engine, checkpoints.engine.group
    _check_names(save_model_kwargs, ("max_shard_size",), "save_state")
    options = StateOptions(allow_pickle=allow_pickle, safe_serialization=safe_serialization, **save_model_kwargs)
    if engine.strategy.writes_shards:
        _check_options_for_shards(checkpoints, safe_serialization, save_model_kwargs)
    automatic = output_dir is None
    operation = "save_state(background=True)" if background else "save_state"
    target = _leaders_choice(checkpoints, lambda: _target(checkpoints, output_dir), operation)
    parts = accelerator_parts.collect(engine, checkpoints.leads)
    clear_up = partial(_clear_up, checkpoints.leads, target.parent, checkpoints.project.total_limit)
    with ExitStack() as stack:
        saving = stack.enter_context(writer_for(target, group, checkpoints.leader))
        saving.finite.infinite_buffers = checkpoints.infinite_buffers
        with raise_on_all_ranks(group, "save_state", CheckpointError):
            files = _files(checkpoints, parts, saving.folder, options)
            manifest = make_manifest(checkpoints, parts, automatic)
            if background:
                files = checkpoints.background.snapshots.take(files)
        write = partial(_write, checkpoints.background, saving, files, manifest, clear_up if automatic else None)
        if background:
            group = checkpoints.background.group(group)
            saving.switch_group(group)
            checkpoints.background.start(
                target, partial(_in_context, stack.pop_all(), write, group, checkpoints.background)
            )
        else:
            write(group)
    if automatic:
        checkpoints.project.iteration += 1
    return target


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
    folder, (manifest, files) = _open_newest_undamaged(checkpoints, input_dir)
    try:
        parts = accelerator_parts.collect(engine, checkpoints.leads, options.strict, manifest)
        with raise_on_all_ranks(group, "load_state", CheckpointError):
            check_counts(manifest.parts, third_party_state.required_parts(parts, manifest), str(folder))
            check_kinds(manifest.kinds, kinds_of(parts), str(folder))
        _warn_of_another_world_size(engine.world_size, manifest, folder)
        with raise_on_all_ranks(group, "load_state", CheckpointError):
            _restore(checkpoints, parts, manifest, files.folder, options)
    finally:
        files.release()
    _continue_numbering(checkpoints, manifest)


def _check_options_for_shards(
    checkpoints: Checkpoints, safe_serialization: bool, save_model_kwargs: Mapping[str, Any]
) -> None:
    alternative = "or give FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT')."
    if checkpoints.project.save_on_each_node:
        raise UnsupportedError(
            "save_on_each_node=True does not work with SHARDED_STATE_DICT: each machine has only some of the shards. "
            f"Use a shared file system, {alternative}"
        )
    if not safe_serialization:
        raise UnsupportedError(
            "safe_serialization=False does not work with SHARDED_STATE_DICT: each rank reads only the shards that it "
            f"needs, which requires safetensors. Leave it out, {alternative}"
        )
    if save_model_kwargs:
        raise UnsupportedError(
            f"max_shard_size={save_model_kwargs['max_shard_size']!r} does not work with SHARDED_STATE_DICT: each rank "
            f"writes its shards into one file. Leave it out, {alternative}"
        )


def _leaders_choice(checkpoints: Checkpoints, choose: Callable[[], AnyPath], operation: str) -> AnyPath:
    """Return the path that the leader chooses; raise on all ranks if `choose` fails on one."""
    with raise_on_all_ranks(checkpoints.engine.group, operation, CheckpointError):
        try:
            path = choose()
        except OSError as error:
            kind = CheckpointError if operation == "load_state" else UnwritableError
            raise kind(f"{error.filename} cannot be read: {error.strerror}.") from error
    return path_at(gather_checked(checkpoints.engine.group, str(path), operation, CheckpointError)[checkpoints.leader])


def _target(checkpoints: Checkpoints, output_dir: str | AnyPath | None) -> AnyPath:
    checkpoints.background.wait()
    if output_dir is not None:
        return _check_url(checkpoints, state_folder(output_dir))
    project = _check_url(checkpoints, _project_folder(checkpoints, "save_state"))
    target = project / AUTOMATIC_FOLDER / automatic_name(checkpoints.project.iteration)
    if target in storage_of(target.parent).states():
        raise ConfigurationError(
            f"{target} exists already, from another run. Call load_state() to continue that run, or give another "
            "project_dir, or the number to start at: ProjectConfiguration(iteration=…)."
        )
    return target


def _check_url(checkpoints: Checkpoints, folder: AnyPath) -> AnyPath:
    """Return the folder; raise for a URL, which all machines share, where each machine should save on its own."""
    if is_url(folder) and checkpoints.project.save_on_each_node:
        raise UnsupportedError(
            f"save_on_each_node=True does not work with {folder}: all machines share a URL. Leave it out."
        )
    return folder


def _open_newest_undamaged(
    checkpoints: Checkpoints, input_dir: str | AnyPath | None
) -> tuple[AnyPath, OpenedCheckpoint]:
    """Return the checkpoint to load, with all checksums verified; by default the newest undamaged one."""
    group = checkpoints.engine.group
    # Ranks share the reading of a common folder; with one folder a machine, each rank reads all of it.
    readers = (0, 1) if checkpoints.project.save_on_each_node else (group.rank, group.size)
    is_named = input_dir is not None and not _is_latest(input_dir)
    damage: list[str] = []
    while True:
        try:
            folder = _leaders_choice(
                checkpoints, lambda: _source(checkpoints, input_dir if is_named else None), "load_state"
            )
        except CheckpointError as error:
            if damage:  # no undamaged checkpoint is left: say why
                raise CheckpointError(" ".join([*damage, str(error)])) from error
            raise
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
    return newest_state(_project_folder(checkpoints, "load_state"))


def _project_folder(checkpoints: Checkpoints, verb: str) -> AnyPath:
    project = checkpoints.project
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise ConfigurationError(
            f"{verb}() needs a folder. Call {verb}(folder), or give Accelerator(project_config=ProjectConfiguration("
            "project_dir=…, automatic_checkpoint_naming=True))."
        )
    return path_at(project.project_dir).resolve()


def _files(checkpoints: Checkpoints, parts: list[Part], folder: Path, options: StateOptions) -> dict[str, Content]:
    """Run the save hooks, and return the files that this rank writes."""
    engine = checkpoints.engine
    # States whose collection may need collectives come first: no rank can have failed at something else yet.
    states = {part.name: part.stateful.state_dict() for part in parts if part.kind in ("model", "optimizer")}
    weights = [part for part in parts if isinstance(part, Weights)]
    remaining = [states[part.name] for part in weights]
    # A hook may fail on one rank, and the collectives that follow need all ranks.
    with raise_on_all_ranks(engine.group, "save_state", CheckpointError):
        for hook in list(checkpoints.save_hooks.values()):
            hook(list(engine.prepared.models), remaining, str(folder))
    files: dict[str, Content] = {}
    for position, state in enumerate(remaining):
        part = next((part for part in weights if states[part.name] is state), weights[position])
        files |= part.files(state, options)
    for part in parts:
        if not isinstance(part, Weights):
            state = states[part.name] if part.name in states else part.stateful.state_dict()
            files |= part.files(state, options)
    return files


def _restore(
    checkpoints: Checkpoints, parts: list[Part], manifest: Manifest, folder: Path, options: StateOptions
) -> None:
    engine = checkpoints.engine
    models = list(engine.prepared.models)
    with raise_on_all_ranks(engine.group, "load_state", CheckpointError):
        for hook in list(checkpoints.load_hooks.values()):
            hook(models, str(folder))
    remaining = {id(model) for model in models}
    for part in parts:
        if isinstance(part, Weights) and id(engine.prepared.models[part.index]) not in remaining:
            continue
        if part.name not in manifest.parts:
            third_party_state.warn_missing(part, manifest, folder)
            continue
        with raise_on_all_ranks(engine.group, "load_state", CheckpointError):
            state = part.read(folder, options)
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
        name = getattr(part, "file_name", None) or part.name
        raise CheckpointError(f"The {name} in {folder} cannot be loaded: {error!r}.") from error


def _warn_of_another_world_size(now: int, manifest: Manifest, folder: AnyPath) -> None:
    saved = manifest.world_size
    if saved == now:
        return
    new = f"{saved} to {now - 1}" if now - saved > 1 else f"{saved}"
    _logger.warning(
        "The checkpoint %s was saved with world size %d and is loaded with world size %d: each sample still comes "
        "once, in the same order.%s",
        folder,
        saved,
        now,
        f" New ranks ({new}) derive their random generators from (seed, rank, step)." if now > saved else "",
    )


def _write(
    saves: BackgroundSaves,
    saving: CheckpointWriter | CheckpointUploader,
    files: Mapping[str, Content],
    manifest: Manifest,
    clear_up: Callable[[], None] | None,
    group: ProcessGroup,
    mark_written: Callable[[], None] | None = None,
) -> None:
    with raise_on_all_ranks(group, "save_state", CheckpointError):
        saving.write(files)
        if mark_written is not None:
            mark_written()
    saving.commit(manifest)
    saves.nonfinite, saves.infinite_states = saving.finite.names, saving.finite.infinite_states
    if clear_up is not None:
        clear_up()
        group.barrier()


def _in_context(context: ExitStack, write: Callable[..., None], group: ProcessGroup, saves: BackgroundSaves) -> None:
    with context:
        write(group, saves.mark_written)


def _clear_up(leads: bool, folder: AnyPath, keep: int | None) -> None:
    """Delete older checkpoints beyond the limit, once the new one is complete; a failure to delete is a warning."""
    if not leads:
        return
    try:
        retention.delete_debris(folder)
        if keep is not None:
            retention.delete_oldest(folder, keep)
    except (OSError, UnreachableError) as error:
        _logger.warning("Older checkpoints in %s could not be deleted: %s", folder, error)


def _continue_numbering(checkpoints: Checkpoints, manifest: Manifest) -> None:
    project = checkpoints.project
    if project.automatic_checkpoint_naming and project.project_dir is not None:
        # Number after the newest even if an older one was loaded, so that no checkpoint replaces another.
        present = retention.automatic_states(_project_folder(checkpoints, "load_state") / AUTOMATIC_FOLDER)
        project.iteration = max([-1 if manifest.iteration is None else manifest.iteration, *present]) + 1


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
    _check_names(load_model_kwargs, ("strict", "map_location"), "load_state")
    map_location = load_model_kwargs.get("map_location", "cpu")
    if map_location not in ("cpu", "on_device"):
        raise ConfigurationError(unknown("map_location", map_location, ["cpu", "on_device"]))
    return StateOptions(
        allow_pickle=allow_pickle,
        safe_serialization=safe_serialization,
        strict=load_model_kwargs.get("strict", True),
        device="cpu" if map_location == "cpu" else str(device),
    )


def _check_names(arguments: Mapping[str, Any], known: tuple[str, ...], verb: str) -> None:
    for name in arguments:
        if name not in known:
            raise ConfigurationError(unknown(f"argument of {verb}", name, known))
