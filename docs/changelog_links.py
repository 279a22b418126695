"""The changelog as a page: its links lead from the root of the repository, and those of a page from docs/."""

from pathlib import Path
from typing import Any

_INCLUDE = '--8<-- "CHANGELOG.md"'


def on_page_markdown(markdown: str, **options: Any) -> str:
    """Return a page's text with the changelog in place of the line that includes it."""
    if _INCLUDE not in markdown:
        return markdown
    changelog = Path(options["config"].config_file_path).with_name("CHANGELOG.md").read_text(encoding="utf-8")
    return markdown.replace(_INCLUDE, changelog.replace("](docs/", "]("))
