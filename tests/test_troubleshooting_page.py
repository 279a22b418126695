"""The messages that pages show are those of the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    *re.findall(r"```text\n(.*?)\n```", (ROOT / "docs" / "troubleshooting.md").read_text(), re.DOTALL),
    # Of other pages, the first lines: what follows them are places in the code.
    *re.findall(
        r"```text\n((?:NonFiniteError|No rank has).*)\n",
        "".join((ROOT / "docs" / page).read_text() for page in ("trainer.md", "debugging.md")),
    ),
]
# A string that continues on the next line, the values in it, and its escapes.
JOINS = re.compile(r"[\"']\s*\n\s*f?[\"']")
# What the code fills in: numbers, names, paths, and what the page leaves out.
VALUES = re.compile(r"…|^NonFiniteError: |\d+|=[\w]+|=\S+\.|\"auto\"|: nan|\bnan\b|CrossEntropyLoss|runs/|cuda|\bNet\b")


OF_TORCH = (
    "torch.OutOfMemoryError",
    "RuntimeError: Input type",
    "ValueError: Default process group",
    "Watchdog caught",
)


@pytest.fixture(scope="module")
def messages() -> str:
    sources = (path.read_text() for path in sorted((ROOT / "trainer_lib").rglob("*.py")))
    return "\n".join(JOINS.sub("", source) for source in sources)


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.startswith(OF_TORCH)])
def test_messages_are_those_of_the_code(block: str, messages: str) -> None:
    parts = [part.strip(" .,:(`'\"") for part in VALUES.split(block)]
    long_parts = [part for part in parts if len(part) > 14]
    assert long_parts
    assert [part for part in long_parts if part not in messages] == []
