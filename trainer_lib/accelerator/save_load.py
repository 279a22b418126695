"""This file is a save and a load of all that survives a restart: the folder, the parts, the files, the numbering."""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.accelerator import accelerator_parts as engine_parts
from trainer_lib.accelerator import third_party_state
from trainer_lib.accelerator.checkpoint_facts import described
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

if TYPE_CHECKING:
    from trainer_lib.accelerator.checkpoints import Persistence

_logger = get_logger(__name__)


def save(
    engine: "Persistence",
    output_dir: str | AnyPath | None,
    safe_serialization: bool,
    allow_pickle: bool,
    background: bool,
    others: Mapping[str, Any],
) -> AnyPath:
    """Save a state, as `Persistence.save_state` says, and return its folder."""
    known = ("max_shard_size",)
    _check_names(others, known, "save_state")
    words = StateOptions(allow_pickle=allow_pickle, safe_serialization=safe_serialization, **others)
    if engine.strategy.writes_shards:
        _check_words_of_shards(engine, safe_serialization, others)
    automatic = output_dir is None
    doing = "save_state(background=True)" if background else "save_state"
    target = _agreed(engine, lambda: _target(engine, output_dir), doing)
    parts = engine_parts.collect(engine)
    clear_up = partial(_clear_up, engine.should_save_model, target.parent, engine.project_configuration.total_limit)
    with ExitStack() as stack:
        saving = stack.enter_context(writer_for(target, engine.group, engine._leader))
        saving.finite.infinite_buffers = engine.infinite_buffers
        with raise_on_all_ranks(engine.group, "save_state", CheckpointError):
            files = _files(engine, parts, saving.folder, words)
            manifest = described(engine, parts, automatic)
            if background:
                files = engine._background.snapshots.take(files)
        write = partial(_write, engine._background, saving, files, manifest, clear_up if automatic else None)
        if background:
            group = engine._background.group(engine.group)
            saving.switch_group(group)
            engine._background.start(target, partial(_in_context, stack.pop_all(), write, group, engine._background))
        else:
            write(engine.group)
    if automatic:
        engine.project_configuration.iteration += 1
    return target


def load(
    engine: "Persistence",
    input_dir: str | AnyPath | None,
    load_kwargs: Mapping[str, Any] | None,
    others: Mapping[str, Any],
    allow_pickle: bool,
    safe_serialization: bool,
) -> None:
    """Load a state, as `Persistence.load_state` says."""
    words = _words_of_load(engine, load_kwargs, others, allow_pickle, safe_serialization)
    folder, (manifest, files) = _found(engine, input_dir)
    try:
        parts = engine_parts.collect(engine, words.strict, manifest)
        with raise_on_all_ranks(engine.group, "load_state", CheckpointError):
            check_counts(manifest.parts, third_party_state.counted(parts, manifest), str(folder))
            check_kinds(manifest.kinds, kinds_of(parts), str(folder))
        _tell_of_another_world(engine, manifest, folder)
        with raise_on_all_ranks(engine.group, "load_state", CheckpointError):
            _restore(engine, parts, manifest, files.folder, words)
    finally:
        files.release()
    _find_number(engine, manifest)


def _check_words_of_shards(engine: "Persistence", safe_serialization: bool, others: Mapping[str, Any]) -> None:
    whole = "or FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT')."
    if engine.project_configuration.save_on_each_node:
        raise UnsupportedError(
            "save_on_each_node=True with SHARDED_STATE_DICT: each machine has a part of the shards only. Use a "
            f"common file system, {whole}"
        )
    if not safe_serialization:
        raise UnsupportedError(
            "safe_serialization=False with SHARDED_STATE_DICT: shards are safetensors, of which each process reads "
            f"what it needs. Leave it out, {whole}"
        )
    if others:
        raise UnsupportedError(
            f"max_shard_size={others['max_shard_size']!r} with SHARDED_STATE_DICT: each process writes its shards "
            f"into one file. Leave it out, {whole}"
        )


