"""Malicious or unrelated files: refused by name, without running code or losing a checkpoint."""

import base64
import io
import json
import pickle
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import toy
from tests.faults.conftest import Trials
from tests.faults.ledger import Ledger
from tests.faults.trainings import everything, one_run, sharded
from tests.trainer.tasks import arguments, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, CheckpointError, StateError, load_checkpoint_in_model
from trainer_lib.checkpointing.format.manifest import sealed
from trainer_lib.checkpointing.load.find import open_state, verify_state
from trainer_lib.commands.main import main
from trainer_lib.filesystem.checksums import checksum_of, checksum_of_bytes
from trainer_lib.foundation.errors import TrainerLibError


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a state of all that has one, one in shards, one in several files, and a run."""
    folder = tmp_path_factory.mktemp("states")

    def whole() -> None:
        accelerator, *_ = everything(folder)
        accelerator.save_state(folder / "whole")
        accelerator.save_state(folder / "files", max_shard_size="600B")

    def shards() -> None:
        accelerator, *_ = sharded(folder)
        accelerator.save_state(folder / "shards")

    run_world(whole, (), 1, timeout=60)
    run_world(shards, (), 2, timeout=60)
    run_world(one_run, (folder / "runs", 3), 1, timeout=60)
    return folder


@pytest.fixture
def state(states: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(states / getattr(request, "param", "whole"), tmp_path / "state"))


@pytest.fixture
def training(tmp_path: Path) -> Accelerator:
    return everything(tmp_path / "training", updates=3)[0]


def reseal(folder: Path, **changes: Any) -> None:
    """Write the manifest that somebody would who knows how it is made."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != path)
    facts = {
        file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "xxh3_128": checksum_of(file)}
        for file in files
    }
    path.write_bytes(sealed({**content, "files": facts, **changes}))


class Payload:
    """What leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._code = f"open({str(marker)!r}, 'w').close()"

    def __reduce__(self) -> Any:
        return exec, (self._code,)


def payloads(marker: Path) -> dict[str, bytes]:
    """Return pickles as Python and as torch write them."""
    payload = Payload(marker)
    new, old = io.BytesIO(), io.BytesIO()
    torch.save({"weight": payload}, new)
    torch.save({"weight": payload}, old, _use_new_zipfile_serialization=False)
    return {"pickle": pickle.dumps(payload), "torch": new.getvalue(), "torch's old format": old.getvalue()}


def attempts(training: Accelerator, folder: Path) -> Iterator[Callable[[], Any]]:
    """Yield all that reads a state."""
    yield lambda: training.load_state(folder)
    yield lambda: training.load_state(folder, safe_serialization=False)
    yield lambda: load_checkpoint_in_model(toy.model(), folder, strict=True)
    yield lambda: verify_state(folder)
    for command in ("verify", "inspect", "list"):
        yield lambda command=command: main(["checkpoint", command, str(folder)])
    yield lambda: main(["checkpoint", "consolidate", str(folder), str(folder.parent / "consolidated")])


# Files that one may look for, though no state of this training has them.
OTHERS = [
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.extra.json",
    "optimizer.bin",
    "scheduler.bin",
    "sampler.bin",
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
    "training_args.bin",
    "trainer_state.json",
    "run.json",
]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "kind", ["torch", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("pickle", "torch's old format"))]
)
def test_a_pickle_under_any_name_does_not_run(
    kind: str,
    states: Path,
    tmp_path: Path,
    training: Accelerator,
    ledger: Ledger,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the place of a file that is read it is refused by that name; in any other it is not looked at."""
    assert payload_runs(tmp_path / "control")
    marker = tmp_path / "marker"
    names = [path.relative_to(states / "whole").as_posix() for path in (states / "whole").rglob("*") if path.is_file()]
    assert len(names) > 8
    content = payloads(marker)[kind]
    for name in [*names, *OTHERS]:
        state = Path(shutil.copytree(states / "whole", tmp_path / "state"))
        (state / name).write_bytes(content)
        if name == "pytorch_model.bin":  # which is read where there is nothing else, and somebody says so
            (state / "model.safetensors").unlink()
        if name != "manifest.json":
            reseal(state)
        refused: list[str] = []
        for attempt in attempts(training, state):
            try:
                attempt()
            except TrainerLibError as error:
                refused.append(str(error))
            assert not marker.exists(), f"{name} was run"
        is_named = any(name in message for message in refused)
        assert is_named or name in OTHERS, refused
        counts = {"injected": 1, "refused": is_named, "harmless": not is_named}
        ledger.note("content", "a pickle in place of a file", **counts)
        shutil.rmtree(state)
        shutil.rmtree(tmp_path / "consolidated", ignore_errors=True)
    capsys.readouterr()


