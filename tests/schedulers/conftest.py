"""The fixture that starts a SLURM."""

from collections.abc import Generator

import pytest

from tests.schedulers.slurm_cluster import SlurmCluster, reason_without_slurm, running_slurm


@pytest.fixture(scope="package")
def slurm() -> Generator[SlurmCluster]:
    """A SLURM of two nodes, if its programs are installed."""
    reason = reason_without_slurm()
    if reason is not None:
        pytest.skip(reason)
    with running_slurm() as cluster:
        yield cluster