def _agreed(engine: "Persistence", choose: Callable[[], AnyPath], doing: str) -> AnyPath:
    """Return the path that the leader chooses; all have to be able to choose one."""
    with raise_on_all_ranks(engine.group, doing, CheckpointError):
        try:
            path = choose()
        except OSError as error:
            kind = CheckpointError if doing == "load_state" else UnwritableError
            raise kind(f"{error.filename} cannot be looked at: {error.strerror}.") from error
    return path_at(gather_checked(engine.group, str(path), doing, CheckpointError)[engine._leader])


def _target(engine: "Persistence", output_dir: str | AnyPath | None) -> AnyPath:
    engine._background.wait()
    if output_dir is not None:
        return _common(engine, state_folder(output_dir))
    project = _common(engine, _named_automatically(engine, "save_state"))
    target = project / AUTOMATIC_FOLDER / automatic_name(engine.save_iteration)
    if target in storage_of(target.parent).states():
        raise ConfigurationError(
            f"{target} exists already, from another run. Call load_state() to go on with that one, or give "
            "another project_dir, or the number to begin with: ProjectConfiguration(iteration=…)."
        )
    return target


def _common(engine: "Persistence", folder: AnyPath) -> AnyPath:
    """Return a folder that all machines write to, unless each has one of its own."""
    if is_url(folder) and engine.project_configuration.save_on_each_node:
        raise UnsupportedError(
            f"save_on_each_node=True with {folder}: what is behind a URL is common to all machines. Leave it out."
        )
    return folder


def _found(engine: "Persistence", input_dir: str | AnyPath | None) -> tuple[AnyPath, OpenedCheckpoint]:
    """Return the state to load, every byte of which was checked; of those named automatically the newest whole one."""
    group = engine.group
    # Processes share the reading of one folder; of a folder of its own each reads all.
    readers = (0, 1) if engine.project_configuration.save_on_each_node else (group.rank, group.size)
    is_named = input_dir is not None and not _is_latest(input_dir)
    damage: list[str] = []
    while True:
        try:
            folder = _agreed(engine, lambda: _source(engine, input_dir if is_named else None), "load_state")
        except CheckpointError as error:
            if damage:  # which is why there is none left
                raise CheckpointError(" ".join([*damage, str(error)])) from error
            raise
        try:
            opened = open_verified(folder, group, "load_state", *readers)
        except DamagedError as error:
            if is_named:
                raise
            aside = set_aside(folder, group, "load_state", engine.should_save_model)
            damage.append(f"{error} It is now called {aside.name}.")
            continue
        if damage:
            _logger.warning("%s Going on from %s.", " ".join(damage), folder)
        return folder, opened


def _is_latest(input_dir: str | AnyPath) -> bool:
    return input_dir == "latest" and committed(path_at("latest").absolute()) is None


def _source(engine: "Persistence", input_dir: str | AnyPath | None) -> AnyPath:
    if engine._background.hang is None:
        engine._background.wait()
    if input_dir is not None:
        return find_state(input_dir)
    return newest_state(_named_automatically(engine, "load_state"))


def _named_automatically(engine: "Persistence", verb: str) -> AnyPath:
    project = engine.project_configuration
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise ConfigurationError(
            f"{verb}() needs a folder: {verb}(folder), or Accelerator(project_config=ProjectConfiguration("
            "project_dir=…, automatic_checkpoint_naming=True))."
        )
    return path_at(project.project_dir).resolve()


def _files(engine: "Persistence", parts: list[Part], folder: Path, words: StateOptions) -> dict[str, Content]:
    """Return what this process is to write, after the hooks had their say."""
    # First what processes may have to put together, while none of them can have failed at something else.
    states = {part.name: part.stateful.state_dict() for part in parts if part.kind in ("model", "optimizer")}
    weights = [part for part in parts if isinstance(part, Weights)]
    remaining = [states[part.name] for part in weights]
    # A hook may fail on one process, and what comes after may be put together by all.
    with raise_on_all_ranks(engine.group, "save_state", CheckpointError):
        for hook in list(engine._save_hooks.values()):
            hook(list(engine._models), remaining, str(folder))
    files: dict[str, Content] = {}
    for position, state in enumerate(remaining):
        part = next((part for part in weights if states[part.name] is state), weights[position])
        files |= part.files(state, words)
    for part in parts:
        if not isinstance(part, Weights):
            state = states[part.name] if part.name in states else part.stateful.state_dict()
            files |= part.files(state, words)
    return files


