"""Optional packages: whether they are installed, and errors that say how to install them."""

import functools
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError

if TYPE_CHECKING:
    from packaging.version import Version

_COMPARISONS: dict[str, "Callable[[Version, Version], bool]"] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


@functools.cache
def is_package_available(module: str, distribution: str | None = None) -> bool:
    """Whether `module` can be imported, without importing it.

    Args:
        module: The name in the import statement.
        distribution: The name it is installed under, if a folder may have the module's name without the package.
    """
    try:
        is_importable = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
    if not is_importable or distribution is None:
        return is_importable
    from importlib import metadata  # slower to import than the launcher's own modules

    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def version_of(package: str) -> str:
    """Return the version of a package: its own word if it is imported, since the metadata on disk takes 3 ms to read.

    Example:
        >>> import torch
        >>> version_of("torch") == torch.__version__
        True
    """
    version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(version, str):
        return str(version)  # torch has a type of its own
    from importlib import metadata

    return metadata.version(package)


def imported_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are imported; a script's own module of such a name has none."""
    versions: dict[str, str] = {}
    for name in packages:
        if name in sys.modules:
            with suppress(ImportError):  # no package of this name is installed
                versions[name] = version_of(name)
    return versions


def require(module: str, extra: str | None = None, distribution: str | None = None) -> ModuleType:
    """Import an optional package, or raise with the extra that installs it.

    Args:
        module: The name in the import statement.
        extra: The extra of this library that installs it, if there is one.
        distribution: The name it is installed under, if that differs.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        commands = [pip_install(distribution or module), *([pip_install(f"trainer_lib[{extra}]")] if extra else [])]
        raise MissingPackageError(f"{module} is not installed. Install it with {' or '.join(commands)}.") from error


def pip_install(requirement: str) -> str:
    """Return the command that installs a package, for messages; zsh needs quotes around brackets.

    Example:
        >>> pip_install("boto3"), pip_install("trainer_lib[s3]")
        ('`pip install boto3`', '`pip install "trainer_lib[s3]"`')
    """
    return f'`pip install "{requirement}"`' if "[" in requirement else f"`pip install {requirement}`"


def compare_versions(library_or_version: "str | Version", operation: str, requirement_version: str) -> bool:
    """Whether `library_or_version operation requirement_version` is true, for an installed library or a version.

    Example:
        >>> compare_versions("torch", ">=", "2.0")
        True
    """
    from packaging.version import parse

    if operation not in _COMPARISONS:
        raise ConfigurationError(f"Unknown comparison {operation!r}. Known: {', '.join(_COMPARISONS)}.")
    if isinstance(library_or_version, str):
        from importlib import metadata

        library_or_version = parse(metadata.version(library_or_version))
    return _COMPARISONS[operation](library_or_version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether `torch.__version__ operation version` is true."""
    return compare_versions("torch", operation, version)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the libraries that this process has imported.

    Example:
        >>> are_libraries_initialized("torch", "no_such_library")
        ['torch']
    """
    return [name for name in library_names if name in sys.modules]


def _package(module: str, distribution: str | None = None) -> Callable[[], bool]:
    def is_available() -> bool:
        return is_package_available(module, distribution)

    is_available.__doc__ = f"Whether the package {module} is installed."
    return is_available


def _accelerator(kind: str) -> Callable[..., bool]:
    def is_available(check_device: bool = False) -> bool:
        import torch

        del check_device  # a device is always required
        device = torch.accelerator.current_accelerator(check_available=True)
        return device is not None and device.type == kind

    is_available.__doc__ = f"Whether a device of the type {kind} is available."
    return is_available


is_aim_available: Callable[[], bool] = _package("aim")
is_amdsmi_available: Callable[[], bool] = _package("amdsmi")
is_boto3_available: Callable[[], bool] = _package("boto3")
is_clearml_available: Callable[[], bool] = _package("clearml")
is_comet_ml_available: Callable[[], bool] = _package("comet_ml")
is_datasets_available: Callable[[], bool] = _package("datasets")
is_deepspeed_available: Callable[[], bool] = _package("deepspeed", "deepspeed")
is_dvclive_available: Callable[[], bool] = _package("dvclive")
is_import_timer_available: Callable[[], bool] = _package("import_timer")
is_lomo_available: Callable[[], bool] = _package("lomo_optim")
is_matplotlib_available: Callable[[], bool] = _package("matplotlib")
is_megatron_lm_available: Callable[[], bool] = _package("megatron")
is_mlflow_available: Callable[[], bool] = _package("mlflow")
is_msamp_available: Callable[[], bool] = _package("msamp", "ms-amp")
is_pandas_available: Callable[[], bool] = _package("pandas")
is_peft_available: Callable[[], bool] = _package("peft")
is_pynvml_available: Callable[[], bool] = _package("pynvml")
is_pytest_available: Callable[[], bool] = _package("pytest")
is_rich_available: Callable[[], bool] = _package("rich")
"""Whether the package rich, which prints tracebacks and progress in color, is installed."""
is_sagemaker_available: Callable[[], bool] = _package("sagemaker")
is_schedulefree_available: Callable[[], bool] = _package("schedulefree")
is_swanlab_available: Callable[[], bool] = _package("swanlab")
is_tensorboard_available: Callable[[], bool] = _package("tensorboard")
is_timm_available: Callable[[], bool] = _package("timm")
is_torchao_available: Callable[[], bool] = _package("torchao")
is_torchdata_available: Callable[[], bool] = _package("torchdata")
is_torchvision_available: Callable[[], bool] = _package("torchvision")
is_tqdm_available: Callable[[], bool] = _package("tqdm")
is_trackio_available: Callable[[], bool] = _package("trackio")
is_transformer_engine_available: Callable[[], bool] = _package("transformer_engine")
is_transformers_available: Callable[[], bool] = _package("transformers")
is_triton_available: Callable[[], bool] = _package("triton")
is_wandb_available: Callable[[], bool] = _package("wandb")

is_cuda_available: Callable[..., bool] = _accelerator("cuda")
is_mlu_available: Callable[..., bool] = _accelerator("mlu")
is_musa_available: Callable[..., bool] = _accelerator("musa")
is_neuron_available: Callable[..., bool] = _accelerator("neuron")
is_npu_available: Callable[..., bool] = _accelerator("npu")
is_sdaa_available: Callable[..., bool] = _accelerator("sdaa")
is_xpu_available: Callable[..., bool] = _accelerator("xpu")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in a version of at least `min_version`."""
    if not is_package_available("bitsandbytes", "bitsandbytes"):
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether a device of the type hpu is available."""
    del init_hccl  # the process group initializes the backend
    return _accelerator("hpu")()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether a device of the type mps is available, and the version of torch is at least `min_version`."""
    return is_torch_version(">=", min_version) and _accelerator("mps")()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla can be imported; with one of the questions, whether it drives a TPU or a GPU.

    Args:
        check_is_tpu: Whether it drives a TPU.
        check_is_gpu: Whether it drives a GPU.
    """
    from trainer_lib.foundation import xla

    if not xla.can_be_imported():
        return False
    kinds = [kind for kind, is_asked in (("TPU", check_is_tpu), ("CUDA", check_is_gpu)) if is_asked]
    return all(xla.device_kind() == kind for kind in kinds)


def is_weights_only_available() -> bool:
    """Whether `torch.load` has `weights_only`: True for every supported version of torch."""
    return True


def is_rocm_available() -> bool:
    """Whether this torch was built for AMD's ROCm."""
    import torch

    return torch.version.hip is not None


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this machine supports bf16: every CPU does, and accelerators that report it."""
    from trainer_lib.foundation.device_types import supports_bf16

    del ignore_tpu  # TPUs compute in bf16
    return supports_bf16()


def is_fp16_available() -> bool:
    """Whether this machine supports fp16: torch does everywhere."""
    return True


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata's StatefulDataLoader is installed."""
    return is_torchdata_available() and is_package_available("torchdata.stateful_dataloader")


