"""Converting weights between checkpoints of Megatron-LM and folders of transformers."""

import json
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from trainer_lib.checkpointing.format.layout import state_folder
from trainer_lib.checkpointing.third_party.megatron_lm.distributed import read_distributed
from trainer_lib.checkpointing.third_party.megatron_lm.models import (
    KINDS,
    Kind,
    Shape,
    Weights,
    check_kind,
    from_megatron,
    to_megatron,
    with_norms_apart,
    with_norms_fused,
)
from trainer_lib.checkpointing.third_party.megatron_lm.pieces import (
    FILE,
    TRACKER,
    cut_into_stages,
    is_distributed,
    iteration_folder,
    read_pieces,
    split,
)
from trainer_lib.filesystem.checksums import ChecksummedFile
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, UnsupportedError, UnwritableError
from trainer_lib.tensor_files.weights_index import read_weights, weight_files

_DIVISOR = 128  # Megatron-LM pads vocabularies to a multiple of it on each rank
_WORDS, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# Arguments that change what a model computes, and the values that transformers' models of these kinds compute with.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_rope_scaling": (None, False),
    "rotary_percent": (None, 1),
    "rotary_interleaved": (None, False),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "apply_layernorm_1p": (None, False),
    "squared_relu": (None, False),
    "window_size": (None, (-1, -1), [-1, -1]),
}
_ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "megatron-bert": "MegatronBertForMaskedLM"}


@dataclass
class Layout:
    """How a checkpoint of Megatron-LM is cut.

    Attributes:
        tensor: The tensor parallel ranks.
        pipeline: The pipeline parallel ranks.
        has_fused_norms: Whether norms are parts of the layers after them, as with Transformer Engine.
        divisor: The vocabulary of each rank is padded to a multiple of it.
    """

    tensor: int = 1
    pipeline: int = 1
    has_fused_norms: bool = True
    divisor: int = _DIVISOR


