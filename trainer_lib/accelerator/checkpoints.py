"""This file is the engine's side of state on disk: save all that survives a restart, load it, save a model alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_lib.accelerator.collective_methods import Processes
from trainer_lib.checkpointing.save.background import BackgroundSaves
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.project_options import ProjectConfiguration
from trainer_lib.precision import FullPrecision
from trainer_lib.state.accumulation_window import GradientWindow
from trainer_lib.strategies import SingleProcess

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]
Facts = Callable[[], Mapping[str, Any]]


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
    _facts: dict[int, Facts]
    _background: BackgroundSaves
    # Buffers that may hold infinities, such as masks: by them no state counts as one that is not finite.
    infinite_buffers: frozenset[str] = frozenset()

    # -- settings ------------------------------------------------------------------------------------------------

    @property
    def project_dir(self) -> str | AnyPath | None:
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

    def register_state_facts(self, facts: Facts) -> RemovableHandle:
        """Have what `facts()` returns written into the manifests of states, for `trainer-lib checkpoint list`.

        `save_state` calls it on all processes. What it may tell: run_id, step, epoch, samples, items, arguments,
        reasons, metrics, best. Its handle has `remove()`.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> handle = accelerator.register_state_facts(lambda: {"run_id": "third try", "samples": 4096})
        """
        if not callable(facts):
            raise ConfigurationError(f"register_state_facts takes a function of nothing, got {facts!r}.")
        handle = RemovableHandle(self._facts)
        self._facts[handle.id] = facts
        return handle

    def save_state(
        self,
        output_dir: str | AnyPath | None = None,
        safe_serialization: bool = True,
        *,
        allow_pickle: bool = False,
        background: bool = False,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedules, loaders, generators and registered objects. All processes call it.

        The folder is there as a whole or not at all, whenever a process is killed; one of the same name is replaced
        once the new one is whole. A failure on one process is an error on all of them.

        Args:
            output_dir: The folder, or its URL, such as `s3://bucket/state`; by default the next one under automatic
                naming.
            safe_serialization: Write weights as safetensors; else as a pickle of tensors.
            allow_pickle: Pickle what of a registered object's state is no plain value, tensor or array.
            background: Return once all tensors are copied, into host memory that each such save uses again; a thread
                writes them. The next `save_state` or `load_state`, `wait_for_save` and `end_training` wait for it,
                and raise what went wrong.
            **save_model_func_kwargs: `max_shard_size`, the size of one file of weights.

        Returns:
            The folder.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(4, 2))
            >>> folder = accelerator.save_state("/tmp/training/step_100")
            >>> accelerator.load_state(folder)
        """
        from trainer_lib.accelerator import save_load

        return str(
            save_load.save(self, output_dir, safe_serialization, allow_pickle, background, save_model_func_kwargs)
        )

    def wait_for_save(self) -> None:
        """Wait until what is saved in the background is on the disk, on all processes.

        Raises:
            CheckpointError: If it could not be saved.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(4, 2))
            >>> folder = accelerator.save_state("/tmp/training/step_200", background=True)
            >>> accelerator.wait_for_save()
        """
        self._background.wait()

    @property
    def is_saving(self) -> bool:
        """Whether a state is being written in the background."""
        return self._background.is_running

    def load_state(
        self,
        input_dir: str | AnyPath | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        safe_serialization: bool = True,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` saved into what is prepared now; all processes have to call it.

        Args:
            input_dir: The folder, or its URL; by default, or as "latest", the newest whole one under automatic naming.
                One that is damaged is then renamed, and the one before it is loaded.
            load_kwargs: Options of `torch.load` in Accelerate, which reads pickles; there are none here.
            allow_pickle: Read pickles that were written with `save_state(allow_pickle=True)`. They can run code.
            safe_serialization: False for weights that were written with `save_state(safe_serialization=False)`.
            **load_model_func_kwargs: `strict`, whether the names of weights have to be those of the model;
                `map_location`, whether files are read to the "cpu" or "on_device".

        Raises:
            CheckpointError: If the folder is not there, not whole, damaged in any byte, or of another training.
            StateError: If something does not fit into what it is loaded into.
        """
        from trainer_lib.accelerator import save_load

        save_load.load(self, input_dir, load_kwargs, load_model_func_kwargs, allow_pickle, safe_serialization)

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
        save_directory: str | AnyPath,
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
        from trainer_lib.checkpointing.model_weights import save_weights

        state = self.get_state_dict(model)
        if self.should_save_model and self._has_whole_tensors:
            save_weights(state, path_at(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object once (or once a machine, with `save_on_each_node`).

        Args:
            obj: The object.
            f: A path, or a file that is open for writing.
            safe_serialization: Write a dict of tensors as safetensors; else whatever it is with `torch.save`.
        """
        from trainer_lib.checkpointing.save.torch_save import save_object

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


def _check_hook(hook: Any, verb: str, takes: str) -> None:
    if not callable(hook):
        raise ConfigurationError(f"{verb} takes a function of ({takes}), got {hook!r}.")
