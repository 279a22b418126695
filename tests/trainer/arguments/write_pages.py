"""Tables of the documentation, and the stub for editors, that follow from the declarations of the arguments.

`python -m tests.trainer.arguments.write_pages` writes docs/arguments.md, docs/trainer.md and the stub.
"""

import re
from collections.abc import Callable
from pathlib import Path

from tests.trainer.arguments.stub import STUB, stub
from trainer_lib import TrainingArguments
from trainer_lib.trainer.arguments.declaration import OnResume, settings

DOCS = Path(__file__).parents[3] / "docs"

_NOTE = "<!-- Written by python -m tests.trainer.arguments.write_pages -->"
_COUNTS = {
    OnResume.KEPT: "the checkpoint's: the order of the data and the random generators are restored",
    OnResume.REFUSED: "a changed value is an error: samples would be repeated or skipped, or the optimizer's state "
    "would not fit",
    OnResume.SILENT: "the new value, without a warning",
}
_OTHERS = "the new value, from the first update: learning rate, schedule, warm-up, weight decay, limits, precision, "


def argument_tables(cls: type[TrainingArguments] = TrainingArguments) -> str:
    """Return a table of the arguments for each section."""
    defaults, rows = cls(), dict[str, list[str]]()
    for name, declared in settings(cls).items():
        row = f"| `{name}` | `{getattr(defaults, name)!r}` | {declared.text} |"
        rows.setdefault(declared.section, []).append(row)
    return "\n\n".join(
        "\n".join([f"### {section[0].upper()}{section[1:]}", "", "| argument | default | |", "|---|---|---|", *lines])
        for section, lines in rows.items()
    )


def resume_table(cls: type[TrainingArguments] = TrainingArguments) -> str:
    """Return the table of what happens to changed arguments when a run is resumed."""
    lines = ["| arguments | which value counts |", "|---|---|"]
    for policy, text in _COUNTS.items():
        names = [f"`{name}`" for name, declared in settings(cls).items() if declared.on_resume is policy]
        lines.append(f"| {', '.join(names)} | {text} |")
    return "\n".join([*lines, f"| all others | {_OTHERS}intervals … |"])


def with_tables(page: str, text: str) -> str:
    """Return the text of a page with its tables as they follow from the declarations."""
    pattern, table = _TABLES[page]
    replaced, count = re.subn(pattern, lambda match: f"{match[1]}{table()}\n", text, flags=re.DOTALL)
    assert count == 1, f"docs/{page} has {count} places for its table"
    return replaced


_TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "arguments.md": (rf"({_NOTE}\n\n).*?\n(?=\n## )", argument_tables),
    "trainer.md": (rf"({_NOTE}\n\n).*?\n(?=\n)", resume_table),
}


def main() -> None:
    """Write the tables and the stub."""
    for page in _TABLES:
        (DOCS / page).write_text(with_tables(page, (DOCS / page).read_text()))
    STUB.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    main()
