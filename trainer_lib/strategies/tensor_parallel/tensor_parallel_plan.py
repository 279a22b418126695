"""The plan of tensor parallelism: which module has which style, from patterns or from transformers' `tp_plan`."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelConfig
from trainer_lib.strategies.tensor_parallel import adapters, experts
from trainer_lib.strategies.tensor_parallel.attention_heads import heads_of, is_divided_by_script
from trainer_lib.strategies.tensor_parallel.styles import SPLIT, STYLES, features, is_matrix, style_of

_logger = get_logger(__name__)
_SHOWN = 12
_EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")  # transformers' styles of a module with stacked experts
_ENCODER = {
    "*embeddings.word_embeddings": "embedding_rowwise",
    "*.attention.self.query": "colwise",
    "*.attention.self.key": "colwise",
    "*.attention.self.value": "colwise",
    "*.intermediate.dense": "colwise",
    "*.output.dense": "rowwise",
}
_ROBERTA = {**_ENCODER, "lm_head.decoder": "colwise_gather_output"}
_DECODER = {"*attn.[qkv]_proj": "colwise", "*attn.out_proj": "rowwise", "*.fc1": "colwise", "*.fc2": "rowwise"}
_VISION = {"*.attention.[qkv]_proj": "colwise", "*.attention.o_proj": "rowwise", "*.fc1": "colwise", "*.fc2": "rowwise"}
# The bias of positions has a column for each head, of which each rank looks up its own.
_T5 = {
    "*shared": "embedding_rowwise",
    "*embed_tokens": "embedding_rowwise",
    "*Attention.[qkv]": "colwise",
    "*Attention.relative_attention_bias": "colwise",
    "*Attention.o": "rowwise",
    "*.wi": "colwise",
    "*.wi_[01]": "colwise",
    "*.wo": "rowwise",
    "lm_head": "colwise_gather_output",
}
# For models of transformers without a plan of their own. GPT-2 computes queries, keys and values in one matrix, whose
# columns are not those of one head, so its attention gets the whole output.
_PLANS: Mapping[str, Mapping[str, str]] = {
    "bart": _DECODER,
    "bert": {**_ENCODER, "cls.predictions.decoder": "colwise_gather_output"},
    "camembert": _ROBERTA,
    "dinov2": _VISION,
    "distilbert": {
        "*embeddings.word_embeddings": "embedding_rowwise",
        "*.attention.[qkv]_lin": "colwise",
        "*.attention.out_lin": "rowwise",
        "*.ffn.lin1": "colwise",
        "*.ffn.lin2": "rowwise",
        "vocab_projector": "colwise_gather_output",
    },
    "electra": {**_ENCODER, "generator_lm_head": "colwise_gather_output"},
    "gpt2": {
        "*wte": "embedding_rowwise",
        "*.attn.c_attn": "colwise_gather_output",
        "*.attn.c_proj": "rowwise_split_input",
        "*.mlp.c_fc": "colwise",
        "*.mlp.c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "mt5": _T5,
    "opt": {**_DECODER, "*embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"},
    "roberta": _ROBERTA,
    "t5": _T5,
    "umt5": _T5,
    "vit": _VISION,
    "xlm-roberta": _ROBERTA,
}
_FIRST_BLOCK = "model.layers.0"
# Plans in which each rank computes the norms of its part of the sequence.
_SEQUENCES = {
    "model.embed_tokens": "embedding_rowwise",
    _FIRST_BLOCK: "scatter_sequence",
    "*.*_layernorm": "sequence_parallel",
    "*.self_attn": "gather_sequence",
    "*.[qkv]_proj": "colwise",
    "*.o_proj": "rowwise_scatter_sequence",
    "*.mlp": "gather_sequence",
    "*.gate_proj": "colwise",
    "*.up_proj": "colwise",
    "*.down_proj": "rowwise_scatter_sequence",
    "model.norm": "sequence_parallel_gather",
    "lm_head": "colwise_gather_output",
}
_OF_SEQUENCES = ("llama", "mistral", "qwen2")  # the kinds of models that have it


def resolve(model: nn.Module, config: TorchTensorParallelConfig, size: int) -> dict[str, str]:
    """Return the style of each module that is split, by name.

    Args:
        model: The model.
        config: The options, perhaps with a plan.
        size: How many ranks split each matrix.

    Raises:
        ConfigurationError: If there is no plan, a pattern matches no module, or sizes do not divide.
    """
    modules = dict(model.named_modules())
    names = adapters.plan_names(model, modules)
    patterns = _patterns(model, config, names)
    chosen: dict[str, str] = {}
    for pattern, style in patterns.items():
        if style not in STYLES:
            raise ConfigurationError(unknown("style of tensor parallelism", style, list(STYLES)))
        matches = [name for name in modules if fnmatchcase(names[name], pattern) or fnmatchcase(name, pattern)]
        if not matches and config.plan is not None:
            raise _no_match(pattern, names, modules)
        for name in matches:
            chosen.setdefault(name, style)
    if not chosen:
        raise _no_plan(model, names, modules)
    if config.loss_parallel:
        _keep_logits_split(model, modules, chosen)
    chosen = adapters.with_adapters(chosen, modules)
    _check_kinds(chosen, modules)
    _check_sizes(model, chosen, modules, size)
    return chosen


def _patterns(model: nn.Module, config: TorchTensorParallelConfig, names: Mapping[str, str]) -> Mapping[str, str]:
    if config.plan is not None:
        return config.plan
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    if config.sequence_parallel and kind in _OF_SEQUENCES and _FIRST_BLOCK in names.values():
        return _SEQUENCES
    if config.sequence_parallel:
        _logger.warning_once(
            "sequence_parallel=True has no effect on %s: norms stay whole on each rank. Kinds of models with parts of "
            "sequences: %s, with a module named %s.",
            type(model).__name__,
            ", ".join(_OF_SEQUENCES),
            _FIRST_BLOCK,
        )
    known = _PLANS.get(kind, {})
    return _with_experts(getattr(model, "tp_plan", None) or {}) or known


def has_own_plan(model: nn.Module, config: TorchTensorParallelConfig) -> bool:
    """Whether a model of transformers is split by its own plan, which fits it without any change."""
    return config.plan is None and bool(getattr(model, "tp_plan", None))


def require_experts(model: nn.Module, size: int, option: str) -> None:
    """Raise unless the plan of a model spreads experts over this many ranks.

    Args:
        model: The whole model.
        size: The number of ranks.
        option: The option that asks for it.

    Raises:
        ConfigurationError: If the plan has no experts.
    """
    if "experts" not in resolve(model, TorchTensorParallelConfig(), size).values():
        raise ConfigurationError(
            f"{option} spreads experts over ranks, and {type(model).__name__} has none that a plan of transformers "
            "names. Leave it out."
        )


def _with_experts(plan: Mapping[str, str]) -> Mapping[str, str]:
    """Return a plan of transformers whose experts are spread as a whole, not each of them split."""
    experts = [pattern for pattern, style in plan.items() if style in _EXPERTS]
    return {
        pattern: "experts" if pattern in experts else style
        for pattern, style in plan.items()
        if not any(pattern.startswith(f"{module}.") for module in experts)
    }


def _keep_logits_split(model: nn.Module, modules: Mapping[str, nn.Module], chosen: dict[str, str]) -> None:
    """Give the head the style whose output stays split, unless a module has it."""
    if "colwise_loss_parallel" in chosen.values():
        return
    head = getattr(model, "get_output_embeddings", lambda: None)()
    name = next((name for name, module in modules.items() if module is head and name in chosen), None)
    if name is None:
        raise ConfigurationError(
            "loss_parallel=True needs to know which module computes the logits. Give it the style "
            "'colwise_loss_parallel' in the plan."
        )
    chosen[name] = "colwise_loss_parallel"


def _check_kinds(chosen: Mapping[str, str], modules: Mapping[str, nn.Module]) -> None:
    for name, style in chosen.items():
        if style == "experts":
            if experts.count_of(modules[name]) is None:
                raise ConfigurationError(
                    f"The plan gives {name} the style 'experts', and a {type(modules[name]).__name__} has no experts "
                    "to spread: they are modules with num_experts, weights stacked by expert, and a forward of hidden "
                    "states, indices and weights of experts."
                )
        elif STYLES[style].splits is not None and not is_matrix(modules[name]):
            raise ConfigurationError(
                f"The plan gives {name} the style {style!r}, and a {type(modules[name]).__name__} has no matrix to "
                "split. Name linear layers and embeddings; normalization layers can be 'sequence_parallel'."
            )
        if style.startswith("embedding") and not isinstance(modules[name], nn.Embedding):
            raise ConfigurationError(
                f"The plan gives {name} the style {style!r}, and it is a {type(modules[name]).__name__}. Use "
                f"{style.removeprefix('embedding_')!r}."
            )


def _check_sizes(model: nn.Module, chosen: Mapping[str, str], modules: Mapping[str, nn.Module], size: int) -> None:
    """Raise if a number that ranks split does not divide by their number."""
    sizes = _split_features(chosen, modules) | _split_heads(model, chosen, modules, size)
    config: Any = getattr(model, "config", None)
    if config is not None and "colwise_loss_parallel" in chosen.values():
        sizes["vocab_size"] = config.vocab_size
    wrong = {name: count for name, count in sizes.items() if count % size}
    if wrong:
        name, count = min(wrong.items(), key=lambda item: item[1])
        fitting = [other for other in range(1, max(sizes.values()) + 1) if not any(n % other for n in sizes.values())]
        nearest = min(fitting, key=lambda other: abs(other - size))
        raise ConfigurationError(
            f"tp_size={size} does not divide the {count} {name}{_and_more(len(wrong) - 1)}. The nearest tp_size that "
            f"fits this model is {nearest}; it fits {', '.join(map(str, fitting))}."
        )


def _split_features(chosen: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the number of experts, inputs or outputs of each module that ranks split, by what errors call them."""
    sizes: dict[str, int] = {}
    for name, style_name in chosen.items():
        module, style = modules[name], style_of(style_name, modules[name])
        if style_name == "experts":
            sizes[f"experts of {name}"] = experts.count_of(module) or 0
        elif style.splits is not None and SPLIT in (style.takes, style.gives):
            inputs, outputs = features(module)
            side, count = ("inputs", inputs) if style.takes == SPLIT else ("outputs", outputs)
            sizes[f"{side} of {name}"] = count
    return sizes


