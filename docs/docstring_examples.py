"""Examples of docstrings as code in the reference; griffe reads a section `Example:` as prose."""

import re
from typing import Any

from griffe import Extension, Object


class DocstringExamples(Extension):
    """Renames the section of examples to the name that griffe knows."""

    def on_object(self, *, obj: Object, **options: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
