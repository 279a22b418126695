"""The share of positions that are no padding, in the log."""

import torch

from trainer_lib.callbacks import Throughput
from trainer_lib.events import Run


def test_the_fill_of_batches_is_logged_since_the_last_log() -> None:
    throughput, run = Throughput(fill=True), Run()
    throughput.on_fit_begin(run)
    for row in ([1, 1, 0, 0], [1, 1, 1, 1]):
        run.batch = {"attention_mask": torch.tensor([row])}
        throughput.on_micro_batch_end(run)
    values: dict[str, float] = {}
    throughput.on_log(run, values)
    assert values["fill"] == 6 / 8
    values.clear()
    throughput.on_log(run, values)
    assert "fill" not in values
