"""The fork server imports torch once for all data workers."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch.utils.data import Dataset

PROGRAM = """
    import multiprocessing
    from torch.utils.data import DataLoader
    from tests.processes.test_fork_server import Server
    from trainer_lib.data_loader import prepare_data_loader
    {before}
    loader = DataLoader(Server(), num_workers=1, collate_fn=list, multiprocessing_context={context!r})
    prepared = prepare_data_loader(loader, num_processes=1)
    method = multiprocessing.get_start_method(allow_none=True)
    print(list(prepared), method)
"""


class Server(Dataset[bool]):
    """Whether the parent of the worker has loaded torch."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        return "libtorch" in Path(f"/proc/{os.getppid()}/maps").read_text()


@pytest.mark.parametrize(
    ("before", "context", "printed"),
    [
        ("", "forkserver", "[[True]] None"),
        ("", None, "[[True]] None"),
        ("multiprocessing.set_start_method('forkserver')", None, "[[True]] forkserver"),
        ("multiprocessing.set_forkserver_preload(['json'])", "forkserver", "[[False]] None"),
    ],
)
def test_a_program_without_a_file_has_workers_from_a_server_with_torch(
    before: str, context: str | None, printed: str
) -> None:
    program = textwrap.dedent(PROGRAM).format(before=before, context=context)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert ended.stdout.strip() == printed
