"""Short tracebacks in notebooks: IPython hides the library's frames, and says how many."""

import sys
from types import TracebackType
from typing import Any

_LIBRARY = __name__.partition(".")[0]


def notebook_shell() -> Any:
    """Return the IPython shell that runs this process, as in a notebook; `None` in a script."""
    ipython: Any = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def hide_library_frames(error: BaseException) -> None:
    """Have IPython hide the library's frames in the traceback of an error; outside of IPython, change nothing.

    IPython shows the last frame in any case, and shows all others after `%pdb` or `%debug` and `skip_hidden no`.
    """
    seen: set[int] = set()
    current: BaseException | None = error if notebook_shell() is not None else None
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        _hide(current.__traceback__)
        current = current.__cause__ or current.__context__


def _hide(traceback: TracebackType | None) -> None:
    while traceback is not None:
        frame = traceback.tb_frame
        if str(frame.f_globals.get("__name__")).partition(".")[0] == _LIBRARY:
            frame.f_locals["__tracebackhide__"] = True
        traceback = traceback.tb_next
