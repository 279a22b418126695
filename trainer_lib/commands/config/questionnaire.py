"""Questions asked one by one, on a terminal or from a pipe: answers are checked at once, and `back` goes back."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.launchers.settings.setting import Kind

Answers = Mapping[str, Any]
_BACK, _HELP = "back", "?"


class AbandonedError(ConfigurationError):
    """A questionnaire whose input ended before its last question."""


def _always(answers: Answers) -> bool:
    del answers
    return True


def _accept(answer: Any, answers: Answers) -> None:
    del answer, answers


@frozen_dataclass(kw_only=True)
class Question:
    """A question.

    Args:
        name: The name of its answer.
        text: The question, in a line.
        kind: The answers that it takes.
        help: What `?` prints.
        default: The answer of an empty line, by the answers before it; `None` if there has to be one.
        when: Whether to ask, by the answers before it.
        check: Raises for an answer that contradicts the answers before it.
        note: What is printed before the question.
    """

    name: str
    text: str
    kind: Kind
    help: str
    default: Callable[[Answers], Any]
    when: Callable[[Answers], bool] = _always
    check: Callable[[Any, Answers], None] = _accept
    note: str = ""


def ask_all(questions: Sequence[Question], known: Answers) -> dict[str, Any]:
    """Ask the questions that apply, and return their answers by name.

    Args:
        questions: The questions, in order.
        known: Answers of earlier times, which are the defaults.

    Raises:
        AbandonedError: If the input ends before the last question.
    """
    remembered = dict(known)
    answers: dict[str, Any] = {}
    asked: list[int] = []
    index = 0
    while index < len(questions):
        question = questions[index]
        if not question.when(answers):
            index += 1
            continue
        answer = _ask(question, answers, remembered)
        if answer is not None:
            remembered[question.name] = answers[question.name] = answer
            asked.append(index)
            index += 1
        elif asked:
            index = asked.pop()
            del answers[questions[index].name]
        else:
            print("This is the first question.")
    return answers


def _ask(question: Question, answers: Answers, remembered: Answers) -> Any:
    """Return the answer, or `None` to go back."""
    default = _default(question, answers, remembered.get(question.name))
    if question.note:
        print(question.note)
    while True:
        text = _read(f"{question.text}{_choices(question.kind)}{_in_brackets(default)}: ", question.name)
        if text == _BACK:
            return None
        if text == _HELP:
            print(f"  {question.help} Allowed: {question.kind.allowed}; `back` goes back a question.")
            continue
        if not text and default is None:
            print(f"  Please give {question.kind.allowed}. `?` tells more.")
            continue
        try:
            answer = question.kind.check("  The answer", text) if text else default
            question.check(answer, answers)
        except (ConfigurationError, UnsupportedError) as error:
            print(error)
        else:
            return answer


def _default(question: Question, answers: Answers, earlier: Any) -> Any:
    """Return the earlier answer if there is one that fits the answers before, else the default."""
    if earlier is None:
        return question.default(answers)
    try:
        question.check(earlier, answers)
    except (ConfigurationError, UnsupportedError):
        return question.default(answers)
    return earlier


def _read(prompt: str, name: str) -> str:
    try:
        if sys.stdin is None:  # closed, as in some services
            raise EOFError
        if sys.stdin.isatty():
            with suppress(ImportError):  # some builds of Python lack it
                import_module("readline")  # `input` then knows the arrow keys
            return input(prompt).strip()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        print(prompt + line.strip(), flush=True)  # as a terminal would show it
        return line.strip()
    except EOFError:
        raise AbandonedError(
            f"The input ended at the question for {name}: {prompt.strip()} Nothing was written. Give a line for each "
            "question (an empty one takes the default), or use `trainer-lib config default`."
        ) from None


def _choices(kind: Kind) -> str:
    return f" ({', '.join(kind.choices)})" if kind.choices else ""


def _in_brackets(default: Any) -> str:
    if default is None:
        return ""
    return f" [{_shown(default)}]"


def _shown(default: Any) -> str:
    if isinstance(default, list):
        return ",".join(map(_shown, default))
    if isinstance(default, bool):
        return "yes" if default else "no"
    return str(default) if default != "" else "none"
