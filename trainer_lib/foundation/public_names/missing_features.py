"""Stand-ins for public names of features that this version does not have.

A script can import them, derive classes from them and compare types with them. Making an object or calling a function
raises an error that says what is missing and what to use instead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from trainer_lib.foundation.errors import UnsupportedError


class MissingFeature(NamedTuple):
    """A feature that this version does not have.

    Args:
        name: What it is called, such as "DeepSpeed".
        instead: A sentence that says what to use instead.
    """

    name: str
    instead: str


def missing_class(name: str, feature: MissingFeature) -> type[Any]:
    """Return a class of this name; making an object of it, or of a class derived from it, raises.

    Example:
        >>> MegatronEngine = missing_class("MegatronEngine", MEGATRON_LM)
        >>> isinstance("a text", MegatronEngine)
        False
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        del cls, args, kwargs
        raise refusal(name, feature)

    return type(name, (), {"__new__": refuse, "__doc__": _description(feature)})


def missing_function(name: str, feature: MissingFeature) -> Callable[..., Any]:
    """Return a function of this name, which raises when it is called."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise refusal(name, feature)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = _description(feature)
    return function


def refusal(name: str, feature: MissingFeature) -> UnsupportedError:
    """Return the error for a name, option or value that needs a feature which this version does not have."""
    return UnsupportedError(f"{name} needs {feature.name}, which this version does not have. {feature.instead}")


def _description(feature: MissingFeature) -> str:
    return f"Not available: this version does not have {feature.name}. {feature.instead}"


FSDP1_STEPS = MissingFeature(
    "Accelerate's separate steps of FSDP",
    "accelerator.prepare shards a model; accelerator.save_state, load_state and save_model write and read its weights.",
)
LAUNCHER_STEPS = MissingFeature(
    "Accelerate's separate steps of a launch", "Start scripts with `trainer-lib launch`, and see its options with -h."
)
MEGATRON_LM = MissingFeature(
    "Megatron-LM's own code", "The table of MegatronLMPlugin's fields says what does the same."
)
PIPELINE_STEPS = MissingFeature("Accelerate's separate steps of a pipeline", "prepare_pippy does them all.")
SAGEMAKER = MissingFeature(
    "the arguments of SageMaker's Python package",
    "`trainer-lib launch` describes the job by boto3: trainer_lib.commands.sagemaker.job.",
)
TPU_CASTS = MissingFeature(
    "torch_xla's former casts of all numbers", "--mixed_precision bf16 computes in bf16, and bf16-true trains in it."
)
TPU_FUNCTIONS = MissingFeature(
    "a launcher that calls a function of the script",
    "`trainer-lib launch --tpu` runs the whole script in each process: call the function there.",
)
TPU_INSTALLER = MissingFeature("an installer of torch_xla", "Run `pip install torch_xla` for the torch that you have.")
TPU_PODS = MissingFeature(
    "Accelerate's launcher for pods",
    "Run `trainer-lib launch --tpu` on each machine, with its --machine_rank; `trainer-lib tpu-config` runs commands "
    "on all of them.",
)