USE_TORCH_XLA = False  # it is not imported unless PJRT_DEVICE or ACCELERATE_TORCH_DEVICE asks for it


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy's version is at least `min_version`."""
    return compare_versions("numpy", ">=", min_version)


def is_torch_distributed_available() -> bool:
    """Whether this torch was built with torch.distributed."""
    import torch

    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Whether torch has a backend for collectives between XPUs."""
    import torch

    return torch.distributed.is_xccl_available() and is_xpu_available()


def is_pippy_available() -> bool:
    """Whether torch has pipelines (`torch.distributed.pipelining`): True for every supported version."""
    return is_torch_distributed_available()


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes is installed and has layers of 8 bits."""
    return is_bnb_available("0.37.2")


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes is installed and has layers of 4 bits."""
    return is_bnb_available("0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes is installed and runs on other devices than CUDA's."""
    return is_bnb_available("0.46.0")


def is_fp8_available() -> bool:
    """Whether a package for fp8 is installed: torchao, Transformer Engine or MS-AMP."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is installed, and this GPU computes with its MXFP8 (Blackwell and later)."""
    import torch

    return is_transformer_engine_available() and is_cuda_available() and torch.cuda.get_device_capability() >= (10, 0)


def is_habana_gaudi1() -> bool:
    """Whether the device is a Gaudi of the first generation, which this version does not know."""
    return False


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to raise unless DeepSpeed is installed."""
    return _requiring(func, "deepspeed", is_deepspeed_available)


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to raise unless torchao is installed."""
    return _requiring(func, "torchao", is_torchao_available)


def _requiring(func: Callable[..., Any], package: str, is_available: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_available():
            raise MissingPackageError(f"{func.__name__} needs {package}, which is not installed. Install it.")
        return func(*args, **kwargs)

    return checked
