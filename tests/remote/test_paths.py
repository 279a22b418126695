"""Paths behind URLs, and checkpoints on fsspec's `memory://`, which needs no server."""

import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from tests.accelerator import toy
from tests.faults.trainings import train, trained
from tests.trainer.tasks import arguments, points, trainer
from trainer_lib import (
    Accelerator,
    CheckpointError,
    ConfigurationError,
    ProjectConfiguration,
    TrainingArguments,
    UnsupportedError,
    load_checkpoint_in_model,
)
from trainer_lib.commands.main import main
from trainer_lib.filesystem.remote_paths import RemotePath, is_url, masked, path_at, with_retries
from trainer_lib.foundation.errors import MissingPackageError, UnreachableError
from trainer_lib.launchers import ProcessFailedError, run_forked


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begin with nothing in memory, and see that nothing is left on the disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("trainer_lib.filesystem.remote_paths.PAUSES", (0.01, 0.02))
    files: Any = fsspec.filesystem("memory")
    files.store.clear()
    return files


def test_what_is_a_url(tmp_path: Path) -> None:
    assert path_at("runs") == Path("runs")
    assert path_at("file:///tmp/runs") == Path("/tmp/runs")
    assert path_at("local://~/runs") == Path("~/runs").expanduser()
    assert not is_url("file:///tmp/runs")
    assert not is_url(tmp_path)
    assert is_url("memory://runs")
    path = path_at("MEMORY://bucket//runs/")
    assert str(path) == "memory://bucket/runs"
    assert path_at(path) == path


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memori://bucket/runs", "Unknown kind of URL 'memori'.*Did you mean 'memory'"),
        ("memory://", "memory:// names no bucket or folder"),
        ("memory://bucket/../other", "contains '..', which URLs do not support"),
        ("ftp://somebody:password@host/runs", "ftp://…@host/runs contains a password"),
        ("https://host/runs?signature=secret", r"https://host/runs\?… contains a query after"),
        (Path("s3://bucket/runs"), "was a URL before it became a Path"),
    ],
)
def test_unsupported_urls_raise(url: Any, message: str) -> None:
    for take in (path_at, lambda url: TrainingArguments(output_dir=url)):
        with pytest.raises(ConfigurationError, match=message) as error:
            take(url)
        assert "password@" not in str(error.value)
        assert "secret" not in str(error.value).replace("may be a secret", "")


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import known_implementations

    facts = {"class": "no_such_package.Files", "err": "Install no_such_package to reach it"}
    monkeypatch.setitem(known_implementations, "lacking", facts)
    with pytest.raises(
        MissingPackageError, match="lacking:// needs a package that is not installed: Install no_such_package"
    ):
        Accelerator(cpu=True).save_state("lacking://bucket/state")


def test_a_temporary_failure_is_retried() -> None:
    calls: list[int] = []

    def work(error: Exception, times: int) -> int:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return len(calls)

    assert with_retries("memory://a", lambda: work(TimeoutError(), 2)) == 3
    calls.clear()
    with pytest.raises(
        UnreachableError, match=r"memory://a cannot be reached, after 3 attempts: TimeoutError: at s3://…@b"
    ):
        with_retries("memory://a", lambda: work(TimeoutError("at s3://me:key@b\nand more"), 9))
    for error in (PermissionError("no"), FileNotFoundError("none")):
        calls.clear()
        with pytest.raises(type(error), match="memory://a"):
            with_retries("memory://a", lambda error=error: work(error, 9))
        assert len(calls) == 1
    calls.clear()
    no_keys = type("NoCredentialsError", (Exception,), {})
    with pytest.raises(PermissionError, match="NoCredentialsError: none found"):
        with_retries("memory://a", lambda: work(no_keys("none found"), 9))
    assert len(calls) == 1