def payload_runs(marker: Path) -> bool:
    """Whether the payload does what it should, where pickles are read."""
    pickle.loads(pickle.dumps(Payload(marker)))
    return marker.exists()


def test_a_pickle_in_json_is_refused(state: Path, tmp_path: Path, training: Accelerator, ledger: Ledger) -> None:
    marker = tmp_path / "marker"
    content = base64.b64encode(pickle.dumps(Payload(marker))).decode()
    for path in sorted(state.glob("*.json")):
        if path.name == "manifest.json":
            continue
        whole = path.read_bytes()
        path.write_text(json.dumps({"$pickle": content}))
        reseal(state)
        with pytest.raises(CheckpointError, match=r"was pickled when it was saved") as error:
            training.load_state(state)
        assert path.name.split(".")[0] in str(error.value)
        assert not marker.exists()
        path.write_bytes(whole)
        ledger.note("content", "a pickle inside JSON", injected=1, refused=1)


# -- files that are made to break who reads them ---------------------------------------------------------------------


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


ONE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'

BROKEN_TENSORS = {
    "empty": b"",
    "a length and nothing else": struct.pack("<Q", 8),
    "a huge length": header(ONE, 2**63 - 1) + bytes(4),
    "an impossible length": header(ONE, 2**64 - 1) + bytes(4),
    "a length of many gigabytes": header(ONE, 2**40) + bytes(4),
    "a text that is no JSON": header(b"{{{{") + bytes(4),
    "a list": header(b"[]") + bytes(4),
    "deep JSON": header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "offsets behind the end": header(b'{"a":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}') + bytes(4),
    "offsets before the beginning": header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}') + bytes(4),
    "a huge shape": header(b'{"a":{"dtype":"F32","shape":[4611686018427387904,16],"data_offsets":[0,4]}}') + bytes(4),
    "an unknown type": header(b'{"a":{"dtype":"EXEC","shape":[1],"data_offsets":[0,4]}}') + bytes(4),
    "a shape that does not fit": header(b'{"a":{"dtype":"F32","shape":[7],"data_offsets":[0,4]}}') + bytes(4),
    "invalid metadata": header(b'{"__metadata__":[1],"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}') + bytes(4),
    "overlapping tensors": header(ONE[:-1] + b',"b":' + ONE[5:]) + bytes(4),
    "a name twice": header(ONE[:-1] + b"," + ONE[1:]) + bytes(4),
    "more bytes than tensors": header(ONE) + bytes(400),
}


@pytest.mark.slow
@pytest.mark.parametrize("state", ["whole", "shards"], indirect=True)
def test_broken_files_of_tensors_are_refused_by_name(
    state: Path, training: Accelerator, ledger: Ledger, tmp_path: Path
) -> None:
    for path in sorted(state.rglob("*.safetensors")):
        whole = path.read_bytes()
        is_weights = path.name.startswith(("model", "shard")) and "optimizer" not in str(path)
        for kind, content in BROKEN_TENSORS.items():
            path.write_bytes(content)
            reseal(state)
            reads: list[Callable[[], Any]] = []
            if (state / "model.safetensors").exists():
                reads.append(lambda: training.load_state(state))
            if is_weights:
                reads.append(lambda: load_checkpoint_in_model(toy.model(), state, strict=True))
            for read in reads:
                with pytest.raises(TrainerLibError) as error:
                    read()
                assert path.name in str(error.value), f"{kind}: {error.value}"
                ledger.note("content", "a safetensors file with an invalid header", injected=1, refused=1)
        path.write_bytes(whole)


BROKEN_JSON = {
    "nothing": b"",
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "lists as deep as JSON reads": b"[" * 900 + b"]" * 900,
    "deep objects": b'{"a":' * 900 + b"1" + b"}" * 900,
    "deep tuples": b'{"$tuple":[' * 400 + b"]}" * 400,
    "a huge number": b"9" * 5000,
    "no number": b'{"a": NaN, "b": Infinity}',
    "no text": b'"\xff\xfe"',
    "a key twice": b'{"state": {}, "state": {}}',
    "null": b"null",
    "a list": b"[]",
    "an object": b"{}",
    "a text": b'"text"',
    "an unknown kind": b'{"$code": "1"}',
    "a tensor that is not there": b'{"$tensor": "nowhere"}',
    "an unknown dtype": b'{"$dtype": "load"}',
    "a default of something else": b'{"$defaultdict": ["eval", []]}',
}


