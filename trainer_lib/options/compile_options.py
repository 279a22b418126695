"""Options of torch.compile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, UnsupportedError, unknown
from trainer_lib.foundation.imports import is_package_available
from trainer_lib.options.base import KwargsHandler, check_choice, check_flag
from trainer_lib.options.enums import DynamoBackend

Backend = Callable[..., Any]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# The backends that torch always has; to look up another takes a second.
_WITH_TORCH = (DynamoBackend.EAGER, DynamoBackend.AOT_EAGER, DynamoBackend.INDUCTOR, DynamoBackend.CUDAGRAPHS)
_WITHOUT_MODES = (DynamoBackend.EAGER, DynamoBackend.AOT_EAGER, DynamoBackend.CUDAGRAPHS)
_GONE = {
    DynamoBackend.AOT_TS_NVFUSER: "torch removed nvFuser; use 'inductor'",
    DynamoBackend.NVPRIMS_NVFUSER: "torch removed nvFuser; use 'inductor'",
    DynamoBackend.OFI: "torch removed it, and it was for inference only",
    DynamoBackend.FX2TRT: "torch removed it, and it was for inference only",
    DynamoBackend.ONNXRT: "torch removed it",
    DynamoBackend.AOT_TORCHXLA_TRACE_ONCE: "torch removed it; the backend of torch_xla is 'openxla'",
    DynamoBackend.TORCHXLA_TRACE_ONCE: "torch removed it; the backend of torch_xla is 'openxla'",
}
_FROM_PACKAGES = {
    "tensorrt": "torch_tensorrt",
    "tvm": "tvm",
    "hpu_backend": "habana_frameworks",
    "neuron": "torch_neuronx",
    "openxla": "torch_xla",
}


@dataclass(repr=False, eq=False)
class TorchDynamoPlugin(KwargsHandler):
    """How prepared models are compiled.

    An option left at `None` has the launcher's value (`trainer-lib launch --dynamo_backend …`), else torch's default.

    Args:
        backend: The compiler: "inductor" is torch's own; "eager" and "aot_eager" trace without compiling, for
            debugging; "no" compiles nothing. Other names that torch knows, and functions, work as in `torch.compile`.
        mode: How much "inductor" optimizes: "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs".
        fullgraph: Raise if a model cannot be traced as one graph, instead of compiling its parts.
        dynamic: Compile once for all input sizes (True) or again for each size (False); by default torch decides at the
            second size.
        options: Options of the backend by name, in place of `mode`.
        disable: Compile nothing, and keep all other options.
        use_regional_compilation: Compile the repeated blocks of a model, all with one compilation, in place of the
            whole model. A model without repeated blocks is compiled whole. Blocks that get different inputs (such as a
            cache of keys and values, which a loop of your own calls off by `use_cache=False`) are compiled one by one.

    Example:
        >>> TorchDynamoPlugin(backend="inductor", mode="max-autotune").to_kwargs()
        {'backend': 'inductor', 'mode': 'max-autotune'}
    """

    backend: DynamoBackend | str | Backend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        """Fill in the launcher's values, and check all values."""
        if self.backend is None and environment.dynamo_setting("BACKEND") is None:
            self._check_options_have_a_backend()
        self.backend = _known(self.backend or environment.dynamo_setting("BACKEND") or DynamoBackend.NO)
        if self.mode is None and self.options is None:
            self.mode = environment.dynamo_setting("MODE")
        self.mode = self.mode or "default"
        check_choice("mode", self.mode, _MODES)
        for name in ("fullgraph", "dynamic", "use_regional_compilation"):
            if getattr(self, name) is None:
                setattr(self, name, environment.dynamo_flag(f"USE_{name.removeprefix('use_').upper()}"))
            check_choice(name, getattr(self, name), [None, True, False])
        self.fullgraph, self.use_regional_compilation = bool(self.fullgraph), bool(self.use_regional_compilation)
        check_flag("disable", self.disable)
        self._check_mode()

    @property
    def is_active(self) -> bool:
        """Whether models are compiled."""
        return self.backend != DynamoBackend.NO and not self.disable

    @property
    def replays_cuda_graphs(self) -> bool:
        """Whether compiled models replay CUDA graphs on a GPU that has them.

        Example:
            >>> TorchDynamoPlugin(backend="inductor", mode="reduce-overhead").replays_cuda_graphs
            True
        """
        asks = self.mode in ("reduce-overhead", "max-autotune") or bool((self.options or {}).get("triton.cudagraphs"))
        by_inductor = self.backend == DynamoBackend.INDUCTOR and asks
        return self.is_active and (by_inductor or self.backend == DynamoBackend.CUDAGRAPHS)

    def to_dict(self) -> dict[str, Any]:
        """Return all options by name, the backend as torch writes it."""
        backend = self.backend
        return {**self.__dict__, "backend": backend.value.lower() if isinstance(backend, DynamoBackend) else backend}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from its defaults, and the backend."""
        unset = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}
        options = self.to_dict()
        return {"backend": options["backend"]} | {
            name: options[name] for name, default in unset.items() if options[name] != default
        }

    def check_backend(self) -> None:
        """Raise if the backend's package is not installed, or torch does not know the backend."""
        name = self.to_dict()["backend"]
        if not self.is_active or self.backend in _WITH_TORCH or not isinstance(name, str):
            return
        package = _FROM_PACKAGES.get(name)
        if package is not None and not is_package_available(package):
            raise MissingPackageError(f"The backend {name!r} comes with the package {package}, which is not installed.")
        import torch._dynamo

        known = torch._dynamo.list_backends(exclude_tags=None)
        if name not in known:
            raise ConfigurationError(unknown("dynamo backend", name, [*known, "no"]))

    def _check_options_have_a_backend(self) -> None:
        without_backend = [
            name
            for name in ("mode", "fullgraph", "dynamic", "options", "use_regional_compilation")
            if getattr(self, name) is not None
        ]
        if without_backend:
            raise ConfigurationError(
                f"TorchDynamoPlugin({', '.join(without_backend)}) names no backend, so that nothing would be compiled. "
                "Add backend='inductor', or backend='no' to compile nothing."
            )

    def _check_mode(self) -> None:
        if self.mode == "default":
            return
        if self.options is not None:
            raise ConfigurationError(
                f"mode={self.mode!r} and options contradict each other: a mode is a set of options. Give one of them."
            )
        if self.backend in _WITHOUT_MODES:
            raise ConfigurationError(
                f"mode={self.mode!r} needs the backend 'inductor' (got {self.to_dict()['backend']!r}). Leave mode out."
            )


def compilation_plugin(
    backend: DynamoBackend | str | Backend | None, plugin: TorchDynamoPlugin | None
) -> TorchDynamoPlugin | None:
    """Return one plugin from the two ways to name a backend; `None` if neither was given."""
    if backend is not None and plugin is not None:
        raise ConfigurationError(
            "dynamo_backend and dynamo_plugin cannot be given together. Name the backend in the plugin: "
            "TorchDynamoPlugin(backend=…)."
        )
    if plugin is not None and not isinstance(plugin, TorchDynamoPlugin):
        raise ConfigurationError(f"dynamo_plugin must be a TorchDynamoPlugin, got a {type(plugin).__name__}.")
    return TorchDynamoPlugin(backend=backend) if backend is not None else plugin


def _known(backend: Any) -> DynamoBackend | str | Backend:
    if callable(backend):
        return backend
    if not isinstance(backend, str):
        raise ConfigurationError(f"backend must be a name or a function, got {backend!r}.")
    if backend.upper() not in DynamoBackend:
        return backend.lower()
    known = DynamoBackend(backend.upper())
    if known in _GONE:
        raise UnsupportedError(f"The dynamo backend {str(backend).lower()!r} is not supported: {_GONE[known]}.")
    return known
