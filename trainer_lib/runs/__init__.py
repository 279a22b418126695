"""Runs on disk: their folders, histories, leases, status and reports, without a trainer."""

from trainer_lib.runs.find_runs import FoundRun as FoundRun
from trainer_lib.runs.find_runs import find_runs as find_runs
from trainer_lib.runs.find_runs import read_run as read_run
from trainer_lib.runs.run_folder import CHECKPOINTS as CHECKPOINTS
from trainer_lib.runs.run_folder import EVALUATIONS_FILE as EVALUATIONS_FILE
from trainer_lib.runs.run_folder import HISTORY_FILE as HISTORY_FILE
from trainer_lib.runs.run_folder import IDENTITY_FILE as IDENTITY_FILE
from trainer_lib.runs.run_folder import RUN_FILE as RUN_FILE
from trainer_lib.runs.run_folder import RunFolder as RunFolder
from trainer_lib.runs.run_folder import new_run as new_run
