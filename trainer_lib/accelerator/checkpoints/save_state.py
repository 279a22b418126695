"""Save a checkpoint: choose its folder, collect its parts, run the hooks, write and commit the files."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from trainer_lib.accelerator.checkpoints import accelerator_parts
from trainer_lib.accelerator.checkpoints.checkpoints import Checkpoints, check_names, note_pickles
from trainer_lib.accelerator.checkpoints.save_layouts import OWN, layout_of
from trainer_lib.accelerator.checkpoints.saving_ranks import ranks_that_save
from trainer_lib.checkpointing.format.layout import AUTOMATIC_FOLDER, automatic_name, state_folder
from trainer_lib.checkpointing.format.overlapped_copies import OverlappedCopies
from trainer_lib.checkpointing.format.state_parts import (
    Part,
    StateOptions,
    Weights,
)
from trainer_lib.checkpointing.save import retention
from trainer_lib.checkpointing.save.background import BackgroundSaves
from trainer_lib.checkpointing.save.uploading import CheckpointUploader, writer_for
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.collectives.agreement import raise_on_all_ranks
from trainer_lib.filesystem.remote_paths import AnyPath, is_url
from trainer_lib.foundation.errors import (
    CheckpointError,
    ConfigurationError,
    UnreachableError,
    UnsupportedError,
    UnwritableError,
)
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup
from trainer_lib.processes.thread_priority import yield_cores
from trainer_lib.tensor_files.file_contents import Content

_logger = get_logger(__name__)

_CHANGED = (
    "Something other than an optimizer changed weights before the next update, while they were copied. The next "
    "checkpoints are copied before training continues. Change weights at on_step_end or in a Modifier, or give "
    "save_in_background=False."
)


def save(
    checkpoints: Checkpoints,
    output_dir: str | AnyPath | None,
    *,
    safe_serialization: bool = True,
    allow_pickle: bool = False,
    background: bool = False,
    layout: str = OWN,
    save_model_kwargs: Mapping[str, Any] | None = None,
    group: ProcessGroup | None = None,
) -> AnyPath:
    """Save a checkpoint for `save_state`, and return its folder.

    Args:
        checkpoints: The checkpoints that the new one joins.
        output_dir: The folder; by default the next one under automatic naming.
        safe_serialization: Write weights as safetensors.
        allow_pickle: Pickle parts of registered objects that are no plain values.
        background: Let a thread write.
        layout: "trainer_lib" or "accelerate".
        save_model_kwargs: The options that bound the size of files.
        group: The ranks that save; by default all, or rank 0 if only that one is in this call.
    """
    engine, save_model_kwargs = checkpoints.engine, save_model_kwargs or {}
    group = group or ranks_that_save(checkpoints)
    if group is None:
        return _next_folder(checkpoints, output_dir)
    check_names(save_model_kwargs, ("max_shard_size",), "save_state")
    options = StateOptions(allow_pickle=allow_pickle, safe_serialization=safe_serialization, **save_model_kwargs)
    if engine.strategy.writes_shards and layout == OWN:
        _check_options_for_shards(checkpoints, safe_serialization, save_model_kwargs)
    automatic = output_dir is None
    operation = "save_state(background=True)" if background else "save_state"
    target = checkpoints.leaders_choice(lambda: _target(checkpoints, output_dir), operation, group)
    save_layout = layout_of(layout, checkpoints, target, options, background, save_model_kwargs)
    parts = accelerator_parts.collect(engine, checkpoints.leads, checkpoints.holders())
    clear_up = partial(_clear_up, checkpoints.leads, target.parent, checkpoints.project.total_limit)
    with ExitStack() as stack:
        saving = stack.enter_context(writer_for(target, group, checkpoints.leader))
        saving.finite.infinite_buffers = checkpoints.infinite_buffers
        saving.finite.prefix_of_buffers = checkpoints.prefix_of_buffers
        with raise_on_all_ranks(group, "save_state", CheckpointError):
            states = _states(checkpoints, parts, saving.folder, group)
            files = {
                name: content
                for part, state in states
                for name, content in save_layout.files(part, state, options).items()
            }
            manifest: Any = save_layout.manifest(checkpoints, parts, automatic, group.size)  # on a disk, it may be None
            if background:
                files = checkpoints.background.snapshots.take(files, checkpoints.background.changed_by_steps())
        save_layout.write_shards(saving.folder, states)
        write = partial(_write, checkpoints.background, saving, files, manifest, clear_up if automatic else None)
        if background:
            group = checkpoints.background.group(group)
            saving.switch_group(group)
            saves, copies = checkpoints.background, checkpoints.background.snapshots.copies
            saves.start(target, partial(_in_context, stack.pop_all(), write, group, saves, copies), copies)
        else:
            write(group)
    note_pickles(target, not safe_serialization)
    if automatic:
        checkpoints.project.iteration += 1
    return target


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


def _target(checkpoints: Checkpoints, output_dir: str | AnyPath | None) -> AnyPath:
    checkpoints.background.wait()
    target = _check_url(checkpoints, _next_folder(checkpoints, output_dir))
    if output_dir is None and target in storage_of(target.parent).states():
        raise ConfigurationError(
            f"{target} exists already, from another run. Call load_state() to continue that run, or give another "
            "project_dir, or the number to start at: ProjectConfiguration(iteration=…)."
        )
    return target


def _next_folder(checkpoints: Checkpoints, output_dir: str | AnyPath | None) -> AnyPath:
    if output_dir is not None:
        return state_folder(output_dir)
    name = automatic_name(checkpoints.project.iteration)
    return checkpoints.project_folder("save_state") / AUTOMATIC_FOLDER / name


def _check_url(checkpoints: Checkpoints, folder: AnyPath) -> AnyPath:
    """Return the folder; raise for a URL, which all machines share, where each machine should save on its own."""
    if is_url(folder) and checkpoints.project.save_on_each_node:
        raise UnsupportedError(
            f"save_on_each_node=True does not work with {folder}: all machines share a URL. Leave it out."
        )
    return folder


def _states(checkpoints: Checkpoints, parts: list[Part], folder: Path, group: ProcessGroup) -> list[tuple[Part, Any]]:
    """Run the save hooks, and return the parts that are saved with their states."""
    engine = checkpoints.engine
    # States whose collection may need collectives come first: no rank can have failed at something else yet.
    states = {part.name: part.stateful.state_dict() for part in parts if part.kind in ("model", "optimizer")}
    weights = [part for part in parts if isinstance(part, Weights)]
    remaining = [states[part.name] for part in weights]
    # A hook may fail on one rank, and the collectives that follow need all ranks.
    with raise_on_all_ranks(group, "save_state", CheckpointError):
        for hook in list(checkpoints.save_hooks.values()):
            hook(engine.bare_models(), remaining, str(folder))
    saved: list[tuple[Part, Any]] = []
    for position, state in enumerate(remaining):
        part = next((part for part in weights if states[part.name] is state), weights[position])
        saved.append((part, state))
    saved += [
        (part, states[part.name] if part.name in states else part.stateful.state_dict())
        for part in parts
        if not isinstance(part, Weights)
    ]
    return saved


def _write(
    saves: BackgroundSaves,
    saving: CheckpointWriter | CheckpointUploader,
    files: Mapping[str, Content],
    manifest: Any,
    clear_up: Callable[[], None] | None,
    group: ProcessGroup,
    copies: OverlappedCopies | None = None,
    mark_written: Callable[[], None] | None = None,
) -> None:
    with raise_on_all_ranks(group, "save_state", CheckpointError):
        if copies is not None and not copies.run():
            saves.overlapping = ()
            raise UnwritableError(_CHANGED)
        if mark_written is not None:
            yield_cores()  # only now: training may wait for the copies
        saving.write(files)
        if mark_written is not None:
            mark_written()
    saving.commit(manifest)
    saves.nonfinite, saves.infinite_states = saving.finite.names, saving.finite.infinite_states
    if clear_up is not None:
        clear_up()
        group.barrier()


def _in_context(
    context: ExitStack,
    write: Callable[..., None],
    group: ProcessGroup,
    saves: BackgroundSaves,
    copies: OverlappedCopies | None,
) -> None:
    with context:
        write(group, copies, saves.mark_written)


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
