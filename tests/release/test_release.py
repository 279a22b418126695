"""The release: reproducible builds, and a workflow whose steps exist."""

import re
import shutil
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.release.build import ROOT, SUMS, build_twice
from tests.release.try_extras import extras_of
from tests.release.version import disagreements

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="builds a commit")
def test_two_builds_in_different_surroundings_are_equal(tmp_path: Path) -> None:
    sums = build_twice(ROOT, tmp_path / "dist")
    assert sorted(name.rpartition("-")[2] for name in sums) == [f"{PROJECT['version']}.tar.gz", "any.whl"]
    lines = (tmp_path / SUMS).read_text().splitlines()
    assert [line.split()[1] for line in lines] == [f"dist/{name}" for name in sums]
    sdist, wheel = (tmp_path / "dist" / name for name in sums)
    with tarfile.open(sdist) as archive:
        assert len({(member.uid, member.uname, member.mtime) for member in archive}) == 1
    assert set(extras_of(wheel)) == set(PROJECT["optional-dependencies"])


def test_the_citation_has_the_version() -> None:
    wrong = disagreements(f"v{PROJECT['version']}")
    assert not [message for message in wrong if "CHANGELOG" not in message]


def test_a_tag_of_another_version_is_refused(tmp_path: Path) -> None:
    for name, text in {
        "pyproject.toml": '[project]\nversion = "0.2.0"\n',
        "CITATION.cff": "version: 0.1.0\n",
        "CHANGELOG.md": "## [Unreleased]\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert disagreements("v0.1.0", tmp_path) == [
        "The tag is v0.1.0, and pyproject.toml has version 0.2.0: tag v0.2.0.",
        "CITATION.cff has another version than 0.2.0.",
        "CHANGELOG.md has no heading [0.2.0]: give [Unreleased] this name and the date.",
    ]
    (tmp_path / "CITATION.cff").write_text("version: 0.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.2.0] - 2030-01-01\n")
    assert disagreements("v0.2.0", tmp_path) == []


def test_the_workflow_tries_each_python_that_the_package_names() -> None:
    named = [name.rpartition(" :: ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert WORKFLOW["jobs"]["try"]["strategy"]["matrix"]["python"] == named


def test_the_workflow_runs_files_that_exist() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    modules = [Path(*name.split(".")).with_suffix(".py") for name in re.findall(r"python -m (tests[\w.]+)", commands)]
    files = [Path(name) for name in re.findall(r"tests/\S+\.py", commands)]
    assert len(modules) + len(files) == 4
    assert all((ROOT / file).is_file() for file in modules + files)
