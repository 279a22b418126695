"""Registers the way in which ranks find each other."""

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


def _rendezvous(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master)
    yield dist.PrefixStore("torch_xla", store), rank, size


dist.register_rendezvous_handler("xla", _rendezvous)
