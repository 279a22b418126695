"""Checkpoints of Megatron-LM: to transformers and back, bit by bit, and what each weight computes."""

import enum
import json
import os
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.strategies.split import VOCABULARY, gpt2, llama, model_of
from trainer_lib.checkpointing.third_party.megatron_lm.models import Shape, grouped, ungrouped
from trainer_lib.checkpointing.third_party.megatron_lm.pieces import FILE, read_pieces, split
from trainer_lib.checkpointing.third_party.megatron_lm.weight_conversion import (
    Layout,
    from_transformers,
    to_transformers,
)
from trainer_lib.commands.main import main
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, UnsupportedError

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
TOKENS = torch.arange(12).reshape(2, 6)


def megatron_bert() -> nn.Module:
    from transformers import MegatronBertConfig, MegatronBertForPreTraining

    return MegatronBertForPreTraining(MegatronBertConfig(**SMALL))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, **SMALL))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: gpt2(layers=4),
    "llama": llama,
    "qwen2": qwen2,
    "megatron-bert": megatron_bert,
}


def saved(model: Any, folder: Path) -> Path:
    for parameter in model.parameters():  # norms and biases too
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("tensor", "pipeline", "fused"), [(1, 1, False), (2, 2, True)])
@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_bit_by_bit(name: str, tensor: int, pipeline: int, fused: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForPreTraining

    model: Any = model_of(MODELS[name]).eval()
    source = saved(model, tmp_path / "source")
    files = from_transformers(source, tmp_path / "megatron", Layout(tensor, pipeline, fused))
    assert len(files) == tensor * pipeline + 1
    left_out = to_transformers(tmp_path / "megatron", tmp_path / "back")
    assert list(left_out) == ["optimizer, schedule, generators"]
    kind: Any = AutoModelForPreTraining if "bert" in name else AutoModelForCausalLM
    back = kind.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(model)
    other = back.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(other[key], value), key
    for mine, theirs in zip(model(TOKENS).to_tuple()[:2], back(TOKENS).to_tuple()[:2], strict=True):
        if isinstance(mine, Tensor):
            assert torch.equal(mine, theirs)


def test_pieces_are_cut_and_named_as_megatron_lm_does(tmp_path: Path) -> None:
    model: Any = model_of(llama)
    from_transformers(saved(model, tmp_path / "source"), tmp_path / "megatron", Layout(2, 2))
    pieces = {
        place: torch.load(tmp_path / "megatron" / "release" / f"mp_rank_{place}" / FILE, weights_only=False)["model"]
        for place in ("00_000", "01_000", "00_001", "01_001")
    }
    assert sorted(pieces["00_000"]) == [
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "embedding.word_embeddings.weight",
    ]
    assert sorted(set(pieces["00_001"]) - set(pieces["00_000"])) == [
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    last = model.model.layers[1]
    first, second = (pieces[place]["decoder.layers.0.mlp.linear_fc1.weight"] for place in ("00_001", "01_001"))
    half = last.mlp.gate_proj.weight.shape[0] // 2
    assert torch.equal(first, torch.cat([last.mlp.gate_proj.weight[:half], last.mlp.up_proj.weight[:half]]))
    assert torch.equal(second, torch.cat([last.mlp.gate_proj.weight[half:], last.mlp.up_proj.weight[half:]]))
    # A rank has one group: two heads of queries, then their keys, then their values; a head has 8 rows.
    attention, qkv = last.self_attn, pieces["01_001"]["decoder.layers.0.self_attention.linear_qkv.weight"]
    expected = [attention.q_proj.weight[16:], attention.k_proj.weight[8:], attention.v_proj.weight[8:]]
    assert torch.equal(qkv, torch.cat(expected))
    assert len(pieces["00_000"]["embedding.word_embeddings.weight"]) == 128  # of 256, padded from 64


def layer_of_megatron(x: Tensor, weights: dict[str, Tensor], heads: int) -> Tensor:
    """Compute a layer of GPT as Megatron-LM's classes do, from the weights of one rank."""
    size = x.shape[-1]
    hidden = functional.layer_norm(x, (size,), weights["input_layernorm.weight"], weights["input_layernorm.bias"])
    mixed = functional.linear(
        hidden, weights["self_attention.linear_qkv.weight"], weights["self_attention.linear_qkv.bias"]
    )
    mixed = mixed.view(*x.shape[:2], heads, 3 * (size // heads))  # of each head: query, key, value
    query, key, value = (part.transpose(1, 2) for part in mixed.chunk(3, dim=-1))
    context = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
    x = x + functional.linear(
        context, weights["self_attention.linear_proj.weight"], weights["self_attention.linear_proj.bias"]
    )
    hidden = functional.layer_norm(x, (size,), weights["pre_mlp_layernorm.weight"], weights["pre_mlp_layernorm.bias"])
    hidden = functional.linear(hidden, weights["mlp.linear_fc1.weight"], weights["mlp.linear_fc1.bias"])
    hidden = functional.gelu(hidden, approximate="tanh")
    return x + functional.linear(hidden, weights["mlp.linear_fc2.weight"], weights["mlp.linear_fc2.bias"])


def test_a_layer_computed_as_megatron_lm_does_gives_the_outputs_of_transformers(tmp_path: Path) -> None:
    model: Any = model_of(gpt2).eval()
    from_transformers(saved(model, tmp_path / "source"), tmp_path / "megatron", Layout(has_fused_norms=False))
    whole = read_pieces(tmp_path / "megatron" / "release")[0]
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    layer = {name.removeprefix("decoder.layers.1."): value for name, value in whole.items() if ".layers.1." in name}
    expected = model.transformer.h[1](x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(layer_of_megatron(x, layer, heads=4), expected, rtol=1e-5, atol=1e-5)


def test_heads_are_put_together_by_group() -> None:
    shape = Shape(layers=1, heads=4, groups=2, head_size=1)
    joined = grouped(torch.arange(4), torch.arange(10, 12), torch.arange(20, 22), shape)
    assert joined.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [part.tolist() for part in ungrouped(joined, shape)] == [[0, 1, 2, 3], [10, 11], [20, 21]]


def test_chunks_of_interleaved_stages_are_put_in_order(tmp_path: Path) -> None:
    source = saved(model_of(lambda: gpt2(layers=4)), tmp_path / "source")
    from_transformers(source, tmp_path / "four", Layout(pipeline=4))
    parts = [
        torch.load(tmp_path / "four" / "release" / f"mp_rank_00_{stage:03d}" / FILE, weights_only=False)
        for stage in range(4)
    ]
    for stage in range(2):  # two stages of two chunks: the first and third layer, the second and fourth
        path = tmp_path / "two" / "iter_0000007" / f"mp_rank_00_{stage:03d}" / FILE
        path.parent.mkdir(parents=True)
        first, second = parts[stage], parts[stage + 2]
        names = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
        args = Namespace(**{**vars(first["args"]), **names})
        chunks = {"model0": first["model"], "model1": second["model"]}
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 7, **chunks}, path)
    (tmp_path / "two" / "latest_checkpointed_iteration.txt").write_text("7")
    whole, _, iteration = read_pieces(tmp_path / "two" / "iter_0000007")
    expected = read_pieces(tmp_path / "four" / "release")[0]
    assert iteration == 7
    assert set(whole) == set(expected)
    assert all(torch.equal(whole[name], value) for name, value in expected.items())
    assert main(["checkpoint", "convert", str(tmp_path / "two"), str(tmp_path / "back")]) == 0


def damaged(folder: Path, **entries: Any) -> Path:
    path = folder / "release" / "mp_rank_00" / FILE
    torch.save({**torch.load(path, weights_only=False), **entries}, path)
    return folder


class Harmful:
    def __reduce__(self) -> Any:
        return os.unlink, ("none",)


def test_settings_of_megatron_lm_are_read_and_other_classes_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(model_of(gpt2), tmp_path / "source")
    from_transformers(source, tmp_path / "megatron", Layout())
    with monkeypatch.context() as patched:  # settings that only Megatron-LM can import
        module: Any = types.ModuleType("megatron.core.enums")
        for name in ("megatron", "megatron.core"):
            patched.setitem(sys.modules, name, types.ModuleType(name))
        patched.setitem(sys.modules, "megatron.core.enums", module)
        names = {"__module__": module.__name__, "__qualname__": "ModelType"}
        module.ModelType = type("ModelType", (), names)
        module.Kind = enum.Enum("Kind", ["gpt"], module=module.__name__)
        others: Any = {"model_type": module.ModelType(), "kind": module.Kind.gpt}
        damaged(tmp_path / "megatron", rng_state=[{"np_rng_state": np.random.RandomState(0).get_state()}], **others)
    assert len(read_pieces(tmp_path / "megatron" / "release")[0]) > 10
    path = tmp_path / "megatron" / "release" / "mp_rank_00" / FILE
    torch.save({"args": Namespace(), "model": {}, "other": Harmful()}, path)
    with pytest.raises(CheckpointError, match=r"is refused, and no code in it was run.*unlink"):
        read_pieces(tmp_path / "megatron" / "release")


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    source = saved(model_of(gpt2), tmp_path / "source")
    with pytest.raises(UnsupportedError, match="4 heads of keys cannot be cut into 3 parts"):
        from_transformers(source, tmp_path / "three", Layout(tensor=3))
    with pytest.raises(UnsupportedError, match="2 layers cannot be cut into 4 stages"):
        from_transformers(source, tmp_path / "four", Layout(pipeline=4))
    assert not (tmp_path / "four").exists()
    from_transformers(source, tmp_path / "megatron", Layout(tensor=2))
    with pytest.raises(ConfigurationError, match="megatron exists already"):
        from_transformers(source, tmp_path / "megatron", Layout())
    piece = tmp_path / "megatron" / "release" / "mp_rank_01" / FILE
    piece.rename(piece.with_name("other"))
    with pytest.raises(CheckpointError, match=r"mp_rank_01.*cannot be read"):
        to_transformers(tmp_path / "megatron", tmp_path / "back")
    piece.with_name("other").unlink()
    piece.parent.rmdir()
    with pytest.raises(CheckpointError, match="lacks pieces: it has 1, of 2 tensor and 1 pipeline"):
        to_transformers(tmp_path / "megatron", tmp_path / "back")
    from_transformers(source, tmp_path / "one", Layout())
    with pytest.raises(UnsupportedError, match=r"has checkpoint_version 2\.0"):
        to_transformers(damaged(tmp_path / "one", checkpoint_version=2.0), tmp_path / "back")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(UnsupportedError, match=r"no mp_rank_\* folders"):
        to_transformers(tmp_path / "dist", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_the_command_converts_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(model_of(llama), tmp_path / "source")
    there = ["checkpoint", "convert", str(source), str(tmp_path / "megatron"), "--to", "megatron"]
    assert main([*there, "--tensor-parallel", "2", "--transformer-impl", "local"]) == 0
    assert "mp_rank_01" in capsys.readouterr().out
    assert (
        main(["checkpoint", "convert", str(tmp_path / "megatron"), str(tmp_path / "back"), "--vocab-size", "60"]) == 0
    )
    assert "without optimizer, schedule, generators: only weights are converted" in capsys.readouterr().out
    from transformers import LlamaForCausalLM

    back = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert back.config.vocab_size == 60
    assert (
        main(
            ["checkpoint", "convert", str(source), str(tmp_path / "x"), "--to", "accelerate", "--tensor-parallel", "2"]
        )
        == 2
    )
    assert "--tensor-parallel needs --to megatron" in capsys.readouterr().err


@pytest.fixture(scope="module")
def llama_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of transformers, and the same of Megatron-LM."""
    folder = tmp_path_factory.mktemp("llama")
    source = saved(model_of(llama), folder / "source")
    from_transformers(source, folder / "megatron", Layout())
    return source, folder / "megatron"


def changed_piece(folders: tuple[Path, Path], folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy the checkpoint of Megatron-LM with a change of its piece."""
    state = torch.load(folders[1] / "release" / "mp_rank_00" / FILE, weights_only=False)
    change(state)
    path = folder / "mp_rank_00" / FILE
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_rope_scaling", True),
        ("rotary_percent", 0.5),
        ("rotary_interleaved", True),
        ("rotary_seq_len_interpolation_factor", 4),
        ("apply_layernorm_1p", True),
        ("squared_relu", True),
        ("window_size", (127, 0)),
    ],
)
def test_arguments_that_change_the_model_are_refused(
    name: str, value: Any, llama_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    def change(state: dict[str, Any]) -> None:
        vars(state["args"])[name] = value

    source = changed_piece(llama_folders, tmp_path / "changed", change)
    with pytest.raises(
        UnsupportedError, match=f"trained with {name}={value!r}".replace("(", r"\(").replace(")", r"\)")
    ):
        to_transformers(source, tmp_path / "back")


def test_plain_arguments_are_converted(llama_folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain = {"use_rope_scaling": False, "rotary_percent": 1.0, "squared_relu": False, "window_size": None}
    source = changed_piece(llama_folders, tmp_path / "plain", lambda state: vars(state["args"]).update(plain))
    (tmp_path / "back.partial").mkdir()
    (tmp_path / "back.partial" / "mine").touch()
    to_transformers(source, tmp_path / "back", max_shard_size="20KB")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert (tmp_path / "back.partial" / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "back.partial", "plain"]
    assert (tmp_path / "back").stat().st_mode == tmp_path.joinpath("plain").stat().st_mode


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window=8 has no counterpart"),
        ({"attention_bias": True}, "attention_bias=True has no counterpart"),
    ],
)
def test_attention_without_a_counterpart_is_refused(
    settings: dict[str, Any], message: str, llama_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    config = json.loads((llama_folders[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    (tmp_path / "model.safetensors").symlink_to(llama_folders[0] / "model.safetensors")
    with pytest.raises(UnsupportedError, match=message):
        from_transformers(tmp_path, tmp_path / "megatron", Layout())


def test_more_than_ten_chunks_are_in_the_order_of_their_numbers(
    llama_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    def change(state: dict[str, Any]) -> None:
        state.pop("model")
        for index in range(12):
            state[f"model{index}"] = {"decoder.layers.0.input_layernorm.weight": torch.tensor([float(index)])}

    weights = read_pieces(changed_piece(llama_folders, tmp_path, change))[0]
    assert [weights[f"decoder.layers.{index}.input_layernorm.weight"].item() for index in range(12)] == list(range(12))


def test_a_gate_is_cut_by_both_halves() -> None:
    weight = torch.zeros(6, 2)  # three rows of the gate, and three of the rest
    with pytest.raises(UnsupportedError, match="cannot be cut into 4 parts"):
        split("decoder.layers.0.mlp.linear_fc1.weight", weight, 2, is_gated=True)


def cut_off(state: dict[str, Any]) -> None:
    state["model"] = {name: value for name, value in state["model"].items() if "linear_fc1" not in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(args={}), "is no piece of a checkpoint"),
        (lambda state: state.update(args=Namespace()), "lacks num_layers, hidden_size"),
        (lambda state: state.update(model=3), "is no piece of a checkpoint"),
        (lambda state: state.update(checkpoint_version="new"), "checkpoint_version must be a number"),
        (cut_off, "weights do not fit its arguments"),
    ],
)
def test_foreign_and_damaged_pieces_are_named(
    change: Any, message: str, llama_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        to_transformers(changed_piece(llama_folders, tmp_path / "changed", change), tmp_path / "back")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello", b"\x80\x02]q\x00(K", b"\x80\x04\x95"])
def test_files_that_are_no_pickles_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00" / FILE
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="mp_rank_00"):
        to_transformers(tmp_path, tmp_path / "back")


def test_a_tracker_without_an_iteration_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("latest")
    with pytest.raises(CheckpointError, match="must hold an iteration, or release"):
        to_transformers(tmp_path, tmp_path / "back")


def test_parts_of_ranks_that_do_not_fit_are_named(llama_folders: tuple[Path, Path], tmp_path: Path) -> None:
    from_transformers(llama_folders[0], tmp_path / "megatron", Layout(tensor=2))
    path = tmp_path / "megatron" / "release" / "mp_rank_01" / FILE
    state = torch.load(path, weights_only=False)
    state["model"].pop("output_layer.weight")
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="not all tensor parallel ranks have output_layer"):
        to_transformers(tmp_path / "megatron", tmp_path / "back")


def test_files_of_gpt2_without_a_prefix_and_with_masks_are_converted(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = saved(model_of(gpt2), tmp_path / "source")
    path = source / "model.safetensors"
    weights = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    from_transformers(source, tmp_path / "expected", Layout())
    save_file({**weights, **masks}, path)
    from_transformers(source, tmp_path / "megatron", Layout())
    expected, converted = (read_pieces(tmp_path / name / "release")[0] for name in ("expected", "megatron"))
    assert set(converted) == set(expected)
    assert all(torch.equal(converted[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "1"], "--epochs has no effect with a checkpoint of Megatron-LM"),
        (["--without", "optimizer"], "--without has no effect with a checkpoint of Megatron-LM"),
        (["--to", "megatron", "--overwrite"], "--overwrite has no effect with --to megatron"),
        (["--to", "megatron", "--allow-pickle"], "--allow-pickle has no effect with --to megatron"),
        (["--to", "megatron", "--max-shard-size", "1GB"], "--max-shard-size has no effect with --to"),
        (["--to", "accelerate", "--max-shard-size", "1GB"], "--max-shard-size has no effect with --to"),
        (["--vocab-size", "1000"], "vocab_size must be at most 128"),
        (["--to", "megatrom"], "Known: accelerate, megatron, transformers"),
    ],
)
def test_options_without_effect_are_refused(
    options: list[str],
    message: str,
    llama_folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = llama_folders["--to" not in options]
    assert main(["checkpoint", "convert", str(source), str(tmp_path / "target"), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--tensor-parallel", "--pipeline-parallel", "--vocab-size"])
def test_counts_are_at_least_one(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "target"), name, "0"]) == 2
    assert "a whole number of at least 1 (got '0')" in capsys.readouterr().err