def _restore(engine: "Persistence", parts: list[Part], manifest: Manifest, folder: Path, words: StateOptions) -> None:
    models = list(engine._models)
    with raise_on_all_ranks(engine.group, "load_state", CheckpointError):
        for hook in list(engine._load_hooks.values()):
            hook(models, str(folder))
    remaining = {id(model) for model in models}
    for part in parts:
        if isinstance(part, Weights) and id(engine._models[part.index]) not in remaining:
            continue
        if part.name not in manifest.parts:
            third_party_state.tell_missing(part, manifest, folder)
            continue
        with raise_on_all_ranks(engine.group, "load_state", CheckpointError):
            state = part.read(folder, words)
            if manifest.origin is not None:
                with _told_by_name(part, folder):
                    state = third_party_state.taken_up(engine, part, state)
        with _told_by_name(part, folder):
            part.stateful.load_state_dict(state)
    for name in sorted(set(manifest.parts) - {part.name for part in parts}):
        _logger.warning("The state in %s has a %s, which nothing here takes up.", folder, name)


@contextmanager
def _told_by_name(part: Part, folder: AnyPath) -> Generator[None]:
    """Tell of a state that is nothing for what is to take it up by the name of its part."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, TrainerLibError):
            raise
        name = getattr(part, "file_name", None) or part.name
        raise CheckpointError(f"The {name} in {folder} cannot be taken up: {error!r}.") from error


def _tell_of_another_world(engine: "Persistence", manifest: Manifest, folder: AnyPath) -> None:
    then, now = manifest.world_size, engine.num_processes
    if then == now:
        return
    new = f"{then} to {now - 1}" if now - then > 1 else f"{then}"
    _logger.warning(
        "The state in %s was saved by %d processes and is taken up by %d: each sample still comes once, in the same "
        "order.%s",
        folder,
        then,
        now,
        f" New processes ({new}) derive their random generators from (seed, process, step)." if now > then else "",
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
    """Delete what is not kept: once the new state is there, which what cannot be deleted takes nothing from."""
    if not leads:
        return
    try:
        retention.delete_debris(folder)
        if keep is not None:
            retention.delete_oldest(folder, keep)
    except (OSError, UnreachableError) as error:
        _logger.warning("Older states in %s could not be deleted: %s", folder, error)


def _find_number(engine: "Persistence", manifest: Manifest) -> None:
    project = engine.project_configuration
    if project.automatic_checkpoint_naming and project.project_dir is not None:
        # After the newest too, if an older one was loaded: no state takes the place of another.
        present = retention.automatic_states(_named_automatically(engine, "load_state") / AUTOMATIC_FOLDER)
        project.iteration = max([-1 if manifest.iteration is None else manifest.iteration, *present]) + 1


def _words_of_load(
    engine: "Persistence",
    load_kwargs: Mapping[str, Any] | None,
    others: Mapping[str, Any],
    allow_pickle: bool,
    safe_serialization: bool,
) -> StateOptions:
    if load_kwargs:
        raise ConfigurationError(
            f"load_kwargs={dict(load_kwargs)!r} are options of torch.load, and no pickle is read here. Leave them "
            "out; allow_pickle=True and safe_serialization=False say which pickles may be."
        )
    _check_names(others, ("strict", "map_location"), "load_state")
    where = others.get("map_location", "cpu")
    if where not in ("cpu", "on_device"):
        raise ConfigurationError(unknown("map_location", where, ["cpu", "on_device"]))
    return StateOptions(
        allow_pickle=allow_pickle,
        safe_serialization=safe_serialization,
        strict=others.get("strict", True),
        device="cpu" if where == "cpu" else str(engine.device),
    )


def _check_names(given: Mapping[str, Any], known: tuple[str, ...], verb: str) -> None:
    for name in given:
        if name not in known:
            raise ConfigurationError(unknown(f"argument of {verb}", name, known))