def test_folders_are_created_where_a_file_system_has_them(tmp_path: Path) -> None:
    class Disk(LocalFileSystem):
        """A file system with folders, such as sftp, which creates none by itself."""

        protocol = "disk"

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            return super()._strip_protocol(str(path).replace("disk://share", str(tmp_path / "share"), 1))

    fsspec.register_implementation("disk", Disk, clobber=True)
    (tmp_path / "share").mkdir()
    trainer(arguments(output_dir="disk://share/deep/runs", num_train_epochs=1)).fit()
    result = trainer(arguments(output_dir="disk://share/deep/runs", num_train_epochs=2, resume="extend")).fit()
    assert result.state.step == 10
    assert len(list((tmp_path / "share" / "deep" / "runs").glob("*/checkpoints/*/manifest.json"))) == 2


def test_secrets_are_masked() -> None:
    assert masked("at https://me:key@host/a?sig=1 and s3://b/c") == "at https://…@host/a?… and s3://b/c"


def test_paths_are_like_those_of_pathlib() -> None:
    folder = path_at("memory://bucket/folder")
    assert isinstance(folder, RemotePath)
    assert not folder.exists()
    (folder / "inner" / "file.json").write_text("{}")
    assert folder.is_dir()
    assert (folder / "inner/file.json").is_file()
    assert folder.sizes() == {"inner/file.json": 2}
    assert [path.name for path in folder.iterdir()][:1] == ["inner"]
    assert folder.glob("*/file.json") == folder.rglob("*.json") == [folder / "inner" / "file.json"]
    file = folder / "inner" / "file.json"
    assert (file.name, file.suffix, file.parent.name, file.stat().st_size) == ("file.json", ".json", "inner", 2)
    assert file.stat().st_mtime > 1.7e9
    assert file.is_relative_to(folder)
    assert str(file.relative_to(folder)) == "inner/file.json"
    file.unlink()
    file.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=str(file)):
        file.read_bytes()


def test_a_folder_may_have_the_name_of_a_pattern() -> None:
    folder, other = RemotePath("memory", "runs[12]/x"), RemotePath("memory", "runs1/x")
    for path in (folder, other):
        (path / "a" / "run.json").write_bytes(b"{}")
    assert folder.glob("*/run.json") == [folder / "a" / "run.json"]
    (folder / "a").delete_files(["run.json"])
    assert not (folder / "a" / "run.json").exists()
    assert (other / "a" / "run.json").exists()


def test_what_is_empty_can_be_written() -> None:
    path = path_at("memory://bucket/file")
    with path.open("wb") as file:
        file.write(b"")
    assert path.read_bytes() == b""


def test_hooks_write_files_too(tmp_path: Path) -> None:
    accelerator, _, _ = trained("memory://bucket/project")  # type: ignore[arg-type]

    def writes(models: Any, weights: Any, folder: str) -> None:
        Path(folder, "sub").mkdir()
        Path(folder, "sub", "notes.txt").write_text("of a hook")

    read: list[str] = []
    accelerator.register_save_state_pre_hook(writes)
    accelerator.register_load_state_pre_hook(lambda _, folder: read.append(Path(folder, "sub/notes.txt").read_text()))
    folder = accelerator.save_state()
    assert folder == "memory://bucket/project/checkpoints/checkpoint_0"
    accelerator.load_state(folder)
    assert read == ["of a hook"]
    assert list(tmp_path.glob("trainer_lib-*")) == []


def test_what_saves_refuse() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="memory://bucket is a bucket"):
        accelerator.save_state("memory://bucket")
    with pytest.raises(CheckpointError, match="There is no checkpoint memory://bucket/none"):
        accelerator.load_state("memory://bucket/none")
    with pytest.raises(UnsupportedError, match="all machines share a URL"):
        Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=True)).save_state("memory://a/b")
    with pytest.raises(ConfigurationError, match=r"/runs/.* cannot be reached, after 3 attempts: Client"):
        trainer(arguments(output_dir="http://127.0.0.1:9/runs", max_steps=1)).fit()
    with pytest.raises(UnsupportedError, match=r"predict\(to=…\) needs a local path \(got the URL memory://a/b\)"):
        trainer().predict(points(), to="memory://a/b")
    with pytest.raises(UnsupportedError, match="save needs a local path"):
        accelerator.save({}, "memory://a/b")


