"""Check that tag, version, citation and changelog name the same release: `python -m tests.release.version v0.1.0`."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def disagreements(tag: str, root: Path = ROOT) -> list[str]:
    """Return what does not fit a release of this tag."""
    version = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    citation = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    headings = re.findall(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    checks = {
        f"The tag is {tag}, and pyproject.toml has version {version}: tag v{version}.": tag != f"v{version}",
        f"CITATION.cff has another version than {version}.": citation is None or citation[1] != version,
        f"CHANGELOG.md has no heading [{version}]: give [Unreleased] this name and the date.": version not in headings,
    }
    return [message for message, is_wrong in checks.items() if is_wrong]


if __name__ == "__main__":
    sys.exit("\n".join(disagreements(sys.argv[1])) or None)
