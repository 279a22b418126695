"""Cut a model in place: modules of other stages are removed, and a forward enters and leaves at the cuts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor, nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, PreparationError
from trainer_lib.modules.block_split import find_blocks, split_evenly, surroundings
from trainer_lib.modules.weights.names import class_name
from trainer_lib.strategies.pipeline_parallel.model_stages import Activations, ModelStages, StageEnd

# Options of models of transformers by which a forward records what its blocks compute, for its outputs and its loss.
_RECORDED = ("output_router_logits", "output_hidden_states", "output_attentions")


@dataclass
class Cut:
    """Where a model is cut.

    Args:
        before: The modules that run on the first stage only.
        blocks: The blocks in the order they run.
        after: The modules that run on the last stage only.
        bounds: The block with which each stage begins, and the number of blocks.
    """

    before: list[str]
    blocks: list[str]
    after: list[str]
    bounds: list[int]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        blocks: str | Sequence[str] | None,
        num_stages: int,
        first_blocks: Sequence[str] | None = None,
    ) -> "Cut":
        """Return the cut into stages that are as equal as possible, or that begin with the given blocks.

        Raises:
            ConfigurationError: If the model cannot be cut into so many stages.
        """
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ConfigurationError(
                f"{class_name(model)} has an encoder and a decoder, and a pipeline needs one row of blocks that pass "
                "on one tensor. Cut it by tracing (TorchPipelineParallelConfig(example_inputs=…)), or set pp_size=1."
            )
        _refuse_recorded_outputs(model, _options_of(model))
        names = find_blocks(model, blocks)
        before, after = surroundings(model, names)
        if first_blocks is None:
            return cls(before, names, after, split_evenly(model, names, num_stages))
        starts = [names.index(block) if block in names else -1 for block in first_blocks]
        if starts != sorted(set(starts)) or starts[0] < 1:
            raise ConfigurationError(
                f"The stages cannot begin with {', '.join(first_blocks)}. Name modules of one row, in the order they "
                f"run, and not the first one: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}."
            )
        return cls(before, names, after, [0, *starts, len(names)])

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.bounds) - 1

    def position(self, name: str) -> int:
        """Return the position of a module in the row: -1 before the blocks, the number of blocks after them."""
        if name in self.before:
            return -1
        return self.blocks.index(name) if name in self.blocks else len(self.blocks)

    def stage_of(self, name: str) -> int:
        """Return the stage on which a module runs."""
        position = min(max(self.position(name), 0), len(self.blocks) - 1)
        return next(stage for stage in range(self.num_stages) if position < self.bounds[stage + 1])

    def modules(self) -> list[str]:
        """Return the names of the modules that run on one stage only."""
        return [*self.before, *self.blocks, *self.after]


class StageGates(ModelStages):
    """Cuts a model between blocks that run in a row.

    Args:
        cut: Where the model is cut.
    """

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self._reached = -1  # the position of the last module that was passed in this forward

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.cut.num_stages

    def remove_others(self, model: nn.Module, held: Sequence[int]) -> None:
        """Replace the modules of the stages that this rank does not hold."""
        for name in self.cut.modules():
            if self.cut.stage_of(name) not in held:
                kind = class_name(model.get_submodule(name))
                model.set_submodule(name, _Elsewhere(self, name, kind))

    def install(self, model: nn.Module, held: Sequence[int]) -> None:
        """End the forward of the model after the last block of each stage but the last one."""
        model.forward = self._returning(model.forward)
        if len(held) > 1:
            for name in self.cut.modules():
                if self.cut.stage_of(name) in held:
                    self._close_on_other_stages(model.get_submodule(name), name)
        last_blocks: Mapping[str, int] = {
            self.cut.blocks[self.cut.bounds[stage + 1] - 1]: stage for stage in held if stage < self.cut.num_stages - 1
        }
        for name, stage in last_blocks.items():
            model.get_submodule(name).register_forward_hook(self._ending(name, stage))

    def run(self, model: nn.Module, stage: int, received: Activations, args: Any, kwargs: Any) -> Any:
        """Return the outputs of the model on its last stage, of a forward that passes modules in their order."""
        _refuse_recorded_outputs(model, kwargs)
        self._reached = -1
        return super().run(model, stage, received, args, kwargs)

    def parameters_of(self, model: nn.Module, stage: int) -> Iterator[nn.Parameter]:
        """Yield the parameters of the modules that run on a stage of this rank only."""
        names = [name for name in self.cut.modules() if self.cut.stage_of(name) == stage]
        return (parameter for name in names for parameter in model.get_submodule(name).parameters())

    def pass_on(self, name: str, kind: str) -> Tensor:
        """Return what a module of another stage gives: the received activations."""
        if self.stage is None:
            raise PreparationError(
                f"{name} ({kind}) is on another rank of the pipeline. Call the model that prepare() returned, on all "
                "ranks, not the one inside; generate() does not work with pp_size above 1."
            )
        position = self.cut.position(name)
        is_early = bool(self.received) and position < self.cut.bounds[self.stage + 1]
        # The first call of a block that ends a stage has ended it, without the calls that follow.
        is_repeated = 0 <= position == self._reached and position + 1 in self.cut.bounds
        if not is_early or position < self._reached or is_repeated:
            raise PreparationError(
                f"{name} ({kind}) is called on stage {self.stage}, and runs on stage {self.cut.stage_of(name)}: the "
                "model cannot be cut there. A pipeline needs blocks that run in a row, each once, in the order in "
                "which the model holds them, after the modules that it holds before them. Name all that run in a row, "
                "in that order (blocks=[…] of TorchPipelineParallelConfig), or cut it by tracing (example_inputs=)."
            )
        self._reached = position
        return self.received[0]

    def _check_end(self, model: nn.Module, stage: int) -> None:
        """Raise if a stage before the last one has run to the end of the forward."""
        if stage < self.cut.num_stages - 1:
            raise PreparationError(
                f"{class_name(model)} returned before its block {self.cut.blocks[self.cut.bounds[stage + 1] - 1]} ran, "
                "after which it is cut. Give the blocks in the order they run (blocks= of "
                "TorchPipelineParallelConfig)."
            )

    def _close_on_other_stages(self, module: nn.Module, name: str) -> None:
        """Let a module of this rank compute on its stage only, and in a backward that computes its forward again."""
        forward, stage, kind = module.forward, self.cut.stage_of(name), class_name(module)

        @wraps(forward)
        def gated(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if self.stage in (None, stage) else self.pass_on(name, kind)

        module.forward = gated

    def _ending(self, name: str, stage: int) -> Any:
        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            del inputs
            if self.stage == stage:
                if not isinstance(output, Tensor):
                    raise PreparationError(
                        f"{name} ({class_name(module)}) returns a {type(output).__name__}, and a pipeline passes one "
                        "tensor from stage to stage. Name other blocks (blocks= of TorchPipelineParallelConfig), or "
                        "cut the model by tracing (example_inputs=)."
                    )
                raise StageEnd((output,))

        return end


def _refuse_recorded_outputs(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise for outputs that a model of transformers records in all of its blocks, of which a rank has some."""
    for name in _RECORDED:
        if options.get(name, False):
            raise PreparationError(
                f"{class_name(model)} with {name}={shown(options[name])} uses what each of its blocks computes beside "
                "its output, and a rank of a pipeline has some of the blocks. Cut the model by tracing "
                f"(TorchPipelineParallelConfig(example_inputs=…)), or set {name}=False in its configuration and calls."
            )


def _options_of(model: nn.Module) -> dict[str, Any]:
    """Return the options in the configurations of a model and of the models inside it that are on."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return {name: value for config in configs for name in _RECORDED if (value := getattr(config, name, False))}


class _Elsewhere(nn.Module):
    """Stands in for a module of another stage."""

    def __init__(self, gates: StageGates, name: str, kind: str) -> None:
        super().__init__()
        self._gates, self._name, self._kind = gates, name, kind

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the activations that the stage received."""
        del args, kwargs
        return self._gates.pass_on(self._name, self._kind)

    def __getattr__(self, name: str) -> Any:
        """Return what a module has; what only the other rank's has is an error that says so."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"{self._name} ({self._kind}) is on another rank of the pipeline, and the model reads its {name!r} on "
                "this one. Cut the model by tracing (example_inputs= of TorchPipelineParallelConfig)."
            ) from None

    def extra_repr(self) -> str:
        """Return the class of the module."""
        return f"{self._kind} on another rank"
