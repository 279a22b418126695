"""This file is the engine's side of state on disk: save all that survives a restart, load it, save a model alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_lib.accelerator import parts as engine_parts
from trainer_lib.accelerator.processes import Processes
from trainer_lib.checkpointing import retention
from trainer_lib.checkpointing.agreement import exchange, together
from trainer_lib.checkpointing.layout import AUTOMATIC_FOLDER, automatic_name, state_folder
from trainer_lib.checkpointing.manifest import Manifest
from trainer_lib.checkpointing.objects import save_object
from trainer_lib.checkpointing.parts import Part, Weights, Words, check_counts, check_kinds, kinds_of
from trainer_lib.checkpointing.reader import find_state, newest_state, open_state
from trainer_lib.checkpointing.weights import save_weights
from trainer_lib.checkpointing.writer import Saving
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.options.project import ProjectConfiguration
from trainer_lib.precision import FullPrecision
from trainer_lib.state.window import GradientWindow
from trainer_lib.strategies import SingleProcess
from trainer_lib.tensor_files.contents import Content

_logger = get_logger(__name__)

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]


class Persistence(Processes):
    """What an `Accelerator` saves and loads."""

    project_configuration: ProjectConfiguration
    precision: FullPrecision
    strategy: SingleProcess
    _window: GradientWindow
    _models: list[nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]
    _save_hooks: dict[int, SaveHook]
    _load_hooks: dict[int, LoadHook]

    # -- settings ------------------------------------------------------------------------------------------------

    @property
    def project_dir(self) -> str | Path | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """The folder of logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next state under automatic naming."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes models."""
        return self.process_index == self._leader

    # -- all that survives a restart -----------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have objects with `state_dict` and `load_state_dict` saved and loaded too.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 5)
            >>> accelerator.register_for_checkpointing(schedule)
        """
        unfit = [
            f"{type(one).__name__} (argument {index})"
            for index, one in enumerate(objects)
            if not all(callable(getattr(one, verb, None)) for verb in ("state_dict", "load_state_dict"))
        ]
        if unfit:
            raise ConfigurationError(
                f"No state_dict and load_state_dict has: {', '.join(unfit)}. Give objects that have both."
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Have `hook(models, weights, output_dir)` called by `save_state`, on all processes, before it writes.

        It may change or take out weights, which are then not written, and write files to the folder it is given. Its
        handle has `remove()`.
        """
        _check_hook(hook, "register_save_state_pre_hook", "models, weights, output_dir")
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have `hook(models, input_dir)` called by `load_state`, on all processes, before it loads.

        The models that it takes out of the list are not loaded. Its handle has `remove()`.
        """
        _check_hook(hook, "register_load_state_pre_hook", "models, input_dir")
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        allow_pickle: bool = False,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedules, loaders, generators and registered objects. All processes call it.

        The folder is there as a whole or not at all, whenever a process is killed; one of the same name is replaced
        once the new one is whole. A failure on one process is an error on all of them.

        Args:
            output_dir: The folder; by default the next one under automatic naming.
            safe_serialization: Write weights as safetensors; else as a pickle of tensors.
            allow_pickle: Pickle what of a registered object's state is no plain value, tensor or array.
            **save_model_func_kwargs: `max_shard_size`, the size of one file of weights.

        Returns:
            The folder.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(4, 2))
            >>> folder = accelerator.save_state("/tmp/training/step_100")
            >>> accelerator.load_state(folder)
        """
        known = ("max_shard_size",)
        _check_names(save_model_func_kwargs, known, "save_state")
        words = Words(allow_pickle=allow_pickle, safe_serialization=safe_serialization, **save_model_func_kwargs)
        if self.strategy.writes_shards:
            self._check_words_of_shards(safe_serialization, save_model_func_kwargs)
        automatic = output_dir is None
        target = self._agreed(lambda: self._target(output_dir), "save_state")
        parts = engine_parts.collect(self)
        with Saving(target, self.group, self._leader) as saving:
            with together(self.group, "save_state"):
                saving.write(self._files(parts, saving.folder, words))
            saving.commit(
                Manifest(
                    world_size=self.num_processes,
                    step=self._window.backwards,
                    iteration=self.save_iteration if automatic else None,
                    precision=self.precision.name,
                    parts=[part.name for part in parts],
                    kinds=kinds_of(parts),
                )
            )
        if automatic:
            self._go_on_numbering(target.parent)
        return str(target)

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        safe_serialization: bool = True,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` saved into what is prepared now; all processes have to call it.

        Args:
            input_dir: The folder; by default the newest under automatic naming.
            load_kwargs: Options of `torch.load` in Accelerate, which reads pickles; there are none here.
            allow_pickle: Read pickles that were written with `save_state(allow_pickle=True)`. They can run code.
            safe_serialization: False for weights that were written with `save_state(safe_serialization=False)`.
            **load_model_func_kwargs: `strict`, whether the names of weights have to be those of the model;
                `map_location`, whether files are read to the "cpu" or "on_device".

        Raises:
            CheckpointError: If the folder is not there, not whole, or of another world or training.
            StateError: If something does not fit into what it is loaded into.
        """
        words = self._words_of_load(load_kwargs, load_model_func_kwargs, allow_pickle, safe_serialization)
        folder = self._agreed(lambda: self._source(input_dir), "load_state")
        parts = engine_parts.collect(self, words.strict)
        with together(self.group, "load_state"):
            manifest = open_state(folder, self.num_processes)
            check_counts(manifest.parts, [part.name for part in parts], str(folder))
            check_kinds(manifest.kinds, kinds_of(parts), str(folder))
        with together(self.group, "load_state"):
            self._restore(parts, manifest, folder, words)
        self._find_number(manifest)

    # -- a model alone -------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the tensors of a prepared model, whole, under the names its author knows.

        Where it is sharded all processes have to ask, and the main process gets them.

        Args:
            model: The prepared model.
            unwrap: Whether names are those of the model inside; else those of DDP's wrapper, if there is one.
        """
        if unwrap or self.strategy.unwrap(model) is model:
            return self.strategy.model_state(model)
        return dict(model.state_dict())

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights as Hugging Face's libraries read them; all processes have to call it.

        The main process writes; call `wait_for_everyone` before another one reads.

        Args:
            model: The prepared model.
            save_directory: The folder; what else is in it stays.
            max_shard_size: The size of one file; larger models get several and an index.
            safe_serialization: Write safetensors; else pickles of tensors.
        """
        state = self.get_state_dict(model)
        if self.should_save_model and self._has_whole_tensors:
            save_weights(state, Path(save_directory).expanduser(), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object once (or once a machine, with `save_on_each_node`).

        Args:
            obj: The object.
            f: A path, or a file that is open for writing.
            safe_serialization: Write a dict of tensors as safetensors; else whatever it is with `torch.save`.
        """
        if self.should_save_model:
            save_object(obj, f, safe_serialization)

    # -- private -------------------------------------------------------------------------------------------------

    @property
    def _leader(self) -> int:
        each = self.project_configuration.save_on_each_node
        return self.process_index - self.local_process_index if each else 0

    @property
    def _has_whole_tensors(self) -> bool:
        return self.process_index == 0 or not self.strategy.hands_out

    def _check_words_of_shards(self, safe_serialization: bool, others: Mapping[str, Any]) -> None:
        whole = "or FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT')."
        if self.project_configuration.save_on_each_node:
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

    def _agreed(self, choose: Callable[[], Path], doing: str) -> Path:
        """Return the path that the leader chooses; all have to be able to choose one."""
        with together(self.group, doing):
            path = choose()
        return Path(exchange(self.group, str(path), doing)[self._leader])

    def _target(self, output_dir: str | Path | None) -> Path:
        if output_dir is not None:
            return state_folder(output_dir)
        project = self._named_automatically("save_state")
        target = project / AUTOMATIC_FOLDER / automatic_name(self.save_iteration)
        if target.exists():
            raise ConfigurationError(
                f"{target} exists already, from another run. Call load_state() to go on with that one, or give "
                "another project_dir, or the number to begin with: ProjectConfiguration(iteration=…)."
            )
        return target

    def _source(self, input_dir: str | Path | None) -> Path:
        if input_dir is not None:
            return find_state(input_dir)
        return newest_state(self._named_automatically("load_state"))

    def _named_automatically(self, verb: str) -> Path:
        project = self.project_configuration
        if not project.automatic_checkpoint_naming or project.project_dir is None:
            raise ConfigurationError(
                f"{verb}() needs a folder: {verb}(folder), or Accelerator(project_config=ProjectConfiguration("
                "project_dir=…, automatic_checkpoint_naming=True))."
            )
        return Path(project.project_dir).expanduser().resolve()

    def _files(self, parts: list[Part], folder: Path, words: Words) -> dict[str, Content]:
        """Return what this process is to write, after the hooks had their say."""
        # First what processes may have to put together, while none of them can have failed at something else.
        states = {part.name: part.stateful.state_dict() for part in parts if part.kind in ("model", "optimizer")}
        weights = [part for part in parts if isinstance(part, Weights)]
        remaining = [states[part.name] for part in weights]
        for hook in list(self._save_hooks.values()):
            hook(list(self._models), remaining, str(folder))
        files: dict[str, Content] = {}
        for position, state in enumerate(remaining):
            part = next((part for part in weights if states[part.name] is state), weights[position])
            files |= part.files(state, words)
        for part in parts:
            if not isinstance(part, Weights):
                state = states[part.name] if part.name in states else part.stateful.state_dict()
                files |= part.files(state, words)
        return files

    def _restore(self, parts: list[Part], manifest: Manifest, folder: Path, words: Words) -> None:
        models = list(self._models)
        with together(self.group, "load_state"):
            for hook in list(self._load_hooks.values()):
                hook(models, str(folder))
        remaining = {id(model) for model in models}
        for part in parts:
            if isinstance(part, Weights) and id(self._models[part.index]) not in remaining:
                continue
            if part.name not in manifest.parts:
                _logger.warning("The state in %s has no %s, which stays as it is.", folder, part.name)
                continue
            with together(self.group, "load_state"):
                state = part.read(folder, words)
            part.stateful.load_state_dict(state)
        for name in sorted(set(manifest.parts) - {part.name for part in parts}):
            _logger.warning("The state in %s has a %s, which nothing here takes up.", folder, name)

    def _go_on_numbering(self, folder: Path) -> None:
        project = self.project_configuration
        project.iteration += 1
        if self.should_save_model:
            # The new state is there; what cannot be deleted is no reason to stop training.
            try:
                retention.delete_debris(folder)
                if project.total_limit is not None:
                    retention.delete_oldest(folder, project.total_limit)
            except OSError as error:
                _logger.warning("Older states in %s could not be deleted: %s", folder, error)
        self.wait_for_everyone()

    def _find_number(self, manifest: Manifest) -> None:
        project = self.project_configuration
        if project.automatic_checkpoint_naming and project.project_dir is not None:
            # After the newest too, if an older one was loaded: no state takes the place of another.
            present = retention.automatic_states(self._named_automatically("load_state") / AUTOMATIC_FOLDER)
            project.iteration = max([-1 if manifest.iteration is None else manifest.iteration, *present]) + 1

    def _words_of_load(
        self,
        load_kwargs: Mapping[str, Any] | None,
        others: dict[str, Any],
        allow_pickle: bool,
        safe_serialization: bool,
    ) -> Words:
        if load_kwargs:
            raise ConfigurationError(
                f"load_kwargs={dict(load_kwargs)!r} are options of torch.load, and no pickle is read here. Leave them "
                "out; allow_pickle=True and safe_serialization=False say which pickles may be."
            )
        _check_names(others, ("strict", "map_location"), "load_state")
        where = others.get("map_location", "cpu")
        if where not in ("cpu", "on_device"):
            raise ConfigurationError(unknown("map_location", where, ["cpu", "on_device"]))
        return Words(
            allow_pickle=allow_pickle,
            safe_serialization=safe_serialization,
            strict=others.get("strict", True),
            device="cpu" if where == "cpu" else str(self.device),
        )


def _check_hook(hook: Any, verb: str, takes: str) -> None:
    if not callable(hook):
        raise ConfigurationError(f"{verb} takes a function of ({takes}), got {hook!r}.")


def _check_names(given: Mapping[str, Any], known: tuple[str, ...], verb: str) -> None:
    for name in given:
        if name not in known:
            raise ConfigurationError(unknown(f"argument of {verb}", name, known))
