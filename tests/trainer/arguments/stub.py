"""The stub of `TrainingArguments`: for editors, which run no code, each argument has its sentence there."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

from trainer_lib.trainer.arguments import training_arguments
from trainer_lib.trainer.arguments.declaration import settings
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

SOURCE = Path(training_arguments.__file__)
STUB = SOURCE.with_suffix(".pyi")
_NOTE = "# Written by python -m tests.trainer.arguments.write_pages: editors show the sentence of each argument.\n"
_DECORATOR = "documented"  # it describes the arguments at run time


def stub() -> str:
    """Return the text of the stub: the module without bodies, with the docstrings that the declarations give."""
    module = ast.parse(SOURCE.read_text("utf-8"))
    statements = [part for node in module.body if (part := _statement(node))]
    body = "\n".join(part for part in statements if not part.startswith(("import", "from")))
    imports = [_needed(node, body) for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return _NOTE + "\n".join([*filter(None, imports), "", body]) + "\n"


def _statement(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        return "\n" + _class(node)
    if isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name) and not name.id.startswith("_"):
        return f"{name.id}: str" if isinstance(node.value, ast.Constant) else ast.unparse(node)
    return ""


def _needed(node: ast.Import | ast.ImportFrom, body: str) -> str:
    """Return an import with the names that the stub uses."""
    used = {part.id for part in ast.walk(ast.parse(body)) if isinstance(part, ast.Name)}
    texts = [part.value for part in ast.walk(ast.parse(body)) if isinstance(part, ast.Constant)]
    used |= {"trainer_lib"} if any("trainer_lib." in text for text in texts if isinstance(text, str)) else set()
    node.names = [alias for alias in node.names if (alias.asname or alias.name) in used]
    return ast.unparse(node) if node.names else ""


def _class(node: ast.ClassDef) -> str:
    """Return the class: what editors show of it, its arguments, its members."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    decorators = [ast.unparse(each) for each in node.decorator_list if ast.unparse(each) != _DECORATOR]
    lines = [*(f"@{decorator}" for decorator in decorators), f"class {node.name}({bases}):"]
    lines += [_docstring(inspect.cleandoc(TrainingArguments.__doc__ or ""), 4), ""]
    for member in node.body:
        lines += _member(member)
    return "\n".join(lines)


def _member(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
        default = repr(getattr(TrainingArguments(), node.target.id))  # a name or a call says less
        yield f"    {node.target.id}: {ast.unparse(node.annotation)} = {default}"
        yield _docstring(settings(TrainingArguments)[node.target.id].text, 4)
    elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
        yield ""
        yield from (f"    @{ast.unparse(decorator)}" for decorator in node.decorator_list)
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield f"    def {node.name}({ast.unparse(node.args)}){returned}:"
        yield _docstring(ast.get_docstring(node) or "", 8)


def _docstring(text: str, indent: int) -> str:
    """Return a docstring; a text of one line is wrapped."""
    lines = text.splitlines() if "\n" in text else textwrap.wrap(text, 116 - indent, break_on_hyphens=False)
    quoted = "\n".join(lines)
    mark = 'r"""' if "\\" in quoted else '"""'
    end = '\n"""' if len(lines) > 1 or quoted.endswith('"') else '"""'
    return textwrap.indent(f"{mark}{quoted}{end}", " " * indent)
