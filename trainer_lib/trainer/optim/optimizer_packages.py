"""Short names of optimizers that other packages have, or this one."""

from collections.abc import Callable
from typing import Any

from trainer_lib.foundation.errors import MissingPackageError
from trainer_lib.foundation.imports import is_package_available, pip_install
from trainer_lib.trainer.arguments.import_path import load

# The names of transformers, where it has one. The first part of a path is the package.
PATHS = {
    "adalomo": "trainer_lib.trainer.optim.lomo.AdaLomo",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw_bf16": "trainer_lib.trainer.optim.stochastic_adamw.StochasticAdamW",
    "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw_fp8": "torchao.optim.AdamWFp8",
    "adamw_torch_4bit": "torchao.optim.AdamW4bit",
    "adamw_torch_8bit": "torchao.optim.AdamW8bit",
    "apollo_adamw": "trainer_lib.trainer.optim.low_rank_adamw.APOLLOAdamW",
    "ademamix": "bitsandbytes.optim.AdEMAMix",
    "ademamix_8bit": "bitsandbytes.optim.AdEMAMix8bit",
    "galore_adamw": "trainer_lib.trainer.optim.low_rank_adamw.GaLoreAdamW",
    "lion_32bit": "bitsandbytes.optim.Lion",
    "lion_8bit": "bitsandbytes.optim.Lion8bit",
    "lomo": "trainer_lib.trainer.optim.lomo.Lomo",
    "muon": "trainer_lib.trainer.optim.muon_adamw.MuonAdamW",
    "paged_adamw_32bit": "bitsandbytes.optim.PagedAdamW32bit",
    "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "paged_ademamix_32bit": "bitsandbytes.optim.PagedAdEMAMix",
    "paged_ademamix_8bit": "bitsandbytes.optim.PagedAdEMAMix8bit",
    "paged_lion_32bit": "bitsandbytes.optim.PagedLion",
    "paged_lion_8bit": "bitsandbytes.optim.PagedLion8bit",
    "rmsprop_bnb": "bitsandbytes.optim.RMSprop",
    "rmsprop_bnb_32bit": "bitsandbytes.optim.RMSprop32bit",
    "rmsprop_bnb_8bit": "bitsandbytes.optim.RMSprop8bit",
    "schedule_free_adamw": "schedulefree.AdamWScheduleFree",
    "schedule_free_radam": "schedulefree.RAdamScheduleFree",
    "schedule_free_sgd": "schedulefree.SGDScheduleFree",
}
_STEPPING_IN_BACKWARD = ("lomo", "adalomo")


def steps_in_backward(optimizer: str) -> bool:
    """Whether an optimizer by this name updates weights while the backward runs.

    Example:
        >>> steps_in_backward("AdaLomo"), steps_in_backward("sgd")
        (True, False)
    """
    return optimizer.lower() in _STEPPING_IN_BACKWARD


def load_by_name(name: str) -> Callable[..., Any]:
    """Return the optimizer of a short name in `PATHS`.

    Raises:
        MissingPackageError: If its package is not installed.
    """
    package = PATHS[name].partition(".")[0]
    if not is_package_available(package):
        raise MissingPackageError(
            f"optimizer={name!r} is {PATHS[name]}, and {package} is not installed. Install it with "
            f"{pip_install(package)}."
        )
    return load(PATHS[name], "optimizer")
