"""Pushing a model to the Hugging Face Hub: its files and its card, in one commit."""

import inspect
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainer_lib.collectives.agreement import raise_on_all_ranks, run_on_main_process
from trainer_lib.filesystem.remote_paths import PAUSES
from trainer_lib.foundation.errors import ConfigurationError, HubError, unknown
from trainer_lib.foundation.imports import require
from trainer_lib.trainer.defaults import prepare_models
from trainer_lib.trainer.publish.model_card import check_repository
from trainer_lib.trainer.trainer_interface import TrainerInterface

_T = TypeVar("_T")

_CARD = "README.md"
_BUSY = frozenset({408, 429, 500, 502, 503, 504})


class Commit(NamedTuple):
    """The options of a commit; see `Trainer.push_to_hub`."""

    message: str
    private: bool | None
    revision: str | None
    create_pr: bool
    exist_ok: bool


def push_to_hub(
    trainer: TrainerInterface, repo_id: str, commit: Commit, token: str | None, card: str | None, about: dict[str, Any]
) -> str:
    """Push the model of a trainer; see `Trainer.push_to_hub`."""
    check_repository(repo_id)
    if card is not None and about:
        raise ConfigurationError(
            f"push_to_hub: card=… is the text as a whole, and {', '.join(about)} would go into the one that is made. "
            "Leave one of them out."
        )
    known = inspect.signature(trainer.model_card).parameters
    for name in about:
        if name not in known:
            raise ConfigurationError(unknown("argument of model_card", name, known))
    group, is_main = trainer.accelerator.group, trainer.accelerator.is_main_process
    prepare_models(trainer)
    # What may fail comes first: the card, the token, the owner, the network.
    with raise_on_all_ranks(group, "push_to_hub"):
        text = card or trainer.model_card(**{"name": repo_id.rpartition("/")[2], **about})
    with raise_on_all_ranks(group, "push_to_hub"):
        repository = _Repository(repo_id, token, commit) if is_main else None
    with tempfile.TemporaryDirectory(prefix="trainer_lib-") as here:
        trainer.save_model(here)
        return run_on_main_process(group, "push_to_hub", lambda: repository.put(Path(here), text) if repository else "")


class _Repository:
    """A repository of models on the Hub, by the Hub's own client.

    Args:
        name: Its name, or `owner/name`.
        token: An access token with write permission; by default that of the logged-in user.
        commit: The options of the repository and the commit.

    Raises:
        HubError: If the repository does not exist and cannot be created.
    """

    def __init__(self, name: str, token: str | None, commit: Commit) -> None:
        self._hub: Any = require("huggingface_hub", "hub")
        self._name, self._commit = name, commit
        token = token or self._hub.get_token()
        if token is None:
            raise HubError(
                "There is no token for the Hub. Log in with `hf auth login`, set HF_TOKEN, or give "
                "push_to_hub(token=…)."
            )
        self._api = self._hub.HfApi(token=token)
        # If it must be new, a retry would take the repository of a first call, whose answer was lost, for an old one.
        made = self._asked(
            lambda: self._api.create_repo(name, private=commit.private, exist_ok=commit.exist_ok),
            is_repeatable=commit.exist_ok,
        )
        self._name = made.repo_id  # with its owner

    def put(self, folder: Path, card: str) -> str:
        """Upload a folder and the card in one commit, and return its URL."""
        (folder / _CARD).write_text(card, encoding="utf-8")
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]

        def commit() -> Any:
            # New objects for each attempt: the client stores its progress in them.
            additions = [
                self._hub.CommitOperationAdd(path_in_repo=path.relative_to(folder).as_posix(), path_or_fileobj=path)
                for path in files
            ]
            return self._api.create_commit(
                self._name,
                additions,
                commit_message=self._commit.message,
                revision=self._commit.revision,
                create_pr=self._commit.create_pr,
            )

        made = self._asked(commit, is_repeatable=not self._commit.create_pr)
        return made.pr_url or made.commit_url

    def _asked(self, question: Callable[[], _T], is_repeatable: bool) -> _T:
        """Call the Hub; retry while it is busy or unreachable."""
        errors = self._hub.errors
        kinds = (errors.HTTPError, ConnectionError, RuntimeError, ValueError)
        pauses = PAUSES if is_repeatable else ()
        for pause in (*pauses, None):
            try:
                return question()
            except kinds as raised:
                # What goes wrong with one file of several is told by an error around it.
                error = (raised.__cause__ if isinstance(raised, RuntimeError) else None) or raised
                status = getattr(getattr(error, "response", None), "status_code", None)
                is_passing = status in _BUSY or (status is None and _is_of_the_line(error, errors))
                if pause is None or not is_passing:
                    raise HubError(self._told(error, status, len(pauses) + 1)) from raised
                time.sleep(pause)
        raise AssertionError  # the last attempt returns or raises

    def _told(self, error: BaseException, status: int | None, tries: int) -> str:
        said = str(getattr(error, "server_message", None) or error).strip().splitlines()
        said = f" It says: {said[0]}" if said else ""
        if status == 401:
            return (
                f"The Hub does not know this token.{said} Log in again with `hf auth login`, or give another token=…."
            )
        if status == 403:
            return (
                f"This token may not write to {self._name}.{said} Make one with the right to write, or give a repo_id "
                "of your own."
            )
        if status == 404:
            return f"The Hub has no {self._name}, or not for this token.{said}"
        if status == 409:
            return f"{self._name} is there already. Give exist_ok=True to add a commit to it, or another repo_id.{said}"
        if status in _BUSY or (status is None and _is_of_the_line(error, self._hub.errors)):
            return (
                f"The Hub at {self._hub.constants.ENDPOINT} could not be reached, in {tries} "
                f"attempt{'s' * (tries > 1)}.{said} Save with save_model(folder), and push again later."
            )
        return f"The Hub refused {self._name}.{said}"


def _is_of_the_line(error: BaseException, errors: Any) -> bool:
    """Whether the connection failed, which may work a moment later."""
    if isinstance(error, errors.OfflineModeIsEnabled):
        return False
    return isinstance(error, (errors.HTTPError, ConnectionError))
