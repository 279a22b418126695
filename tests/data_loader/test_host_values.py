"""What integers of a batch were on the host, before they were copied to an accelerator."""

import gc
from weakref import ref

import torch
from torch.nn.utils.rnn import pack_sequence

from trainer_lib.data_loader.host_values import host_value, send_remembered


def test_integers_are_known_and_changed_ones_are_not() -> None:
    batch = send_remembered({"labels": torch.tensor([1, -100])}, "meta")
    assert host_value(batch["labels"]).tolist() == [1, -100]
    batch["labels"].add_(1)
    assert host_value(batch["labels"]) is batch["labels"]


def test_an_integer_tensor_that_stays_on_the_host_is_freed() -> None:
    batch = send_remembered(pack_sequence([torch.ones(2, dtype=torch.int64)]), "meta")
    sizes = ref(batch.batch_sizes)
    assert sizes() is not None
    del batch
    gc.collect()
    assert sizes() is None
