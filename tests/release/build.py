"""Build the sdist and the wheel twice and compare them byte by byte: `python -m tests.release.build dist`."""

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUMS = "SHA256SUMS"
_SDIST = "import setuptools.build_meta as build, sys; print(build.build_sdist(sys.argv[1]))"
_WHEEL = "import setuptools.build_meta as build, sys; print(build.build_wheel(sys.argv[1]))"


@dataclass(frozen=True)
class Surroundings:
    """What must not show in a release: folder, time zone, hash seed, language, age of the files."""

    folder: str
    time_zone: str
    hash_seed: str
    language: str
    files_from: float


BUILDS = (
    Surroundings("first", "UTC", "1", "C", 1_000_000_000.0),
    Surroundings("second/of/another depth", "Asia/Tokyo", "2", "C.UTF-8", 1_500_000_000.0),
)


def build_twice(tree: Path, out: Path, commit: str = "HEAD") -> dict[str, str]:
    """Build a commit in two surroundings, put the files into `out`, and return the SHA-256 of each, by name.

    Raises:
        SystemExit: If the two builds differ.
    """
    epoch = int(_git(tree, "log", "-1", "--format=%ct", commit))
    with tempfile.TemporaryDirectory() as folder:
        built = [_build(tree, commit, Path(folder) / each.folder, each, epoch) for each in BUILDS]
        sums = [{path.name: _digest(path) for path in paths} for paths in built]
        if sums[0] != sums[1]:
            raise SystemExit(f"Two builds of the same commit differ:\n{sums[0]}\n{sums[1]}")
        out.mkdir(parents=True, exist_ok=True)
        for path in built[0]:
            shutil.copyfile(path, out / path.name)
    (out.parent / SUMS).write_text("".join(f"{digest}  {out.name}/{name}\n" for name, digest in sums[0].items()))
    return sums[0]


def _build(tree: Path, commit: str, folder: Path, surroundings: Surroundings, epoch: int) -> list[Path]:
    """Return the paths of the sdist, and of the wheel built from it."""
    source, sdists, unpacked, wheels = (folder / name for name in ("source", "sdists", "unpacked", "wheels"))
    for needed in (source, sdists, unpacked, wheels):
        needed.mkdir(parents=True)
    _unpack(BytesIO(_git_bytes(tree, "archive", "--format=tar", commit)), source, surroundings.files_from)
    sdist = sdists / _run(_SDIST, source, sdists, surroundings, epoch)
    _normalize(sdist, epoch)
    _unpack(BytesIO(gzip.decompress(sdist.read_bytes())), unpacked, surroundings.files_from)
    (sources,) = unpacked.iterdir()
    return [sdist, wheels / _run(_WHEEL, sources, wheels, surroundings, epoch)]


def _run(code: str, source: Path, out: Path, surroundings: Surroundings, epoch: int) -> str:
    """Run a build in a process of its own, and return the name of the file that it wrote."""
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": str(epoch),
        "TZ": surroundings.time_zone,
        "PYTHONHASHSEED": surroundings.hash_seed,
        "LC_ALL": surroundings.language,
    }
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, umask=0o022, check=False
    )
    if done.returncode:
        raise SystemExit(f"The build failed in {source}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip().splitlines()[-1]


def _unpack(archive: BytesIO, to: Path, files_from: float) -> None:
    """Unpack a tar archive of our own, with modes that no umask changes."""
    with tarfile.open(fileobj=archive) as tar:
        tar.extractall(to, filter="tar")
        for member in tar:
            path = to / member.name
            if not member.issym():
                path.chmod(_mode(member))
                os.utime(path, (files_from, files_from))


def _normalize(sdist: Path, epoch: int) -> None:
    """Write an sdist again: in a fixed order, as of one time, by nobody. setuptools stores what the disk says."""
    with tarfile.open(sdist) as tar:
        contents = {member.name: (member, _content(tar, member)) for member in tar}
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(contents):
            member, content = contents[name]
            member.mtime, member.mode = epoch, _mode(member)
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.pax_headers = {}
            tar.addfile(member, BytesIO(content))
    sdist.write_bytes(gzip.compress(archive.getvalue(), 9, mtime=epoch))


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member) if member.isfile() else None
    return b"" if file is None else file.read()


def _mode(member: tarfile.TarInfo) -> int:
    return 0o755 if member.isdir() or member.mode & 0o100 else 0o644


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(tree: Path, *arguments: str) -> str:
    return _git_bytes(tree, *arguments).decode().strip()


def _git_bytes(tree: Path, *arguments: str) -> bytes:
    return subprocess.check_output(["git", "-C", str(tree), *arguments])


def main() -> None:
    """Build, and print the digests."""
    parser = argparse.ArgumentParser(prog="python -m tests.release.build", description=__doc__)
    parser.add_argument("out", type=Path, help="the folder for the two files; SHA256SUMS goes beside it")
    parser.add_argument("--commit", default="HEAD", help="what to build")
    options = parser.parse_args()
    for name, digest in build_twice(ROOT, options.out.resolve(), options.commit).items():
        print(digest, name)


if __name__ == "__main__":
    main()
