"""The report on an update that is not finite: which rank, which samples and which parameters caused it."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer_lib.logging import get_logger
from trainer_lib.modules.module_buffers import buffers_kept
from trainer_lib.process_group import LoneProcess, ProcessGroup
from trainer_lib.strategies.clip_grad_norm import local_values
from trainer_lib.trainer.evaluation.eval_mode import generators_kept
from trainer_lib.trainer.fit.context import FitContext

_logger = get_logger(__name__)

_SHOWN = 3
_SAMPLES_SHOWN = 16


class _Findings(NamedTuple):
    """What one rank found."""

    losses: list[str]  # those that are not finite
    parameters: list[str]  # those whose gradients are not finite
    samples: str  # of its last batch
    has_bad_weight: bool


class NonFiniteReport:
    """Names the cause of NaN or Inf in an update, once the norm of its gradients is not finite.

    Args:
        context: What is trained.
    """

    def __init__(self, context: FitContext) -> None:
        self._context, self._run = context, context.run
        self._losses: list[tuple[int, float, str]] = []  # the step, the loss, and of which samples
        self._has_bad_weight: Tensor | None = None  # on the device, where nothing waits for it

    def note_loss(self, value: float) -> None:
        """Note a loss that is not finite, while its batch is at hand."""
        self._losses.append((self._run.state.step, value, self.samples()))

    def watch_weights(self) -> None:
        """Note whether a weight of this window is not finite, without waiting for the device."""
        for _, weight in self._run.accelerator.window.weights_so_far():
            if isinstance(weight, Tensor) or not math.isfinite(weight):
                is_bad = ~torch.isfinite(torch.as_tensor(weight))
                self._has_bad_weight = is_bad if self._has_bad_weight is None else self._has_bad_weight | is_bad

    def samples(self) -> str:
        """Return which samples this process has in hand, in words."""
        ids = self._context.loader.sample_ids()
        if ids is None:
            return ""
        more = ", …" if len(ids) > _SAMPLES_SHOWN else ""
        return f" (samples {', '.join(str(sample) for sample in ids[:_SAMPLES_SHOWN])}{more})"

    @property
    def _group(self) -> ProcessGroup:
        """The ranks whose gradients make one update: all, or this one alone while ranks train by themselves."""
        accelerator = self._run.accelerator
        return LoneProcess() if accelerator.window.is_local else accelerator.group

    def find(self, norm: float) -> str:
        """Return what is wrong with the update, as all processes see it. All of them have to ask."""
        run = self._run
        step = run.state.step
        losses = [f"{value}{samples}" for at, value, samples in self._losses if at == step]
        self._losses.clear()
        self.watch_weights()
        has_bad_weight = self._has_bad_weight is not None and bool(self._has_bad_weight)
        self._has_bad_weight = None
        by_rank: list[_Findings] = self._group.all_gather_objects(
            _Findings(losses, self._parameters(), self.samples(), has_bad_weight)
        )
        several = len(by_rank) > 1
        bad = [
            f"{loss}{f' on process {rank}' if several else ''}"
            for rank, findings in enumerate(by_rank)
            for loss in findings.losses
        ]
        parameters = list(dict.fromkeys(name for findings in by_rank for name in findings.parameters))
        weighed = [
            f" on process {rank}{findings.samples}" if several else findings.samples
            for rank, findings in enumerate(by_rank)
            if findings.has_bad_weight
        ]
        if bad:
            what = f"In step {step + 1} the loss is {'; '.join(bad)}"
        elif weighed:
            return (
                f"In step {step + 1} the weight of the loss is negative, NaN or infinite{' and'.join(weighed)}. Give "
                "the number of its items, 0 or more: num_items, or LossResult(…, weight=…)."
            )
        else:
            whose = self._whose(by_rank) if several else by_rank[0].samples
            what = f"In step {step + 1} the gradients have the norm {norm}, of losses that are finite{whose}"
        return f"{what}.{self._named(parameters) if not bad else ''}"

    def spoiled_weights(self) -> list[str]:
        """Return which weights are not finite on any rank. All ranks have to ask."""
        own = self._names_of_nonfinite(lambda parameter: parameter.detach())
        gathered = self._group.all_gather_objects(own)
        return list(dict.fromkeys(name for names in gathered for name in names))

    def _whose(self, by_rank: Sequence[_Findings]) -> str:
        """Return whose gradients it is, where each process can compute its own once more."""
        own = self._computed_again()
        found = self._group.all_gather_objects(own)
        ranks = [rank for rank, names in enumerate(found) if names]
        if not ranks:
            return ""
        return ", of " + " and ".join(f"process {rank}{by_rank[rank].samples}" for rank in ranks)

    def _computed_again(self) -> list[str]:
        """Return which gradients of the last batch are not finite on this process alone."""
        accelerator, models = self._context.accelerator, self._context.models
        if accelerator.strategy.needs_lockstep:
            return []  # a rank cannot compute gradients alone
        for optimizer in self._run.optimizers.values():
            optimizer.optimizer.zero_grad()
        try:
            with ExitStack() as stack:
                stack.enter_context(generators_kept(accelerator.device, {"models": models}))
                stack.enter_context(buffers_kept(models))
                for model in models:
                    stack.enter_context(accelerator.no_sync(model))
                self._context.loss.computed(self._run.model, self._run.batch).loss.backward()
        except Exception as error:  # noqa: BLE001 - what is wrong is known; this was to tell it in more detail
            _logger.debug("The step could not be computed again: %s", error)
            return []
        return self._parameters()

    def _parameters(self) -> list[str]:
        return self._names_of_nonfinite(lambda parameter: parameter.grad)

    def _names_of_nonfinite(self, of: Callable[[nn.Parameter], Tensor | None]) -> list[str]:
        models = self._context.named_models
        named = (
            (f"{prefix}.{name}" if prefix else name, of(parameter))
            for prefix, model in models.items()
            for name, parameter in self._run.accelerator.unwrap_model(model).named_parameters()
        )
        return [
            name
            for name, tensor in named
            if tensor is not None and not all(torch.isfinite(value).all() for value in local_values([tensor]))
        ]

    def _named(self, parameters: list[str]) -> str:
        if not parameters:
            return ""
        more = f" and {len(parameters) - _SHOWN} more" if len(parameters) > _SHOWN else ""
        return f" Not finite are those of {', '.join(parameters[:_SHOWN])}{more}."
