"""Adapters of PEFT in a plan: names without its wrapper, and styles of the matrices inside a LoRA layer."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.modules.module_kinds import is_peft_model
from trainer_lib.strategies.tensor_parallel.styles import SEQUENCE, STYLES

_WRAPPERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper")  # PEFT's bases of modules around one of the model
_SECOND = ".lora_B."


def plan_names(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return by name of each module the name that a plan knows it by: that in the model without PEFT's wrapper."""
    if not is_peft_model(model):
        return {name: name for name in modules}
    base: Any = model.get_base_model()  # type: ignore[operator]
    prefix = next(name for name, module in modules.items() if module is base)
    return {name: name.removeprefix(f"{prefix}.") for name in modules}


def without_inner(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of a model, with the one that PEFT wrapped for a layer of PEFT and all that is inside it."""
    wrappers = tuple(f"{name}." for name, module in modules.items() if is_wrapper(module))
    outer = {name: module for name, module in modules.items() if not name.startswith(wrappers)}
    return {name: _wrapped(module) if is_wrapper(module) else module for name, module in outer.items()}


def layer_name(name: str) -> str:
    """Return the name of a layer, with or without an adapter."""
    return name.removesuffix(".base_layer")


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's, around a module of the model."""
    # By name: PEFT need not be installed.
    return any(base.__name__ in _WRAPPERS and base.__module__.startswith("peft.") for base in type(module).__mro__)


def is_second(name: str) -> bool:
    """Whether a module is the second matrix of a LoRA layer, whose input no other layer has."""
    return _SECOND in name


def with_adapters(chosen: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the styles of a plan, with those of the modules inside PEFT's instead of the latter's.

    Outputs of a layer are split in its base layer and in the second matrix of LoRA, inputs in the base layer and in
    the first matrix. Styles that a plan gives to a module inside count first.

    Raises:
        UnsupportedError: If a layer of PEFT computes something else than LoRA does.
    """
    styles = {name: style for name, style in chosen.items() if not is_wrapper(modules[name])}
    for name, style in chosen.items():
        if is_wrapper(modules[name]):
            for inner, inner_style in _inner_styles(name, modules[name], style):
                styles.setdefault(f"{name}.{inner}", inner_style)
    return styles


def _inner_styles(name: str, module: Any, style: str) -> Iterator[tuple[str, str]]:
    if type(module).__name__ == "ModulesToSaveWrapper":  # computes with one of several whole modules
        yield "original_module", style
        yield from ((f"modules_to_save.{adapter}", style) for adapter in module.modules_to_save)
        return
    _check_computes_lora(name, module, style)
    yield "base_layer", style
    splits, gives = STYLES[style].splits, STYLES[style].gives
    yield from ((f"lora_A.{adapter}", style) for adapter in module.lora_A if splits == "in")
    second = {"out": style, "in": "sequence_parallel" if gives == SEQUENCE else None}[str(splits)]
    yield from ((f"lora_B.{adapter}", second) for adapter in module.lora_B if second is not None)


def _check_computes_lora(name: str, module: Any, style: str) -> None:
    kind = type(module)
    is_lora = kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ in ("Linear", "Embedding")
    variants = [type(variant).__name__ for variant in module.lora_variant.values()] if is_lora else []
    if not is_lora or variants or STYLES[style].splits not in ("out", "in"):
        what = f" with {variants[0]}" if variants else ""
        raise UnsupportedError(
            f"{name} is a {kind.__module__}.{kind.__name__}{what}, which tp_size cannot split ({style!r}). Of PEFT's "
            "adapters it splits plain LoRA of linear layers and embeddings, and modules_to_save. Leave variants such as"
            " use_dora and this module out of LoraConfig, or shard with dp_shard_size instead."
        )


def _wrapped(module: Any) -> nn.Module:
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module.original_module
