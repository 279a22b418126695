"""`python -m trainer_lib`, which is the program `trainer-lib`."""

import sys

from trainer_lib.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
