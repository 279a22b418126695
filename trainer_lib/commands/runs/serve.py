"""Serves live pages until Ctrl-C."""

import webbrowser
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_lib.runs.report.live_pages import LivePages


def serve(pages: "LivePages", opens_browser: bool) -> int:
    """Print the address, serve until Ctrl-C, and return the exit code."""
    print(f"{pages.url} (Ctrl-C ends it)", flush=True)
    if opens_browser:
        webbrowser.open(pages.url)
    try:
        pages.serve()
    except KeyboardInterrupt:
        print()
    return 0
