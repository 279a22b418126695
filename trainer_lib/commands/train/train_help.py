"""The help of `trainer-lib train`, a screen a topic, read from the declarations as text so that nothing is imported."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_lib.commands.help_lines import option_lines
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

_HERE = Path(__file__).parent
_SOURCES = (
    _HERE / "train_arguments.py",
    _HERE.parents[1] / "trainer" / "arguments" / "training_arguments.py",
)
# The topics of the help, by the constants that name the sections.
TOPICS = {
    "TASK": "task",
    "FILES": "data",
    "RUN": "run",
    "LENGTH": "length",
    "BATCHES": "batches",
    "OPTIMIZER": "optimizer",
    "DEVICES": "devices",
    "CHECKPOINTS": "checkpoints",
    "DATA": "loading",
    "DEBUGGING": "debugging",
    "GENERATION": "generation",
    "TRACKERS": "trackers",
}
_FIRST_PAGE = ("task", "data")
_USAGE = "usage: trainer-lib train --task TASK --model MODEL --data DATA [--config FILE.yaml] [--ARGUMENT VALUE …]"
_EXAMPLES = """\
examples:
  trainer-lib train --task text-classification --model distilbert-base-uncased --data reviews.csv --eval_fraction 0.1
  trainer-lib train --task tabular --model mlp --data iris.csv --num_train_epochs 20 --learning_rate 1e-2
  trainer-lib train --config run.yaml --resume           resume the newest run of output_dir
  trainer-lib train --config run.yaml --dry-run          check it: two updates, a save and a resume, nothing is kept
  trainer-lib launch --num_processes 2 -m trainer_lib train --config run.yaml
Values are written as in YAML. Options override the file; hyphens count as underscores.\
"""
_COLUMN = 34


@frozen_dataclass
class Declared:
    """An argument as it is declared in a source file.

    Attributes:
        name: Its name.
        topic: Its topic.
        default: Its default, as text; empty for `None`.
        text: What it does.
    """

    name: str
    topic: str
    default: str
    text: str


def help_text(topic: str = "") -> str:
    """Return the help of a topic; without one, how to start a training and the list of topics.

    Raises:
        ConfigurationError: If there is no such topic.
    """
    topics = list(TOPICS.values())
    if topic == "all":
        return "\n\n".join(_page(name) for name in topics)
    if topic in topics:
        return _page(topic)
    if topic and not topic.startswith("-"):
        raise ConfigurationError(unknown("topic", topic, [*topics, "all"]))
    others = ", ".join(name for name in topics if name not in _FIRST_PAGE)
    more = f"more arguments: trainer-lib train --help TOPIC, with {others}, or all"
    return "\n\n".join([_USAGE, *(_page(name) for name in _FIRST_PAGE), more, _EXAMPLES])


@functools.cache
def declared() -> tuple[Declared, ...]:
    """Return the arguments in the order of their declaration."""
    return tuple(argument for source in _SOURCES for argument in _read(source))


def _read(source: Path) -> Iterator[Declared]:
    module = ast.parse(source.read_text(encoding="utf-8"))
    for statement in (line for kind in module.body if isinstance(kind, ast.ClassDef) for line in kind.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(call := statement.value, ast.Call):
            section, default, text = call.args[:3]
            yield Declared(ast.unparse(statement.target), TOPICS[ast.unparse(section)], _default(default), _text(text))


def _text(node: ast.expr) -> str:
    return str(ast.literal_eval(node)).replace("`", "")


def _default(node: ast.expr) -> str:
    value: Any = ast.literal_eval(node) if not isinstance(node, ast.Name) else node.id.lower()
    return "" if value in (None, (), {}, []) else str(value).lower() if isinstance(value, bool) else str(value)


def _page(topic: str) -> str:
    lines = [f"{topic}:"]
    for argument in declared():
        if argument.topic == topic:
            default = f" (default: {argument.default})" if argument.default else ""
            lines += option_lines(f"  --{argument.name}", f"{argument.text}{default}", _COLUMN)
    return "\n".join(lines)