def is_megatron(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Megatron-LM, or a folder of them."""
    return folder.is_dir() and iteration_folder(folder) is not None


def to_transformers(
    source: Path, target: str | Path, vocab_size: int | None = None, max_shard_size: int | str = "10GB"
) -> dict[str, str]:  # fmt: skip
    """Convert a checkpoint of Megatron-LM into a folder that `from_pretrained` reads; return what was left out.

    Args:
        source: The checkpoint, or the folder of checkpoints with the newest.
        target: The folder to create.
        vocab_size: The size of the vocabulary without padding; `None`: the one of the checkpoint's arguments, or with
            padding.
        max_shard_size: The size of one file of weights in bytes, or a string such as "10GB".

    Raises:
        CheckpointError: If a piece is missing or damaged, or its pickle holds more than tensors and plain values.
        UnsupportedError: If the model is of another kind.
    """
    folder = _new_folder(target)
    pieces = iteration_folder(source)
    if pieces is None:
        raise CheckpointError(
            f"{source} is no checkpoint of Megatron-LM: it has no {TRACKER}, no mp_rank_* folders and no shards."
        )
    weights, arguments, _ = read_distributed(pieces) if is_distributed(pieces) else read_pieces(pieces)
    _check_arguments(pieces, arguments, weights, vocab_size)
    left_out = {"optimizer, schedule, generators": "only weights are converted"}
    known = vocab_size or arguments.get("vocab_size")
    if known is None:
        left_out["vocab_size"] = "unknown: the vocabulary keeps its padding. To cut it off, give --vocab-size"
    config = _config_of(arguments, weights, known)
    kind = check_kind(config["model_type"])
    weights = with_norms_apart(weights, kind.stack)
    if config.get("tie_word_embeddings", True):
        weights.pop(_OUTPUT, None)
    weights = {name: _of_vocabulary(name, weight, known) for name, weight in weights.items()}
    try:
        converted = from_megatron(kind, _shape_of(arguments), weights)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{pieces} is damaged: its weights do not fit its arguments: {error}") from error
    with _complete(folder) as partial:
        for name, content in weight_files(converted, max_shard_size).items():
            content.write(partial / name)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return left_out


def from_transformers(source: Path, target: str | Path, layout: Layout) -> list[str]:
    """Convert a folder of transformers into a checkpoint that Megatron-LM loads; return the files.

    Args:
        source: The folder, with weights and a config.json.
        target: The folder of checkpoints to create.
        layout: How the checkpoint is cut.

    Raises:
        CheckpointError: If there are no weights, or no configuration.
        UnsupportedError: If the model is of another kind, or cannot be cut like this.
    """
    folder = _new_folder(target)
    config = _read_config(source)
    kind = check_kind(config.get("model_type"))
    arguments = _arguments_of(config, kind, layout)
    weights = to_megatron(kind, _shape_of(arguments), read_weights(source))
    is_tied = not arguments["untie_embeddings_and_output_weights"]
    if is_tied:
        weights.pop(_OUTPUT, None)
    size = arguments["padded_vocab_size"]
    weights = {name: _padded(name, weight, size) for name, weight in weights.items()}
    if layout.has_fused_norms:
        weights = with_norms_fused(weights, kind.stack)
    stages = cut_into_stages(weights, kind.stack, arguments["num_layers"], layout.pipeline, is_tied)
    with _complete(folder) as partial:
        files = [
            name for stage, part in enumerate(stages) for name in _write_stage(partial, part, stage, arguments, layout)
        ]
        (partial / TRACKER).write_text("release")
    return [*files, TRACKER]


def _write_stage(
    folder: Path, weights: Weights, stage: int, arguments: dict[str, Any], layout: Layout
) -> Iterator[str]:  # fmt: skip
    """Write the pieces of a stage, and yield the names of the files."""
    ranks = {name: split(name, weight, layout.tensor, arguments["swiglu"]) for name, weight in weights.items()}
    for rank in range(layout.tensor):
        name = f"mp_rank_{rank:02d}" if layout.pipeline == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
        path = folder / "release" / name / FILE
        path.parent.mkdir(parents=True)
        state = {"args": Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 0}
        with ChecksummedFile(path) as file:  # not for its checksum: its errors have the reason
            torch.save({**state, "model": {key: parts[rank].clone() for key, parts in ranks.items()}}, cast(Any, file))
        yield f"release/{name}/{FILE}"


@contextmanager
def _complete(folder: Path) -> Generator[Path]:
    """Yield a folder that gets the name of `folder` once it is complete."""
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        partial = temporary / folder.name  # with the usual permissions, which mkdtemp does not give
        partial.mkdir()
        yield partial
        partial.rename(folder)
    except OSError as error:
        raise UnwritableError(f"{folder} could not be written: {error}.") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _new_folder(target: str | Path) -> Path:
    folder = state_folder(target)
    if not isinstance(folder, Path):
        raise ConfigurationError(f"{folder} is a URL. Convert to a folder on this machine, and copy that to the URL.")
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already. Give a folder that does not exist.")
    return folder


def _read_config(source: Path) -> dict[str, Any]:
    try:
        return json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{source} has no config.json that can be read ({error}). Give a folder that save_pretrained wrote."
        ) from error


def _check_arguments(
    folder: Path, arguments: Mapping[str, Any], weights: Mapping[str, Tensor], vocab_size: int | None
) -> None:  # fmt: skip
    """Raise if arguments are missing, or change what the model computes."""
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if arguments.get(name) is None]
    if missing or _WORDS not in weights:
        raise CheckpointError(
            f"{folder} is no checkpoint of a language model of Megatron-LM: it lacks {', '.join(missing or [_WORDS])}."
        )
    for name, plain in _PLAIN.items():
        if arguments.get(name) not in plain:
            raise UnsupportedError(
                f"{folder} was trained with {name}={arguments[name]!r}, which changes what the model computes, and has "
                f"no counterpart in the models of transformers that are written. Only {name}={plain[-1]!r} is "
                "converted."
            )
    padded = len(weights[_WORDS])
    if vocab_size is not None and vocab_size > padded:
        raise ConfigurationError(
            f"vocab_size must be at most {padded}, the padded size of the checkpoint (got {vocab_size})."
        )


def _shape_of(arguments: Mapping[str, Any]) -> Shape:
    heads = int(arguments["num_attention_heads"])
    groups = int(arguments.get("num_query_groups") or heads) if arguments.get("group_query_attention") else heads
    size = int(arguments.get("kv_channels") or arguments["hidden_size"] // heads)
    return Shape(int(arguments["num_layers"]), heads, groups, size, bool(arguments.get("swiglu")))


def _arguments_of(config: Mapping[str, Any], kind: Kind, layout: Layout) -> dict[str, Any]:
    """Return Megatron-LM's arguments for a model of transformers."""
    get = config.get
    heads = get("n_head") or config["num_attention_heads"]
    groups = get("num_key_value_heads") or heads
    hidden, vocabulary = get("n_embd") or config["hidden_size"], config["vocab_size"]
    multiple = layout.divisor * layout.tensor
    if groups % layout.tensor:
        raise UnsupportedError(f"{groups} heads of keys cannot be cut into {layout.tensor} parts.")
    is_llama = kind.name == "llama"
    positions = get("n_positions") or get("max_position_embeddings") or 0
    rope: Mapping[str, Any] = get("rope_parameters") or get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UnsupportedError(f"rope_parameters={dict(rope)} have no counterpart: only plain rotary embeddings have.")
    _check_attention(config)
    return {
        "num_layers": get("n_layer") or config["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": get("n_inner") or get("intermediate_size") or 4 * hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": get("head_dim") or hidden // heads,
        "max_position_embeddings": positions,
        "seq_length": positions,
        "vocab_size": vocabulary,
        "padded_vocab_size": -(-vocabulary // multiple) * multiple,
        "make_vocab_size_divisible_by": layout.divisor,
        "position_embedding_type": "rope" if is_llama else "learned_absolute",
        "rotary_base": int(rope.get("rope_theta") or get("rope_theta") or 10000),
        "swiglu": is_llama,
        "normalization": "RMSNorm" if is_llama else "LayerNorm",
        "norm_epsilon": get("layer_norm_epsilon") or get("rms_norm_eps") or get("layer_norm_eps") or 1e-5,
        "untie_embeddings_and_output_weights": is_llama and not get("tie_word_embeddings", False),
        "add_bias_linear": not is_llama,
        "add_qkv_bias": not is_llama or get("model_type") == "qwen2",
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "bert_binary_head": False,
    }


def _check_attention(config: Mapping[str, Any]) -> None:
    """Raise if attention has a window, or biases that Megatron-LM's arguments cannot name."""
    window, positions = config.get("sliding_window"), config.get("max_position_embeddings") or 0
    if window is not None and window < positions and config.get("use_sliding_window", True):
        raise UnsupportedError(
            f"sliding_window={window} has no counterpart: it hides tokens, with max_position_embeddings={positions}. "
            f"If your sequences are not longer than the window, set max_position_embeddings={window} in config.json."
        )
    if config.get("attention_bias"):
        raise UnsupportedError(
            "attention_bias=True has no counterpart: in Megatron-LM, add_bias_linear=True gives biases to the "
            "feed-forward network too."
        )


def _config_of(arguments: Mapping[str, Any], weights: Mapping[str, Tensor], vocab_size: int | None) -> dict[str, Any]:
    """Return the configuration of transformers for a checkpoint's arguments and weights."""
    get, shape = arguments.get, _shape_of(arguments)
    size, epsilon = vocab_size or len(weights[_WORDS]), get("norm_epsilon") or get("layernorm_epsilon") or 1e-5
    common: dict[str, Any] = {"vocab_size": size, "dtype": str(weights[_WORDS].dtype).removeprefix("torch.")}
    positions, inner = get("max_position_embeddings") or get("seq_length"), get("ffn_hidden_size")
    if any(name.startswith("encoder.") for name in weights):
        kind = "megatron-bert"
        common |= {"max_position_embeddings": positions, "layer_norm_eps": epsilon, **_sizes(arguments, inner)}
    elif get("swiglu") and get("normalization") == "RMSNorm":
        has_bias = any(name.endswith("linear_qkv.bias") for name in weights)
        kind = "qwen2" if has_bias else "llama"
        common |= {
            "max_position_embeddings": positions,
            "rms_norm_eps": epsilon,
            "num_key_value_heads": shape.groups,
            "head_dim": shape.head_size,
            "rope_theta": float(get("rotary_base") or 10000),
            "tie_word_embeddings": not get("untie_embeddings_and_output_weights", False),
            **_sizes(arguments, inner),
        }
    elif "embedding.position_embeddings.weight" in weights and shape.groups == shape.heads:
        kind = "gpt2"
        common |= {
            "n_embd": arguments["hidden_size"], "n_layer": shape.layers, "n_head": shape.heads, "n_inner": inner,
            "n_positions": positions, "layer_norm_epsilon": epsilon,
            "tie_word_embeddings": not get("untie_embeddings_and_output_weights", False),
        }  # fmt: skip
    else:
        raise UnsupportedError(
            "This checkpoint is no model of a known kind: GPT-2 has learned positions, Llama SwiGLU and RMSNorm, BERT "
            f"an encoder. It has position_embedding_type={get('position_embedding_type')!r}, swiglu={get('swiglu')!r}, "
            f"normalization={get('normalization')!r}. Known kinds: {', '.join(KINDS)}."
        )
    name = "Qwen2ForCausalLM" if kind == "qwen2" else _ARCHITECTURES[kind]
    if "binary_head.weight" in weights:
        name = "MegatronBertForPreTraining"
    return {"model_type": kind, "architectures": [name], **common}


def _sizes(arguments: Mapping[str, Any], inner: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads")
    return {"num_hidden_layers": arguments["num_layers"], "intermediate_size": inner} | {
        name: arguments[name] for name in names
    }


def _of_vocabulary(name: str, weight: Tensor, size: int | None) -> Tensor:
    is_of_words = name in (_WORDS, _OUTPUT, "output_layer.bias")
    return weight[:size].contiguous() if is_of_words and size is not None else weight


def _padded(name: str, weight: Tensor, size: int) -> Tensor:
    if name not in (_WORDS, _OUTPUT, "output_layer.bias"):
        return weight
    missing = size - len(weight)
    return functional.pad(weight, (0, 0) * (weight.ndim - 1) + (0, missing))
