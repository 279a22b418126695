"""Texts whose lengths nobody chose: the docstrings of Python's standard library."""

import argparse
import ast
import re
from functools import cache
from pathlib import Path


@cache
def docstrings() -> list[list[str]]:
    """Return the words of each docstring, in the order of the files."""
    texts: list[list[str]] = []
    for path in sorted(Path(argparse.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if docstring := ast.get_docstring(node):
                texts.append(re.findall(r"\w+|[^\w\s]", docstring))
    return texts
