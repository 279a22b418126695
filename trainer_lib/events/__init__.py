"""The events of a run, the callbacks that listen to them, the run they get and the requests they make."""

from trainer_lib.events.callback import Callback, Modifier
from trainer_lib.events.dispatcher import Dispatcher
from trainer_lib.events.requests import Control
from trainer_lib.events.run import Run
from trainer_lib.events.run_state import Best, RunState
from trainer_lib.processes.exit_codes import Interruption

__all__ = ["Best", "Callback", "Control", "Dispatcher", "Interruption", "Modifier", "Run", "RunState"]
