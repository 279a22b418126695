"""Liger's kernels in place of layers of a model of transformers."""

from torch import nn

from trainer_lib.foundation.errors import MissingPackageError, UnsupportedError
from trainer_lib.foundation.imports import is_package_available, pip_install
from trainer_lib.modules.unwrapping import without_adapter
from trainer_lib.trainer.losses.label_shift import is_from_transformers


def apply_liger_kernels(model: nn.Module, device_type: str) -> None:
    """Replace layers of a model of transformers by Liger's kernels, in place.

    Args:
        model: The model, or an adapter of PEFT around it.
        device_type: The type of device that it trains on.

    Raises:
        MissingPackageError: If liger-kernel is not installed.
        UnsupportedError: If the device is a CPU, or the model is not from transformers.
    """
    if not is_package_available("liger_kernel", "liger-kernel"):
        raise MissingPackageError(
            "use_liger_kernel=True needs liger-kernel, which is not installed. Install it with "
            f"{pip_install('liger-kernel')}; chunked_cross_entropy=True saves the memory of logits without it."
        )
    if device_type == "cpu":
        raise UnsupportedError(
            "use_liger_kernel=True needs a GPU: the kernels are written in Triton. Set it to False on a CPU; "
            "chunked_cross_entropy=True saves the memory of logits there."
        )
    if not is_from_transformers(model):
        raise UnsupportedError(
            f"use_liger_kernel=True needs a model of transformers (got {type(model).__name__}). Set it to False."
        )
    # The one way to replace layers of a model that has its weights; transformers calls it too.
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        _apply_liger_kernel_to_instance,  # pyright: ignore[reportPrivateUsage]
    )

    _apply_liger_kernel_to_instance(model=without_adapter(model))