# What errors call what is in a file, where that is not the name of the file.
CALLED = {"sampler": "loader", "random_states_0": "generators", "engine": "engine"}


@pytest.mark.slow
def test_broken_json_is_refused_by_name(states: Path, tmp_path: Path, training: Accelerator, ledger: Ledger) -> None:
    state = Path(shutil.copytree(states / "whole", tmp_path / "state"))
    wrong: list[str] = []
    for path in sorted(state.glob("*.json")):
        whole, stem = path.read_bytes(), path.name.split(".")[0]
        for kind, content in BROKEN_JSON.items():
            path.write_bytes(content)
            if path.name != "manifest.json":
                reseal(state)
            try:
                training.load_state(state)
                message = "it was taken for a state"
            except TrainerLibError as error:
                message = str(error)
            is_named = stem in message or CALLED.get(stem, stem) in message
            if not is_named:
                wrong.append(f"{kind} as {path.name}: {message}")
            ledger.note(
                "content", "JSON that is malformed, too deep or of another format", injected=1, refused=is_named
            )
        path.write_bytes(whole)
        if path.name != "manifest.json":
            reseal(state)
    assert not wrong, "\n".join(wrong)
    training.load_state(state)


VALUES = [None, True, -1, 2**70, 1.5, "", "text", [], {}, [[]], {"$tensor": "x"}, {"$tuple": [1]}]


def changed(tree: Any, chance: random.Random) -> Any:
    """Return a tree in which one thing is another one."""
    holder: dict[Any, Any] = {"tree": tree}
    place, key = holder, "tree"
    while isinstance(place[key], (dict, list)) and place[key] and chance.random() < 0.8:
        place = place[key]
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if place is not holder and chance.random() < 0.2:
        del place[key]
    else:
        place[key] = chance.choice(VALUES)
    return holder["tree"]


@pytest.mark.slow
def test_whatever_json_says_is_taken_up_or_refused(
    states: Path, tmp_path: Path, training: Accelerator, trials: Trials, ledger: Ledger
) -> None:
    state = Path(shutil.copytree(states / "whole", tmp_path / "state"))
    chance = random.Random(0)
    files = sorted(state.glob("*.json"))
    for _ in range(trials(50, 1500)):
        path = chance.choice(files)
        whole = path.read_bytes()
        content = changed(json.loads(whole), chance)
        if path.name == "manifest.json":
            content = (
                {name: value for name, value in content.items() if name != "digest"}
                if isinstance(content, dict)
                else {}
            )
            path.write_bytes(sealed(content))
        else:
            path.write_text(json.dumps(content))
            reseal(state)
        try:
            training.load_state(state)
            is_refused = False
        except TrainerLibError:
            is_refused = True
        ledger.note("content", "JSON with one value changed", injected=1, refused=is_refused, harmless=not is_refused)
        path.write_bytes(whole)
        if path.name != "manifest.json":
            reseal(state)
    training.load_state(states / "whole")


# -- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../secret", r"names '../secret', which leads out of"),
        ("/etc/passwd", r"names '/etc/passwd', which leads out of"),
        ("a/../../secret", r"which leads out of"),
        ("C:\\secret", r"which leads out of"),
        ("link", r"names 'link', a link out of"),
        ("folder/secret", r"names 'folder/secret', a link out of"),
        ("", r"names a file '', which is not a valid name"),
        ("a\0b", r"which is not a valid name"),
    ],
)
def test_no_name_leads_out_of_the_folder(state: Path, name: str, words: str, ledger: Ledger) -> None:
    secret = state.parent / "secret"
    secret.write_text("secret")
    (state / "link").symlink_to(secret)
    (state / "folder").symlink_to(state.parent)
    path = state / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][name] = {"size": 6, "xxh3_128": checksum_of_bytes(b"secret")}
    path.write_bytes(sealed(content))
    with pytest.raises(CheckpointError, match=words):
        open_state(state)
    ledger.note("content", "a path that leads out of the folder", injected=1, refused=1)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "link.safetensors", "\0"])
