"""The options of fp8: torchao's, Transformer Engine's and MS-AMP's, and which of them a run uses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer_lib.foundation import environment
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, UnsupportedError
from trainer_lib.foundation.imports import is_torchao_available, is_transformer_engine_available, pip_install
from trainer_lib.options.base import KwargsHandler, check_choice, check_count, check_flag
from trainer_lib.options.enums import FP8BackendType

_FORMATS = ("HYBRID", "E4M3", "E5M2")
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # of torchao
_ALGORITHMS = ("max", "most_recent")


@dataclass(repr=False, eq=False)
class AORecipeKwargs(KwargsHandler):
    """The options of `mixed_precision="fp8"` with torchao: linear layers multiply in fp8, with scales of each tensor.

    Args:
        config: One of torchao's recipes by name, "tensorwise" (the default), "rowwise" or "rowwise_with_gw_hp", which
            is emulated on the CPU; or a `torchao.float8.Float8LinearConfig` instead of the options below.
        module_filter_func: A function of a linear layer and its name that says whether to convert it; by default all
            but the first and the last one, and those whose sizes are no multiples of 16.
        pad_inner_dim: Whether to pad matrices to sizes that fp8 needs; by default the launcher's setting, or yes.
        enable_fsdp_float8_all_gather: Whether FSDP gathers the weights of these layers in fp8 instead of bf16; with
            the recipe "tensorwise" only. By default the launcher's setting, or no.

    Example:
        >>> AORecipeKwargs(module_filter_func=lambda module, name: "mlp" in name).pad_inner_dim
        True
    """

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        """Check the values, and read the launcher's."""
        if isinstance(self.config, str):
            check_choice("config", self.config, _RECIPES)
        elif self.config is not None and not hasattr(self.config, "cast_config_weight"):
            raise ConfigurationError(
                f"config must be a torchao.float8.Float8LinearConfig (got {type(self.config).__name__})."
            )
        if self.module_filter_func is not None and not callable(self.module_filter_func):
            raise ConfigurationError(
                f"module_filter_func must be a function of a layer and its name (got {shown(self.module_filter_func)})."
            )
        for name, default in (("pad_inner_dim", True), ("enable_fsdp_float8_all_gather", False)):
            value = getattr(self, name)
            if value is None and (self.config is None or isinstance(self.config, str)):
                setattr(self, name, _flag(name, default=default))
            elif value is not None:
                check_flag(name, value)
                if self.config is not None and not isinstance(self.config, str):
                    raise ConfigurationError(
                        f"AORecipeKwargs got both config and {name}={value}. Put {name} into the Float8LinearConfig."
                    )
        if self.config not in (None, "tensorwise") and self.enable_fsdp_float8_all_gather:
            raise ConfigurationError(
                f"enable_fsdp_float8_all_gather=True works with config='tensorwise' (got {self.config!r}): a shard "
                "holds parts of columns, whose scales no rank knows. Leave one of them out."
            )


@dataclass(repr=False, eq=False)
class TERecipeKwargs(KwargsHandler):
    """The options of `mixed_precision="fp8"` with Transformer Engine, on GPUs.

    Args:
        use_autocast_during_eval: Whether evaluation computes in fp8 too.
        margin: The margin of the scaling factors.
        interval: The number of steps between two computations of the scaling factors.
        fp8_format: "HYBRID" (E4M3 in the forward, E5M2 in the backward), "E4M3" or "E5M2".
        amax_history_len: From how many steps the largest value of a tensor counts.
        amax_compute_algo: "max" or "most_recent" of them.
        override_linear_precision: Whether to compute the forward, the gradients of inputs, and those of weights in
            higher precision.
        use_mxfp8_block_scaling: Whether to scale blocks of 32 values (MXFP8, on Blackwell GPUs).

    Example:
        >>> TERecipeKwargs(fp8_format="e4m3").fp8_format
        'E4M3'
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        """Read the launcher's values for those that are not given, and check all."""
        for name in ("use_autocast_during_eval", "use_mxfp8_block_scaling"):
            value = getattr(self, name)
            setattr(self, name, bool(_flag(name, default=False)) if value is None else value)
            check_flag(name, getattr(self, name))
        self.margin = _whole("margin", self.margin, default=0)
        self.interval = _whole("interval", self.interval, default=1)
        self.amax_history_len = _whole("amax_history_len", self.amax_history_len, default=1024)
        self.fp8_format = str(self.fp8_format or environment.fp8_setting("format") or "HYBRID").upper()
        check_choice("fp8_format", self.fp8_format, _FORMATS)
        algorithm = self.amax_compute_algo or environment.fp8_setting("amax_compute_algo") or "most_recent"
        self.amax_compute_algo = str(algorithm).lower()
        check_choice("amax_compute_algo", self.amax_compute_algo, _ALGORITHMS)
        self.override_linear_precision = _three_flags(self.override_linear_precision)


