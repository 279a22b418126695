"""The requests that a run which ends early leaves to the run that resumes it."""

from dataclasses import dataclass, field

from trainer_lib.foundation.light_dataclasses import LightDataclass
from trainer_lib.processes.exit_codes import Interruption


@dataclass(repr=False, eq=False)
class OwedRequests(LightDataclass):
    """What is left to do of the last step, before the next one.

    Attributes:
        requests: The requests, as `Control` knows them, each with its reason.
        interruption: What ended the run early, on all ranks; `None`: nothing.
        follows_error: Whether the run is saved after an error.
    """

    requests: dict[str, str | None] = field(default_factory=dict[str, str | None])
    interruption: Interruption | None = None
    follows_error: bool = False

    @property
    def saved(self) -> dict[str, str | None]:
        """The requests that belong into a checkpoint that is written now."""
        return self.requests if self.interruption is not None or self.follows_error else {}
