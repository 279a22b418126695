"""This file is a run that leaves the process as it found it: no contestant finds what another one set."""

import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def isolated() -> Generator[None]:
    """Restore the environment, warnings, logging, threads and generators on leaving."""
    environment, generator = dict(os.environ), torch.get_rng_state()
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # set-up is repeated for each run, and so would be what it has to say
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.set_num_threads(threads)
        torch.set_rng_state(generator)
        os.environ.clear()
        os.environ.update(environment)