@dataclass(repr=False, eq=False)
class MSAMPRecipeKwargs(KwargsHandler):
    """The options of `mixed_precision="fp8"` with MS-AMP, which this version does not run.

    Args:
        opt_level: "O1" or "O2".
    """

    opt_level: str | None = None

    def __post_init__(self) -> None:
        """Check the value."""
        self.opt_level = self.opt_level or environment.fp8_setting("opt_level") or "O2"
        check_choice("opt_level", self.opt_level, ("O1", "O2"))


FP8Recipe = AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs


@dataclass(repr=False, eq=False)
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The older name for the options of Transformer Engine and MS-AMP; `backend` chooses between them.

    Args:
        backend: "TE" or "MSAMP".
    """

    backend: str | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        backend = str(self.backend or environment.fp8_setting("backend") or "TE").upper()
        check_choice("backend", backend, ("TE", "MSAMP"))
        self.backend = backend
        TERecipeKwargs.__post_init__(self)
        MSAMPRecipeKwargs.__post_init__(self)


def backend_of(recipe: FP8Recipe) -> FP8BackendType:
    """Return the package that a recipe is for."""
    if isinstance(recipe, AORecipeKwargs):
        return FP8BackendType.AO
    is_ms_amp = getattr(recipe, "backend", None) == "MSAMP" or not isinstance(recipe, TERecipeKwargs)
    return FP8BackendType.MSAMP if is_ms_amp else FP8BackendType.TE


def choose_recipe(recipe: FP8Recipe | None) -> FP8Recipe:
    """Return the recipe of fp8: the given one, that of the launcher's backend, or that of an installed package.

    Raises:
        MissingPackageError: If its package is not installed.
        UnsupportedError: If it is for MS-AMP.
    """
    if recipe is None:
        recipe = _default_recipe(environment.fp8_setting("backend"))
    backend = backend_of(recipe)
    if backend is FP8BackendType.MSAMP:
        raise UnsupportedError(
            "mixed_precision='fp8' with MS-AMP is not supported: MS-AMP is no longer developed, and does not work with "
            "this version of torch. Use torchao: kwargs_handlers=[AORecipeKwargs()], or --fp8_backend ao."
        )
    if backend is FP8BackendType.AO and not is_torchao_available():
        raise MissingPackageError(f"mixed_precision='fp8' needs torchao: {pip_install('torchao')}.")
    if backend is FP8BackendType.TE and not is_transformer_engine_available():
        raise MissingPackageError(
            "mixed_precision='fp8' with Transformer Engine needs its package: "
            f"{pip_install('transformer_engine[pytorch]')}, on a machine with CUDA. torchao works too: "
            "kwargs_handlers=[AORecipeKwargs()], or --fp8_backend ao."
        )
    return recipe


def _default_recipe(backend: str | None) -> FP8Recipe:
    if backend is None:
        prefers_te = is_transformer_engine_available() and not is_torchao_available()
        return TERecipeKwargs() if prefers_te else AORecipeKwargs()
    kinds = {"AO": AORecipeKwargs, "TE": TERecipeKwargs, "MSAMP": MSAMPRecipeKwargs}
    check_choice("fp8_backend", backend.upper(), kinds)
    return kinds[backend.upper()]()


def _flag(name: str, *, default: bool) -> bool:
    text = environment.fp8_setting(name)
    return default if text is None else bool(environment.str_to_bool(text))


def _whole(name: str, value: int | None, *, default: int) -> int:
    text = environment.fp8_setting(name)
    if value is None:
        value = int(text) if text is not None else default
    check_count(name, value, at_least=0 if default == 0 else 1)
    return value


def _three_flags(value: Any) -> tuple[bool, bool, bool]:
    if value is None:
        text = environment.fp8_setting("override_linear_precision")
        value = (
            [bool(environment.str_to_bool(part.strip(" ()[]"))) for part in text.split(",")] if text else [False] * 3
        )
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(isinstance(part, bool) for part in value):
        raise ConfigurationError(
            f"override_linear_precision must be three of True or False (got {shown(value)}), for the forward, the "
            "gradients of inputs, and the gradients of weights."
        )
    return value[0], value[1], value[2]
