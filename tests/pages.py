"""The examples of the documentation, run in a test's own process."""

import re
import runpy
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def run_example(page: str, has: str, folder: Path) -> dict[str, Any]:
    """Run the example of a page that has some text in it, as it stands there, and return its names."""
    (example,) = [
        block for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL) if has in block
    ]
    script = folder / "example.py"
    script.write_text(example)
    return runpy.run_path(str(script), run_name="__main__")  # where pickle finds what the script defines
