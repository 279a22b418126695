"""This package is what happens in a run: the events, who listens, what they are handed and what they may ask for."""

from trainer_lib.events.callback import Callback, Modifier
from trainer_lib.events.dispatcher import Dispatcher
from trainer_lib.events.requests import Control
from trainer_lib.events.run import Run
from trainer_lib.events.run_state import Best, RunState
from trainer_lib.processes.exit_codes import Interruption

__all__ = ["Best", "Callback", "Control", "Dispatcher", "Interruption", "Modifier", "Run", "RunState"]
