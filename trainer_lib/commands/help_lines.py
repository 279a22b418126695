"""The lines of an option in a help text, as wide as the terminal."""

import shutil
import textwrap

_WIDEST, _NARROWEST = 120, 40


def option_lines(name: str, text: str, column: int) -> list[str]:
    """Return an option and what it does.

    Args:
        name: The option, with its value.
        text: What it does.
        column: Where the text begins; further left on a narrow terminal.
    """
    columns, _ = shutil.get_terminal_size((_WIDEST, 0))
    width = min(_WIDEST, max(_NARROWEST, columns))
    column = min(column, width * 3 // 8)
    lines = textwrap.wrap(text, width - column, break_on_hyphens=False)
    indented = [f"{'':{column}}{line}" for line in lines]
    if not lines or len(name) + 2 > column:
        return [name, *indented]
    return [f"{name:{column}}{lines[0]}", *indented[1:]]
