"""Plain values as YAML, and YAML as plain values with the line of each."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from trainer_lib.foundation.errors import ConfigurationError

# PyYAML reads YAML 1.1, in which 5e-5 is a text; in YAML 1.2 it is a number.
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+")


class _Loader(yaml.SafeLoader):
    """Reads plain values only."""


class _Dumper(yaml.SafeDumper):
    """Writes plain values; texts that look like numbers go in quotes."""


for _yaml_class in (_Loader, _Dumper):
    _yaml_class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def dump(values: Mapping[str, Any]) -> str:
    """Return plain values as YAML."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read(text: str, path: Any) -> tuple[Any, dict[str, int]]:
    """Return the values in a text, and the line of each; errors name the file."""
    loader = _Loader(text)
    lines: dict[str, int] = {}
    try:
        node = loader.get_single_node()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigurationError(f"{path}, line {line}: {key.value} is given twice. Give it once.")
            lines[str(key.value)] = line
        values = {} if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigurationError(f"{path}{where}: invalid YAML: {getattr(error, 'problem', error)}.") from error
    finally:
        loader.dispose()
    return values, lines
