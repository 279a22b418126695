"""The value of each setting of a launch, and where it comes from: an option, the configuration file, a variable."""

import argparse
import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.public_names.missing_features import refusal
from trainer_lib.launchers.settings.config_file import find_config_file, read_file
from trainer_lib.launchers.settings.config_reader import is_sagemaker
from trainer_lib.launchers.settings.launch_options import SETTINGS

DEFAULT = "default"

# The option that each `distributed_type` of a file stands for.
_OPTION_OF_WORLD = {
    "DEEPSPEED": "use_deepspeed",
    "FSDP": "use_fsdp",
    "MEGATRON_LM": "use_megatron_lm",
    "MULTI_CPU": "cpu",
    "NO": "",
    "XLA": "tpu",
}
_MULTI_GPU = "multi_gpu"  # that of all others
_TPU = "tpu"  # also the group of settings that count on TPUs alone
_WORLDS = (_MULTI_GPU, _TPU, "use_deepspeed", "use_fsdp", "use_megatron_lm")
# Parts of a file that count only if `distributed_type` asks for what is refused, and what is for SageMaker alone.
_IDLE_SECTIONS = ("additional_args",)
# Sections that count with their engine alone.
_OF_ENGINES = {"use_deepspeed": "deepspeed_config", "use_megatron_lm": "megatron_lm_config"}
_NOT_INHERITED = ("num_cpu_threads_per_process",)  # OMP_NUM_THREADS may be a list


class Sourced(NamedTuple):
    """A value, and where it comes from."""

    value: Any
    source: str


class LaunchValues:
    """The values of all settings of a launch: options override variables, these the file, and the file the defaults.

    Args:
        options: The options that were given; `None` for those that were not.
        sagemaker: The values of a configuration for Amazon SageMaker, in place of those of a file.

    Attributes:
        file: The configuration file that counts, if there is one.
        sagemaker: The values of the configuration, if it is for Amazon SageMaker.

    Raises:
        ConfigurationError: If the configuration file has something wrong in it, or settings contradict each other.
        UnsupportedError: If the file asks for something that this version does not have.
    """

    def __init__(self, options: argparse.Namespace, sagemaker: Mapping[str, Any] | None = None) -> None:
        given = {name: value for name, value in vars(options).items() if name in SETTINGS and value is not None}
        self.file = Path(given["config_file"]).expanduser() if "config_file" in given else find_config_file()
        self.sagemaker: Mapping[str, Any] | None = sagemaker
        self._values = {name: Sourced(setting.default, DEFAULT) for name, setting in SETTINGS.items()}
        if sagemaker is not None:
            self.file = None
            self._take_entries(sagemaker, "the configuration")
        elif self.file is not None:
            with _says_how_to_use_another_file(given):
                self._take_file(self.file, given)
        self._take_variables()
        for name, value in given.items():
            self.set(name, value, f"--{name}")
        if given.get(_MULTI_GPU) and self["cpu"]:
            self.set("cpu", False, f"--{_MULTI_GPU}")
        _check_needs(self)
        _check_engines(self)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting."""
        return self._values[name].value

    def set(self, name: str, value: Any, source: str) -> None:
        """Set a value, and say where it comes from."""
        self._values[name] = Sourced(value, source)

    def source(self, name: str) -> str:
        """Return where the value of a setting comes from."""
        return self._values[name].source

    def is_asked(self, name: str) -> bool:
        """Whether an option, the file or a variable gives the value: it is no default."""
        return self.source(name) != DEFAULT

    def is_inherited(self, name: str) -> bool:
        """Whether the processes get the value from the launcher's own environment."""
        return self.source(name) == _variable_of(name)

    def _take_file(self, file: Path, given: Mapping[str, Any]) -> None:
        values = read_file(file)
        if is_sagemaker(values):
            self.sagemaker = values  # its world is SageMaker's
        else:
            self._take_world(values, file, given)
            for world in (*_OF_ENGINES, _TPU):
                if given.get(world):
                    self.set(world, True, str(file))
        self._take_entries(values, str(file))

    def _take_entries(self, values: Mapping[str, Any], source: str) -> None:
        idle = [*_IDLE_SECTIONS, *(section for engine, section in _OF_ENGINES.items() if not self[engine])]
        names = {setting.file_key: name for name, setting in SETTINGS.items() if not setting.section}
        for key, value in values.items():
            entries = value if isinstance(value, dict) else {names[key]: value} if key in names else {}
            for name, entry in ({} if key in idle else entries).items():
                self._take_entry(name, entry, source)

    def _take_world(self, values: Mapping[str, Any], file: Path, given: Mapping[str, Any]) -> None:
        if values.get("parallelism_config"):
            self.set("use_parallelism_config", True, str(file))
        kind = values.get("distributed_type", "NO")
        name = _OPTION_OF_WORLD.get(kind, _MULTI_GPU)
        on_cpu = given.get("cpu", values.get("use_cpu"))
        if not name or given.keys() & set(_WORLDS) or (name == _MULTI_GPU and on_cpu):
            return
        self.set(name, True, str(file))

    def _take_entry(self, name: str, value: Any, source: str) -> None:
        setting = SETTINGS[name]
        if setting.missing is None:
            if not (name == "cpu" and self[name]):  # a file of MULTI_CPU may say `use_cpu: false`
                self.set(name, value, source)
        elif value != setting.default and (setting.group != _TPU or self[_TPU]):
            raise refusal(f"`{name}: {value}` in {source}", setting.missing)

    def _take_variables(self) -> None:
        for name, setting in SETTINGS.items():
            text = environment.variable(setting.variable) if setting.variable else None
            if text in (None, "None") or setting.missing is not None or name in _NOT_INHERITED:
                continue
            self.set(name, setting.kind.check(setting.variable, text), _variable_of(name))


