"""The part that a Trainer adds to each checkpoint: the run's counts, its callbacks, and what the last step owes."""

from collections.abc import Mapping
from typing import Any, Protocol

from trainer_lib.trainer.checkpoints.owed_requests import OwedRequests
from trainer_lib.trainer.evaluation.fit_evaluations import FitEvaluations
from trainer_lib.trainer.fit.context import FitContext


class Stateful(Protocol):
    """A part of a fit with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; an empty one leaves the part as it is."""
        ...


class RunStatePart:
    """The state of a run, besides what the accelerator saves.

    Args:
        context: The fit.
        owed: What the last step owes.
        evaluations: The evaluations of the last step.
        parts: Other parts of the fit by the names of their states.

    Attributes:
        loaded: The state of the run in the checkpoint that was loaded last; empty before.
        loaded_position: The updates in that checkpoint's epochs so far, in its own number of samples per update.
        is_run_state: Tells a load that checkpoints of Hugging Face's Trainer have a state for this object.
    """

    is_run_state = True

    def __init__(
        self, context: FitContext, owed: OwedRequests, evaluations: FitEvaluations, parts: Mapping[str, Stateful]
    ) -> None:
        self._context, self._owed, self._evaluations, self._parts = context, owed, evaluations, parts
        self.loaded: Mapping[str, Any] = {}
        self.loaded_position: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        context, owed = self._context, self._owed.saved
        callbacks = context.events.state_dict() | self._evaluations.states_before
        return {
            "run": context.run.state.state_dict(),
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "averages": context.means.state_dict(),
            "updates_of_past_epochs": context.updates_in(context.run.state.epoch),
            **{name: part.state_dict() for name, part in self._parts.items()},
            "owed": owed,
            "requests": context.run.control.state_dict(),
            "evaluated": self._evaluations.state_dict(),
            "sets_due": sorted(context.run.control.sets_due) if "evaluate_sets" in owed else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states; checkpoints of earlier versions lack some."""
        context, self.loaded = self._context, state["run"]
        of_epochs = self.loaded["epoch"] * (self.loaded["steps_per_epoch"] or 0)
        self.loaded_position = (state.get("updates_of_past_epochs") or of_epochs) + self.loaded["steps_in_epoch"]
        context.run.state.load_state_dict(state["run"])
        context.events.load_state_dict(state["callbacks"])
        context.means.load_state_dict(state["averages"])
        self._owed.requests = dict(state.get("owed", {}))
        context.run.control.load_state_dict(state.get("requests", {}))
        context.run.control.sets_due.update(state.get("sets_due", ()))
        self._evaluations.load_state_dict(state.get("evaluated", {}))
        for name, part in self._parts.items():
            part.load_state_dict(state.get(name, {}))
