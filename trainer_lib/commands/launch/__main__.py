"""`python -m trainer_lib.commands.launch`, which is `trainer-lib launch`."""

import sys

from trainer_lib.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