def _split_heads(
    model: nn.Module, chosen: Mapping[str, str], modules: Mapping[str, nn.Module], size: int
) -> dict[str, int]:
    """Return the numbers of attention heads that ranks split, by the option or attribute that holds them."""
    sizes: dict[str, int] = {}
    config: Any = getattr(model, "config", None)
    split = [name for name, style in chosen.items() if style == "colwise"]
    if any("att" in name for name in split):
        for option in ("num_attention_heads", "num_key_value_heads"):
            if isinstance(count := getattr(config, option, None), int):
                sizes[option] = count
    if not hasattr(config, "num_attention_heads"):
        heads = {name: found for name in split if (found := heads_of(modules, name)) is not None}
        # A script may have divided the attribute by the number of ranks already.
        divided = {heads[name][0] for name in heads if is_divided_by_script(modules, name, heads[name][1], size)}
        sizes |= {attribute: count for attribute, count in heads.values() if attribute not in divided}
    return sizes


def _and_more(count: int) -> str:
    return f" (nor {count} other numbers)" if count else ""


def _no_match(pattern: str, names: Mapping[str, str], modules: Mapping[str, nn.Module]) -> ConfigurationError:
    candidates = _candidates(names, modules)
    near = get_close_matches(pattern, candidates, n=_SHOWN, cutoff=0.4) or candidates[:_SHOWN]
    return ConfigurationError(
        f"The pattern {pattern!r} of the plan matches none of the {len(modules)} modules. Modules with a matrix: "
        f"{', '.join(near)}. A pattern matches a whole name: use * for any characters."
    )


def _no_plan(model: nn.Module, names: Mapping[str, str], modules: Mapping[str, nn.Module]) -> ConfigurationError:
    return ConfigurationError(
        f"{type(model).__name__} has no plan of tensor parallelism. Give one: ParallelismConfig(tp_size=…, "
        "tp_handler=TorchTensorParallelConfig(plan={'*.up': 'colwise', '*.down': 'rowwise'})). Modules with a matrix: "
        f"{', '.join(_candidates(names, modules)[:_SHOWN])}. Styles: {', '.join(STYLES)}."
    )


def _candidates(names: Mapping[str, str], modules: Mapping[str, nn.Module]) -> Sequence[str]:
    """Return the names of modules with a matrix, with * for the numbers of layers."""
    matrices = [names[name] for name, module in adapters.without_inner(modules).items() if is_matrix(module)]
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in matrices))