def test_processes_without_a_storage_in_common() -> None:
    def both() -> None:
        trained("memory://bucket/project")[0].save_state()  # type: ignore[arg-type]

    with pytest.raises(ProcessFailedError, match="the ranks write to different storages"):
        run_forked(both, timeout=60)


def test_two_ranks_that_write_one_file_raise() -> None:
    def both() -> None:
        accelerator = trained("memory://bucket/project")[0]  # type: ignore[arg-type]
        rank = accelerator.process_index
        accelerator.register_save_state_pre_hook(lambda _, __, folder: Path(folder, "notes").write_text(str(rank)))
        accelerator.save_state()

    with pytest.raises(ProcessFailedError, match="Two ranks wrote different contents to the file notes"):
        run_forked(both, timeout=60)


def test_the_files_of_an_interrupted_save_are_deleted(memory: Any) -> None:
    accelerator, model, optimizer = trained("memory://bucket/project")  # type: ignore[arg-type]
    place = "/bucket/project/checkpoints"
    memory.pipe(f"{place}/checkpoint_0/partial.json", b'["model.safetensors", "old.shards/0.safetensors"]')
    for name in ("model.safetensors", "old.shards/0.safetensors", "notes.txt"):
        memory.pipe(f"{place}/checkpoint_0/{name}", b"torn")
    memory.pipe(f"{place}/checkpoint_7/partial.json", b'["model.safetensors"]')
    memory.pipe(f"{place}/checkpoint_7/model.safetensors", b"torn")
    with pytest.raises(CheckpointError, match="no checkpoint to load yet"):
        accelerator.load_state()
    accelerator.save_state()
    sizes = path_at("memory://bucket/project/checkpoints").sizes()  # type: ignore[union-attr]
    assert {name.split("/")[0] for name in sizes} == {"checkpoint_0"}
    assert sizes["checkpoint_0/notes.txt"] == 4
    assert not any("old.shards" in name or "partial" in name for name in sizes)
    train(accelerator, model, optimizer, 1)
    accelerator.load_state()


def test_commands_and_weights(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator, model, optimizer = trained("memory://bucket/project")  # type: ignore[arg-type]
    for _ in range(3):
        accelerator.save_state()
        train(accelerator, model, optimizer, 1)
    assert main(["checkpoint", "list", "memory://bucket"]) == 0
    assert capsys.readouterr().out.count("complete") == 3
    assert main(["checkpoint", "inspect", "memory://bucket/project"]) == 0
    assert "checkpoint_2" in capsys.readouterr().out
    assert main(["checkpoint", "verify", "memory://bucket/project", "--all"]) == 0
    assert main(["checkpoint", "prune", "memory://bucket/project", "--keep-last", "1"]) == 0
    assert main(["checkpoint", "consolidate", "memory://bucket/project", "memory://bucket/weights"]) == 0
    accelerator.load_state()
    accelerator.save_model(model, "memory://bucket/pieces", max_shard_size=100)
    states = ("memory://bucket/project/checkpoints/checkpoint_2", "memory://bucket/weights", "memory://bucket/pieces")
    files = ("memory://bucket/weights/model.safetensors", "memory://bucket/pieces/model.safetensors.index.json")
    for place in (*states, *files):
        fresh = toy.model()
        load_checkpoint_in_model(fresh, place, strict=True)
        for first, second in zip(fresh.parameters(), accelerator.unwrap_model(model).parameters(), strict=True):
            assert torch.equal(first, second)
    path = path_at(f"{states[0]}/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=r"is damaged: model\.safetensors has the checksum"):
        load_checkpoint_in_model(toy.model(), states[0])


def test_paths_are_sorted_as_their_urls_are() -> None:
    urls = ["memory://a", "memory://a/b", "memory://b", "s3://a"]
    assert [str(path) for path in sorted(map(path_at, reversed(urls)))] == urls