def test_no_index_of_weights_leads_out_of_the_folder(
    states: Path,
    tmp_path: Path,
    training: Accelerator,
    name: str,
    ledger: Ledger,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = Path(shutil.copytree(states / "files", tmp_path / "state"))
    secret = Path(shutil.copy(states / "whole" / "model.safetensors", tmp_path / "secret.safetensors"))
    index = state / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], name)
    index.write_text(json.dumps(content))
    reseal(state)
    (state / "link.safetensors").symlink_to(secret)
    words = r"leads out of|a link out of|which is not a valid name"
    for read in (lambda: training.load_state(state), lambda: load_checkpoint_in_model(toy.model(), state, strict=True)):
        with pytest.raises(CheckpointError, match=words):
            read()
    assert main(["checkpoint", "consolidate", str(state), str(tmp_path / "out")]) == 1
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    ledger.note("content", "a path that leads out of the folder", injected=1, refused=1)


def test_a_link_in_the_place_of_shards_is_refused(
    state: Path, states: Path, training: Accelerator, ledger: Ledger
) -> None:
    (state / "model.shards").symlink_to(states / "shards" / "model.shards")
    for read in (lambda: training.load_state(state), lambda: load_checkpoint_in_model(toy.model(), state, strict=True)):
        with pytest.raises(CheckpointError, match=r"names 'model\.shards', a link out of"):
            read()
    ledger.note("content", "a path that leads out of the folder", injected=1, refused=1)


# -- what is of something else ---------------------------------------------------------------------------------------


def test_a_later_format_is_refused_with_the_version_that_wrote_it(
    state: Path, training: Accelerator, ledger: Ledger
) -> None:
    reseal(state, schema=99, versions={"trainer_lib": "9.0"})
    with pytest.raises(CheckpointError, match=r"has format 99, and this .* written by trainer_lib 9\.0"):
        training.load_state(state)
    ledger.note("content", "a checkpoint of a later format", injected=1, refused=1)


def test_a_folder_that_is_not_a_checkpoint_is_refused_by_name(
    tmp_path: Path, training: Accelerator, ledger: Ledger
) -> None:
    makers: dict[str, Callable[[Path], Any]] = {
        "is not a checkpoint": lambda path: path.mkdir(),
        "There is no checkpoint": lambda path: None,
        "is a file": lambda path: path.write_text("state"),
        "not the manifest of a checkpoint: it has another format": lambda path: _with_manifest(
            path, {"format": "x", "schema": 1}
        ),
        "not the manifest of a checkpoint": lambda path: _with_manifest(path, [1, 2]),
        "optimizer.bin cannot be read": lambda path: _with(path, "optimizer.bin"),
    }
    for number, (words, make) in enumerate(makers.items()):
        place = tmp_path / f"place_{number}"
        make(place)
        with pytest.raises(CheckpointError, match=words) as error:
            training.load_state(place)
        assert str(place) in str(error.value)
        ledger.note("content", "a folder that is not a checkpoint", injected=1, refused=1)


def _with(folder: Path, name: str, content: bytes = b"") -> None:
    folder.mkdir()
    (folder / name).write_bytes(content)


def _with_manifest(folder: Path, content: Any) -> None:
    _with(folder, "manifest.json", json.dumps(content).encode())


def test_the_names_and_shapes_of_another_model_are_listed(states: Path, ledger: Ledger) -> None:
    (checkpoint,) = (states / "runs").glob("*/checkpoints/checkpoint-00000002")
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Dropout(), nn.Linear(9, 2, bias=False), nn.Linear(2, 2)]
    wider = nn.Sequential(*layers)
    with pytest.raises(StateError) as error:
        trainer(arguments(resume=str(checkpoint)), model=wider).fit()
    message = str(error.value)
    for words in ("4.weight", "4.bias", "3.bias", "0.weight", "(9, 6)", "(8, 6)"):
        assert words in message, message
    ledger.note("content", "a checkpoint of another model", injected=1, refused=1)


def test_files_of_others_stay_where_they_are(state: Path, training: Accelerator, ledger: Ledger) -> None:
    (state / "tokenizer.json").write_text("{")
    (state / "notes").mkdir()
    (state / "notes" / "model.safetensors").write_bytes(b"mine")
    training.load_state(state)
    training.save_state(state)
    assert (state / "tokenizer.json").read_text() == "{"
    assert (state / "notes" / "model.safetensors").read_bytes() == b"mine"
    verify_state(state)
    ledger.note("content", "added files in the folder", injected=2, harmless=2)
