"""The table of docs/parallelism.md that says what becomes of each field of `MegatronLMPlugin`.

`python -m tests.options.megatron_lm_table` writes it.
"""

import dataclasses
import re
from pathlib import Path

from trainer_lib.options.megatron_lm.fields import MAPPED, MEMORY, REFUSED
from trainer_lib.utils import MegatronLMPlugin

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
_NOTE = "<!-- Written by python -m tests.options.megatron_lm_table -->"


def table() -> str:
    """Return the table: fields with a counterpart, those without an effect, and those that are refused, by reason."""
    names = [field.name for field in dataclasses.fields(MegatronLMPlugin)]
    lines = ["| field | here |", "|---|---|"]
    lines += [f"| `{name}` | {MAPPED[name]} |" for name in names if name in MAPPED]
    lines += [f"| `{name}` | no effect: {MEMORY[name]} |" for name in names if name in MEMORY]
    refused: dict[str, list[str]] = {}
    for name in names:
        if name in REFUSED:
            refused.setdefault(REFUSED[name], []).append(f"`{name}`")
    lines += [f"| {', '.join(fields)} | refused: {_code(why)} |" for why, fields in refused.items()]
    return "\n".join(lines)


def _code(text: str) -> str:
    return re.sub(r"(?:\w|\.)+\(.*\)", lambda call: f"`{call[0]}`", text)


def with_table(text: str) -> str:
    """Return the text of the page with its table."""
    replaced, count = re.subn(
        rf"({re.escape(_NOTE)}\n\n).*?\n(?=\n<!-- end -->)",
        lambda match: f"{match[1]}{table()}\n",
        text,
        flags=re.DOTALL,
    )
    assert count == 1, f"{PAGE} has {count} places for its table"
    return replaced


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
