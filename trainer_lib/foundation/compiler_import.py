"""torch's compiler, imported when something is compiled instead of when the first optimizer is made.

torch keeps its optimizers and `DistributedDataParallel` out of what it compiles, and imports its compiler for that when
one is made, and when an optimizer steps: it takes as long as `import torch`. While the compiler is not there nothing is
compiled, so there is nothing to keep them out of. Once it is imported, by anybody, torch's own functions are called.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_COMPILER = "torch._dynamo"
_KEPT_OUT = (
    (Optimizer, ("add_param_group", "load_state_dict", "state_dict", "zero_grad")),
    (DistributedDataParallel, ("_inside_ddp_forward",)),
)
_CHOICE = "__dynamo_disable"  # where torch notes on a method what it calls instead, for which it needs the compiler
_STEP = "_use_grad"  # the function that torch puts around the steps of its optimizers, which imports the compiler
_FOR_DDP = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))


def defer_compiler_import() -> None:
    """Let optimizers be made and step without torch's compiler, until it is imported.

    Example:
        >>> defer_compiler_import()  # what importing `Trainer` or `Accelerator` does
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> torch.optim.SGD([weight], lr=0.1).step()
    """
    if _COMPILER in sys.modules or any(isinstance(finder, _Deferral) for finder in sys.meta_path):
        return
    deferral = _Deferral()
    for method in deferral.methods:
        setattr(method, _CHOICE, method)
    for kind in {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}:
        step: Any = vars(kind).get("step")
        if getattr(getattr(step, "__code__", None), "co_name", None) == _STEP:
            kind.step = deferral.step(step)
    sys.meta_path.insert(0, deferral)


@contextlib.contextmanager
def compiler_defaults() -> Generator[None]:
    """Answer what `DistributedDataParallel` asks the compiler when it is made: how it cuts graphs."""
    if _COMPILER in sys.modules:
        yield
        return
    modules = torch.__dict__
    modules["_dynamo"] = _FOR_DDP
    try:
        yield
    finally:
        if modules.get("_dynamo") is _FOR_DDP:  # another thread may have imported the compiler, or have left this too
            modules.pop("_dynamo", None)


class _Deferral:
    """Finds no module, but sees the compiler's import begin, which ends the deferral."""

    def __init__(self) -> None:
        self.is_over = False
        self.methods = [inspect.unwrap(getattr(kind, name)) for kind, names in _KEPT_OUT for name in names]

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Give the methods back to torch if it is its compiler that is looked for."""
        if name == _COMPILER and not self.is_over:
            self.is_over = True
            for method in self.methods:
                vars(method).pop(_CHOICE, None)  # another thread may look for it at the same time

    def step(self, by_torch: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that does what torch's does, less the import."""
        plain: Callable[..., Any] = by_torch.__wrapped__  # type: ignore[attr-defined]

        @functools.wraps(by_torch)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.is_over:
                return by_torch(optimizer, *args, **kwargs)
            with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
                return plain(optimizer, *args, **kwargs)

        return step
