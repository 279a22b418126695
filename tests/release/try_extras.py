"""Resolve each extra of a release, one by one: `PYTHON tests/release/try_extras.py WHEEL [EXTRA ...]`.

pip answers with what it would install, and installs nothing. It uses the standard library alone.
"""

import json
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

_LIMIT = 900  # seconds for each extra


def extras_of(wheel: Path) -> list[str]:
    """Return the extras that a wheel offers."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name)).get_all("Provides-Extra", [])


def resolve(wheel: Path, extra: str) -> tuple[bool, str]:
    """Return whether an extra can be installed here, and what it would bring."""
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", f"{wheel}[{extra}]"]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return False, f"pip did not end within {_LIMIT} seconds"
    if done.returncode:
        return False, done.stderr.strip().splitlines()[-1]
    packages = [each["metadata"] for each in json.loads(done.stdout)["install"]]
    new = sorted(f"{package['name']} {package['version']}" for package in packages)
    return True, ", ".join(new[:6]) + (f" and {len(new) - 6} more" if len(new) > 6 else "")


def main() -> None:
    """Print a line for each extra, and end with an error if one cannot be resolved."""
    wheel = Path(sys.argv[1]).resolve()
    failed = []
    for extra in sys.argv[2:] or extras_of(wheel):
        works, what = resolve(wheel, extra)
        print(f"{extra:14}{'ok  ' if works else 'FAIL'} {what}", flush=True)
        failed += [] if works else [extra]
    sys.exit(f"These extras cannot be resolved: {', '.join(failed)}." if failed else 0)


if __name__ == "__main__":
    main()
