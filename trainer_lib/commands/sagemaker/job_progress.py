"""The state and the log of a job on SageMaker, as they come."""

import sys
import time
from typing import Any

_GROUP = "/aws/sagemaker/TrainingJobs"
_INTERVAL = 10.0  # seconds between two looks
_ENDS = ("Completed", "Failed", "Stopped")


def follow(sagemaker: Any, logs: Any, name: str, interval: float = _INTERVAL) -> int:
    """Print what a job does until it ends.

    Args:
        sagemaker: boto3's client of SageMaker.
        logs: That of CloudWatch's logs.
        name: The name of the job.
        interval: Seconds between two looks.

    Returns:
        The exit code: 0 if it was completed, 130 if the user stopped watching, else 1.
    """
    log = _Log(logs, name)
    seen = 0
    try:
        while True:
            job = sagemaker.describe_training_job(TrainingJobName=name)
            steps = job.get("SecondaryStatusTransitions", [])
            for step in steps[seen:]:
                print(f"trainer-lib launch: {step['Status']}: {step.get('StatusMessage', '')}", flush=True)
            seen = len(steps)
            log.print_new()
            status = job["TrainingJobStatus"]
            if status in _ENDS:
                reason = job.get("FailureReason", "")
                print(f"trainer-lib launch: {name}: {status}{': ' if reason else ''}{reason}", flush=True)
                return int(status != "Completed")
            time.sleep(interval)
    except KeyboardInterrupt:
        stop = f"aws sagemaker stop-training-job --training-job-name {name}"
        print(f"\ntrainer-lib launch: {name} continues; this stops it: {stop}", file=sys.stderr, flush=True)
        return 130


class _Log:
    """What the job's instances print, each in a stream of its own."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._prefix = f"{name}/"
        self._next: dict[str, str] = {}  # by stream, the place of the next line

    def print_new(self) -> None:
        """Print the lines that came since the last time."""
        streams = self._streams()
        for stream in streams:
            label = f"[{stream.removeprefix(self._prefix).rpartition('-')[0]}] " if len(streams) > 1 else ""
            for line in self._lines(stream):
                print(f"{label}{line}", flush=True)

    def _streams(self) -> list[str]:
        try:
            pages = self._client.get_paginator("describe_log_streams").paginate(
                logGroupName=_GROUP, logStreamNamePrefix=self._prefix
            )
            return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        except self._client.exceptions.ResourceNotFoundException:
            return []  # before the first instance starts

    def _lines(self, stream: str) -> list[str]:
        lines: list[str] = []
        while True:
            place = {"nextToken": self._next[stream]} if stream in self._next else {"startFromHead": True}
            page = self._client.get_log_events(logGroupName=_GROUP, logStreamName=stream, **place)
            lines += [event["message"] for event in page["events"]]
            is_end = page["nextForwardToken"] == self._next.get(stream)
            self._next[stream] = page["nextForwardToken"]
            if is_end or not page["events"]:
                return lines
