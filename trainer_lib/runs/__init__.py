"""This package is what is known of runs from their folders, without a trainer."""

from trainer_lib.runs.finding import FoundRun as FoundRun
from trainer_lib.runs.finding import find_runs as find_runs
from trainer_lib.runs.finding import read_run as read_run
from trainer_lib.runs.folder import CHECKPOINTS as CHECKPOINTS
from trainer_lib.runs.folder import HISTORY_FILE as HISTORY_FILE
from trainer_lib.runs.folder import IDENTITY_FILE as IDENTITY_FILE
from trainer_lib.runs.folder import RUN_FILE as RUN_FILE
from trainer_lib.runs.folder import RunFolder as RunFolder
from trainer_lib.runs.folder import new_run as new_run
