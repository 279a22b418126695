"""Python's fork server, which starts processes where they are not forked from this one."""

import multiprocessing
from multiprocessing import forkserver
from typing import Any

_BY_DEFAULT = ["__main__"]


def preload(modules: list[str], context: Any = None) -> None:
    """Have the fork server import modules once, before its first process, instead of each process by itself.

    Scripts whose main module imports them gain nothing. A notebook has no main module that the server could import, so
    each data worker of each epoch would import torch, which takes seconds.

    Args:
        modules: The modules. A list that the script has set stays.
        context: The context that starts the processes; `None` is Python's default one.
    """
    default = multiprocessing.get_all_start_methods()[0]
    # To ask for it would set it, and the script may still choose another.
    method = (context or multiprocessing).get_start_method(allow_none=True) or default
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage]  # there is no public way to ask
    if method == "forkserver" and server._preload_modules == _BY_DEFAULT:
        forkserver.set_forkserver_preload([*_BY_DEFAULT, *modules])
