"""Misspelt keys and wrong types in a DeepSpeed config, found by the reader of the DeepSpeed that is installed."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Any, cast, get_args

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.logging import get_logger
from trainer_lib.options.deepspeed.deepspeed_config_file import AUTO, HfDeepSpeedConfig

_logger = get_logger(__name__)

_OURS = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
_NOT_FORWARDED = ("optimizer", "scheduler", "amp", "torch_autocast")
# DeepSpeed reads these before or after its reader.
_READ_ELSEWHERE = ("data_parallel_size", "sequence_parallel_size", "vocabulary_size")


class _ReadKeys(dict[str, Any]):
    """A section of a config that records which keys are read.

    Args:
        values: The section, which is copied with those in it.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(
            {key: _ReadKeys(cast(Any, value)) if isinstance(value, dict) else value for key, value in values.items()}
        )
        self.read: list[str] = []  # in order
        self.is_read_as_a_whole = False

    def __getitem__(self, key: str) -> Any:
        self.read.append(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.append(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.append(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.is_read_as_a_whole = True
        return super().__iter__()

    def keys(self) -> Any:
        return self  # whose `in` and `for` are recorded

    def items(self) -> Any:
        self.is_read_as_a_whole = True
        return super().items()

    def __copy__(self) -> "_ReadKeys":
        return self


def check_keys(config: HfDeepSpeedConfig, package: Any) -> None:
    """Raise for a key that DeepSpeed refuses or that looks misspelt, and warn of others that it does not read.

    Args:
        config: The config, whose "auto" values are not checked.
        package: DeepSpeed.

    Raises:
        ConfigurationError: With the key, its section and the nearest key that DeepSpeed knows.
    """
    reader: Any = import_module("deepspeed.runtime.config")
    refused: Any = import_module("pydantic").ValidationError
    values = {key: value for key, value in _filled(config.config).items() if key not in _NOT_FORWARDED}
    sections = _ReadKeys(values | _OURS)
    try:
        reader.DeepSpeedConfig(sections)
    except refused as error:
        first = error.errors()[0]
        raise ConfigurationError(_refused(sections, error.title, first)) from None
    except reader.DeepSpeedConfigError as error:
        raise ConfigurationError(f"DeepSpeed {package.__version__} refuses the config: {error}") from None
    except Exception:  # noqa: BLE001 - of values that fit together only with those of the engine, which raises for them
        return
    _report_unread(config.config, {*sections.read, *_NOT_FORWARDED, *_READ_ELSEWHERE}, package.__version__)
    for name, section in dict.items(sections):
        if isinstance(section, _ReadKeys) and section.read and not section.is_read_as_a_whole:
            _report_misspelt(name, section, package.__version__)


def _report_unread(config: dict[str, Any], known: set[str], version: str) -> None:
    for name in config:
        if name in known or not name[:1].isalpha():  # others, such as "_optimizer", are commented out
            continue
        if meant := get_close_matches(name, known, n=1, cutoff=0.9):
            raise ConfigurationError(f"The DeepSpeed config has {name!r}. Did you mean {meant[0]!r}?")
        _logger.warning_once(
            "The DeepSpeed config has %r, which DeepSpeed %s does not read.%s", name, version, did_you_mean(name, known)
        )


def _report_misspelt(section: str, content: _ReadKeys, version: str) -> None:
    # A warning: DeepSpeed reads some keys only if others have certain values.
    for name in dict.keys(content):
        if name not in content.read and (meant := did_you_mean(name, content.read)):
            _logger.warning_once(
                "%s in the DeepSpeed config has %r, which DeepSpeed %s does not read.%s", section, name, version, meant
            )


def _filled(section: dict[str, Any]) -> dict[str, Any]:
    """Return a section without values that are "auto" or `None`."""
    return {
        key: _filled(cast(Any, value)) if isinstance(value, dict) else value
        for key, value in section.items()
        if value is not None and value != AUTO
    }


def _refused(sections: _ReadKeys, title: str, error: dict[str, Any]) -> str:
    """Return the message for a value that one of DeepSpeed's pydantic models refuses."""
    *parents, name = [str(part) for part in error["loc"]]
    # Some models hold one section, others several, whose names then are in `loc`.
    if not parents or not isinstance(dict.get(sections, parents[0]), dict):
        parents.insert(0, sections.read[-1])
    where = ".".join(parents)
    if error["type"] != "extra_forbidden":
        return f"{where}.{name} in the DeepSpeed config: {error['msg']} (got {shown(error['input'])})."
    known = _fields(title, [str(part) for part in error["loc"][:-1]])
    meant = did_you_mean(name, known) or (f" Known: {', '.join(sorted(known))}." if known else "")
    return f"{where} in the DeepSpeed config has {name!r}, which DeepSpeed does not know.{meant}"


def _fields(title: str, parents: Iterable[str]) -> list[str]:
    """Return the fields of one of DeepSpeed's pydantic models, or of the model in its field at `parents`."""
    base: Any = import_module("deepspeed.runtime.config_utils").DeepSpeedConfigModel
    model: Any = next((kind for kind in _subclasses(base) if kind.__name__ == title), None)
    for parent in parents:
        field = model and model.model_fields.get(parent)
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return [field.alias or name for name, field in model.model_fields.items()] if model else []


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
