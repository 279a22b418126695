"""The `Accelerator`'s methods for checkpoints: `save_state`, `load_state`, `save_model` and their hooks."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_lib.accelerator.methods.collective_methods import CollectiveMethods
from trainer_lib.accelerator.prepared import Prepared
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.lazy_imports import without_collections
from trainer_lib.options.project_options import ProjectConfiguration, project_configuration
from trainer_lib.strategies import Strategy

if TYPE_CHECKING:
    from trainer_lib.accelerator.checkpoints.checkpoints import Checkpoints, Facts, LoadHook, SaveHook


class CheckpointMethods(CollectiveMethods):
    """Methods of an `Accelerator` that save and load."""

    prepared: Prepared
    strategy: Strategy
    checkpoints: "Checkpoints"

    # -- settings ------------------------------------------------------------------------------------------------

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The project's folders, and how its checkpoints are named and kept; another one can be set."""
        return self.checkpoints.project

    @project_configuration.setter
    def project_configuration(self, configuration: ProjectConfiguration) -> None:
        self.checkpoints.project = project_configuration(None, configuration)

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
        """The number of the next checkpoint under automatic naming."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes models."""
        return self.checkpoints.leads

    # -- whole checkpoints ---------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load further objects that have `state_dict` and `load_state_dict`.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 5)
            >>> accelerator.register_for_checkpointing(schedule)
        """
        unfit = [
            f"{type(value).__name__} (argument {index})"
            for index, value in enumerate(objects)
            if not all(callable(getattr(value, verb, None)) for verb in ("state_dict", "load_state_dict"))
        ]
        if unfit:
            raise ConfigurationError(
                f"These objects lack state_dict or load_state_dict: {', '.join(unfit)}. Give objects that have both."
            )
        self.prepared.custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: "SaveHook") -> RemovableHandle:
        """Have `save_state` call `hook(models, weights, output_dir)` on all ranks before it writes.

        `models` are your models, without DDP's wrapper. The hook may change weights, remove weights so that they are
        not written, and write files into `output_dir`. Call `remove()` of the returned handle to unregister it.
        """
        return self.checkpoints.on_save(hook)

    def register_load_state_pre_hook(self, hook: "LoadHook") -> RemovableHandle:
        """Have `load_state` call `hook(models, input_dir)` on all ranks before it loads.

        `models` are your models, without DDP's wrapper; those that the hook removes from the list are not loaded. Call
        `remove()` of the returned handle to unregister it.
        """
        return self.checkpoints.on_load(hook)

    def register_state_facts(self, facts: "Facts") -> RemovableHandle:
        """Have `save_state` write what `facts()` returns into the manifest, for `trainer-lib checkpoint list`.

        `save_state` calls it on all ranks. Known facts: run_id, step, epoch, samples, items, arguments, reasons,
        metrics, best. Call `remove()` of the returned handle to unregister it.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> handle = accelerator.register_state_facts(lambda: {"run_id": "third try", "samples": 4096})
        """
        return self.checkpoints.add_facts(facts)

    def save_state(
        self,
        output_dir: str | AnyPath | None = None,
        safe_serialization: bool = True,
        *,
        allow_pickle: bool = False,
        background: bool = False,
        layout: str = "trainer_lib",
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedules, loaders, generators and registered objects. All ranks call it.

        Under DDP, rank 0 saves alone where no other rank calls it within a minute, as in scripts that save under `if
        accelerator.is_main_process`. A run that resumes from such a state lacks the random states of the other ranks.

        The save is atomic: if a process is killed, the folder is complete or does not exist. An existing folder of
        the same name is replaced once the new one is complete. A failure on one rank raises on all ranks.

        Args:
            output_dir: The folder, or its URL, such as `s3://bucket/state`; by default the next one under automatic
                naming.
            safe_serialization: Write weights as safetensors; else as a pickle of tensors.
            allow_pickle: Pickle those parts of a registered object's state that are no plain values, tensors or
                arrays.
            background: Return once all tensors are copied into host memory, which later saves reuse; a thread writes
                them. The next `save_state` or `load_state`, `wait_for_save` and `end_training` wait for the thread,
                and raise its errors.
            layout: "accelerate" writes what Accelerate's `load_state` reads, without a manifest, checksums and the
                position in the data.
            **save_model_func_kwargs: `max_shard_size`, the largest size of one file of weights.

        Returns:
            The folder.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(4, 2))
            >>> folder = accelerator.save_state("training/step_100")
            >>> accelerator.load_state(folder)
        """
        with without_collections():
            from trainer_lib.accelerator.checkpoints.save_state import save

        return str(
            save(
                self.checkpoints,
                output_dir,
                safe_serialization=safe_serialization,
                allow_pickle=allow_pickle,
                background=background,
                layout=layout,
                save_model_kwargs=save_model_func_kwargs,
            )
        )

    def wait_for_save(self) -> None:
        """Wait until all ranks have written the checkpoint that is being saved in the background.

        Raises:
            CheckpointError: If it could not be saved.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(4, 2))
            >>> folder = accelerator.save_state("training/step_200", background=True)
            >>> accelerator.wait_for_save()
        """
        self.checkpoints.background.wait()

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self.checkpoints.background.is_running

    def load_state(
        self,
        input_dir: str | AnyPath | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        safe_serialization: bool = True,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint of `save_state`, ours or Accelerate's, into the prepared objects. All ranks call it.

        Args:
            input_dir: The folder, or its URL; by default, or as "latest", the newest complete one under automatic
                naming. If that one is damaged, it is renamed, and the one before it is loaded.
            load_kwargs: Options of `torch.load` in Accelerate, which reads pickles; must be empty here.
            allow_pickle: Read pickles that were written with `save_state(allow_pickle=True)`. They can run code.
            safe_serialization: `False` for weights that another process wrote with
                `save_state(safe_serialization=False)`.
            **load_model_func_kwargs: `strict`, whether the names of weights must equal those of the model;
                `map_location`, whether files are read to the "cpu" or "on_device".

        Raises:
            CheckpointError: If the folder is missing, incomplete, damaged in any byte, or from another training.
            StateError: If a saved part does not fit the prepared object.
        """
        from trainer_lib.accelerator.checkpoints.load_state import load

        load(self.checkpoints, input_dir, load_kwargs, load_model_func_kwargs, allow_pickle, safe_serialization)

    # -- a model alone -------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole tensors of a prepared model under the names of the unwrapped model.

        For a sharded model all ranks must call it; rank 0 gets the tensors, on the CPU. The plugin's
        `state_dict_config` chooses otherwise.

        Args:
            model: The prepared model.
            unwrap: Whether to use the names of the model inside; else those of DDP's wrapper, if there is one.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(4, 2))
            >>> list(accelerator.get_state_dict(model))
            ['weight', 'bias']
        """
        if unwrap or self.strategy.unwrap(model) is model:
            return self.strategy.exported_state(model)
        return dict(model.state_dict())

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | AnyPath,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights in Hugging Face's layout. All ranks call it.

        Rank 0 writes; call `wait_for_everyone` before another rank reads.

        Args:
            model: The prepared model.
            save_directory: The folder; its other files stay.
            max_shard_size: The largest size of one file; a larger model gets several files and an index.
            safe_serialization: Write safetensors; else pickles of tensors.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.save_model(accelerator.prepare(torch.nn.Linear(4, 2)), "weights")
        """
        from trainer_lib.checkpointing.model_weights import save_weights

        state = self.strategy.model_state(model)
        if self.should_save_model and self.checkpoints.engine.has_whole_tensors:
            save_weights(state, path_at(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object on rank 0 (with `save_on_each_node`, on one rank of each machine).

        Args:
            obj: The object.
            f: A path, or a file that is open for writing.
            safe_serialization: Write a dict of tensors as safetensors; else any object with `torch.save`.
        """
        from trainer_lib.checkpointing.save.torch_save import save_object

        if self.should_save_model:
            save_object(obj, f, safe_serialization)
