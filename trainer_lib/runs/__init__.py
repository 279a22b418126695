"""This package is what is known of runs from their folders, without a trainer."""

from trainer_lib.runs.folder import CHECKPOINTS as CHECKPOINTS
from trainer_lib.runs.folder import HISTORY_FILE as HISTORY_FILE
from trainer_lib.runs.folder import RunFolder as RunFolder
from trainer_lib.runs.folder import new_run as new_run
from trainer_lib.runs.folder import read_run as read_run
from trainer_lib.runs.folder import runs_in as runs_in
