"""The program `trainer-lib` under the module that scripts run as `python -m accelerate.commands.accelerate_cli`."""

import sys

from trainer_lib.commands.main import main as main

if __name__ == "__main__":
    sys.exit(main())
