"""Pushing to a local Hub server, and the errors on the way."""

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.launched import PYTHON_PATH
from tests.trainer.hub import READER, TOKEN, Hub, served
from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib import ConfigurationError, Trainer, WorldError, load_checkpoint_in_model
from trainer_lib.callbacks import EMA
from trainer_lib.foundation.errors import HubError, MissingPackageError
from trainer_lib.launchers import run_forked
from trainer_lib.trainer.publish import hub as pushing

# The client says it of itself.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    """Return a Hub that the client in this process, and in forks of it, takes for that of Hugging Face."""
    from huggingface_hub import constants

    with served() as test_hub:
        monkeypatch.setattr(constants, "ENDPOINT", test_hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # which speaks with another server
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(pushing, "PAUSES", (0.0, 0.0))
        yield test_hub


def downloaded(hub: Hub, name: str, folder: Path) -> Path:
    for path, content in hub.files[name].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


SCRIPT = """
import torch
from trainer_lib import Trainer, TrainingArguments

torch.manual_seed(0)
trainer = Trainer(torch.nn.Linear(4, 2), TrainingArguments(use_cpu=True))
torch.save(trainer.unwrapped_model.state_dict(), "model.pt")
print(trainer.push_to_hub("sides", license="mit", private=True, commit_message="Two sides"))
"""


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.server
def test_a_program_pushes_to_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        for name, value in {**variables, "PYTHONPATH": PYTHON_PATH}.items():
            monkeypatch.setenv(name, value)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    url = done.stdout.splitlines()[-1]
    assert url.startswith(f"{hub.url}/me/sides/commit/")
    assert hub.commits == {"me/sides": ["Two sides"]}
    assert hub.private == {"me/sides": "private"}
    assert sorted(hub.files["me/sides"]) == ["README.md", "model.safetensors"]
    assert b"license: mit" in hub.files["me/sides"]["README.md"]
    read = nn.Linear(4, 2)
    load_checkpoint_in_model(read, downloaded(hub, "me/sides", tmp_path / "there"), strict=True)
    for name, value in torch.load(tmp_path / "model.pt").items():
        assert torch.equal(read.state_dict()[name], value)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_main_process_pushes_what_is_in_use(processes: int, hub: Hub, tmp_path: Path) -> None:
    def body() -> tuple[str, dict[str, Any]]:
        used = trainer(arguments(max_steps=3), callbacks=[EMA(0.5)])
        used.fit()
        return used.push_to_hub("me/points", create_pr=True), used.unwrapped_model.state_dict()

    answers = run_forked(body, num_processes=processes, timeout=60)
    assert [url for url, _ in answers] == [f"{hub.url}/me/points/discussions/1"] * processes
    assert [request for request in hub.asked if "/commit/" in request] == ["POST /api/models/me/points/commit/main"]
    read = network()
    load_checkpoint_in_model(read, downloaded(hub, "me/points", tmp_path), strict=True)
    for name, value in answers[0][1].items():
        assert torch.equal(read.state_dict()[name], value), name


def test_it_tries_again_and_adds_to_what_is_there(hub: Hub) -> None:
    hub.failing = {"/api/repos/create": [503, 429], "/commit/": [500, 502], "/large/": []}
    url = trainer().push_to_hub("me/points", card="---\nlicense: mit\n---\nMine.\n")
    assert hub.commits["me/points"] == ["Upload model"]
    assert url.startswith(f"{hub.url}/me/points/commit/")
    assert hub.files["me/points"]["README.md"] == b"---\nlicense: mit\n---\nMine.\n"
    trainer().push_to_hub("me/points", commit_message="Once more", revision="main")
    assert hub.commits["me/points"] == ["Upload model", "Once more"]
    hub.failing = {"/commit/": [503]}
    with pytest.raises(HubError, match=r"in 1 attempt\. It says: not now"):
        trainer().push_to_hub("me/points", create_pr=True)  # once more might be a second one


def nowhere(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def logged_out(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)


def offline(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def there_already(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    hub.files["me/points"], hub.commits["me/points"] = {}, []


def busy(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    hub.failing = {"/api/repos/create": [503, 503, 503]}


def as_is(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    pass


REFUSED: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "nobody is logged in": (logged_out, "me/points", "There is no token.*hf auth login.*token=", {}),
    "an invalid token": (as_is, "me/points", "does not know this token", {"token": "hf_old"}),
    "a token that only reads": (as_is, "me/points", "may not write to me/points.*It says: ", {"token": READER}),
    "a foreign owner": (as_is, "them/points", "may not write to them/points", {}),
    "no network": (nowhere, "me/points", r"127\.0\.0\.1:9 could not be reached, in 3 attempts.*save_model", {}),
    "a busy Hub": (busy, "me/points", "could not be reached, in 3 attempts", {}),
    "offline by choice": (offline, "me/points", "(?i)refused me/points.*offline", {}),
    "a repository that is there": (there_already, "me/points", "is there already.*exist_ok=True", {"exist_ok": False}),
    "a name the Hub does not take": (as_is, "me/points.git", r"refused me/points\.git", {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_refuses_is_told(case: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, name, words, options = REFUSED[case]
    prepare(monkeypatch, hub)
    with pytest.raises(HubError, match=words):
        trainer().push_to_hub(name, **options)
    assert not any("/commit/" in request for request in hub.asked)


def test_what_cannot_be_meant(hub: Hub) -> None:
    with pytest.raises(ConfigurationError, match="repo_id='a/b/c' is not the name of a repository"):
        trainer().push_to_hub("a/b/c")
    with pytest.raises(ConfigurationError, match=r"'licence'.*Did you mean 'license'"):
        trainer().push_to_hub("points", licence="mit")
    with pytest.raises(ConfigurationError, match="card=… is the text as a whole, and license would go"):
        trainer().push_to_hub("points", card="# Points", license="mit")
    assert hub.asked == []


def test_without_its_client_it_is_told_what_to_install(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match=r"huggingface_hub is not installed.*trainer_lib\[hub\]"):
        trainer().push_to_hub("me/points")
    assert trainer().model_card(license="mit").startswith("---\nlibrary_name: trainer_lib\nlicense: mit\n")


def test_all_processes_hear_of_it(hub: Hub) -> None:
    def body() -> str:
        used: Trainer = trainer()
        with pytest.raises((HubError, WorldError)) as caught:
            used.push_to_hub("me/points", token=READER)
        return f"{caught.type.__name__}: {caught.value}"

    first, second = run_forked(body, timeout=60)
    assert first.startswith("HubError: This token may not write to me/points.")
    assert second.startswith("WorldError: push_to_hub failed on rank 0: HubError: This token may not")


def test_large_files_that_do_not_arrive_are_told(hub: Hub) -> None:
    hub.failing = {"/large/": [403]}
    with pytest.raises(HubError, match="may not write to me/points"):
        trainer(train_dataset=points()).push_to_hub("me/points")
    assert hub.commits["me/points"] == []
