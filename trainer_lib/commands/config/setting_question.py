"""Questions about settings of a launch, with a note where this version cannot run what they ask for."""

from dataclasses import replace
from typing import Any

from trainer_lib.commands.config.questionnaire import Answers, Question
from trainer_lib.launchers.settings.launch_options import SETTINGS
from trainer_lib.launchers.settings.setting import Kind
from trainer_lib.options.enums import ComputeEnvironment

PLACE = "compute_environment"


def question(name: str, text: str, default: Any, help_text: str, kind: Kind | None = None, **more: Any) -> Question:
    """Return a question for a setting; the default may be a function of the answers before."""
    return Question(
        name=name,
        text=text,
        kind=SETTINGS[name].kind if kind is None else kind,
        help=help_text,
        default=default if callable(default) else lambda answers: default,
        **more,
    )


def note_of(name: str) -> str:
    """Return what is printed before a question for a setting that this version refuses; empty for other settings."""
    missing = SETTINGS[name].missing
    if missing is None:
        return ""
    return (
        f"This version cannot run {missing.name}: a launch with this file is refused. {missing.instead}\n"
        "The answers are written for Accelerate, which reads the same file."
    )


def only_on(place: ComputeEnvironment, questions: list[Question]) -> list[Question]:
    """Return questions that are asked only if the processes run in this place."""

    def there(question: Question) -> Question:
        return replace(question, when=lambda answers: is_on(place, answers) and question.when(answers))

    return [there(question) for question in questions]


def is_on(place: ComputeEnvironment, answers: Answers) -> bool:
    """Whether the processes run in a place, by the answers."""
    return answers.get(PLACE, ComputeEnvironment.LOCAL_MACHINE.value) == place.value