@contextlib.contextmanager
def _says_how_to_use_another_file(given: Mapping[str, Any]) -> Generator[None]:
    try:
        yield
    except UnsupportedError as error:
        if "config_file" in given:
            raise
        raise UnsupportedError(
            f"{error} Nobody named this file: it counts because it is where configurations are. `trainer-lib config` "
            "writes another one, and --config_file names one for this launch."
        ) from error


def _variable_of(name: str) -> str:
    return f"${SETTINGS[name].variable}"


def _check_needs(values: LaunchValues) -> None:
    """Raise for options that have no effect without another one, or a file."""
    aws = [name for name, setting in SETTINGS.items() if setting.group == "aws" and values.is_asked(name)]
    if aws and values.sagemaker is None:
        raise ConfigurationError(
            f"--{aws[0]} has no effect without a configuration file that says `compute_environment: "
            "AMAZON_SAGEMAKER`. `trainer-lib config` writes one; --config_file names it."
        )
    fp8 = _typed_options(values, "fp8")
    if fp8 and str(values["mixed_precision"]).lower() != "fp8":
        raise ConfigurationError(
            f"--{fp8[0]} has no effect without --mixed_precision fp8. Add it, or leave --{fp8[0]} out."
        )
    for switch, group in (
        ("use_fsdp", "fsdp"),
        ("use_deepspeed", "deepspeed"),
        ("use_megatron_lm", "megatron_lm"),
        ("use_parallelism_config", "parallelism"),
    ):
        options = [name for name in _typed_options(values, group) if name != switch]
        if options and not values[switch]:
            raise ConfigurationError(
                f"--{options[0]} has no effect without --{switch}. Add --{switch}, or leave it out."
            )


def _typed_options(values: LaunchValues, group: str) -> list[str]:
    """Return the options of a group that are on the command line."""
    return [name for name, setting in SETTINGS.items() if setting.group == group and values.source(name)[:2] == "--"]


def _check_engines(values: LaunchValues) -> None:
    """Raise for two engines."""
    engines = [name for name in ("use_fsdp", *_OF_ENGINES) if values[name]]
    if len(engines) > 1:
        first, second = (f"{name} ({values.source(name)})" for name in engines[:2])
        raise ConfigurationError(f"{first} and {second} both say how models are sharded. Leave out one of them.")
