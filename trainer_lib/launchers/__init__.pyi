from trainer_lib.launchers.debug import debug_launcher as debug_launcher
from trainer_lib.launchers.fork import run_forked as run_forked
from trainer_lib.launchers.notebook_launcher import notebook_launcher as notebook_launcher
from trainer_lib.launchers.process_failures import ProcessFailedError as ProcessFailedError

__all__: list[str]
