"""Estimates of the memory that a model takes."""

import argparse
from pathlib import Path

import pytest
from transformers import BertConfig, ViTConfig

from trainer_lib import ConfigurationError
from trainer_lib.commands.estimate import (
    add_timm_hub_prefix,
    check_has_model,
    create_ascii_table,
    create_empty_model,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
)
from trainer_lib.commands.main import main
from trainer_lib.foundation.byte_sizes import convert_bytes


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a folder with the configuration of a small model."""
    config = BertConfig(vocab_size=10, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_models_of_timm_on_the_hub() -> None:
    assert add_timm_hub_prefix("timm/resnet50.a1_in1k") == "hf-hub:timm/resnet50.a1_in1k"
    for name in ("resnet50", "resnet50.a1_in1k", "hf-hub:timm/resnet50.a1_in1k", "local-dir:/path/to/model"):
        assert add_timm_hub_prefix(name) == name


def test_a_model_has_shapes_and_no_memory(folder: str) -> None:
    model = create_empty_model(folder)
    assert type(model).__name__ == "BertForSequenceClassification"
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with pytest.raises(ConfigurationError, match=r"Unknown library_name 'diffusers'. Known: timm, transformers."):
        create_empty_model(folder, "diffusers")


def test_a_training_holds_weights_gradients_and_two_states_of_adam() -> None:
    assert estimate_training_usage(1000, "float32") == {
        "model": 1000, "optimizer": 2000, "gradients": 1000, "step": 4000
    }  # fmt: skip
    assert estimate_training_usage(1000, "bfloat16") == {
        "model": 1000, "optimizer": 2000, "gradients": 1500, "step": 2000
    }  # fmt: skip
    assert set(estimate_training_usage(1000, "int4").values()) == {-1}


def test_rows_of_types(folder: str) -> None:
    args = estimate_command_parser().parse_args([folder, "--dtypes", "float32", "int8"])
    (wide, wide_layer, wide_total, wide_use), (narrow, narrow_layer, narrow_total, narrow_use) = gather_data(args)
    parameters = sum(parameter.numel() for parameter in create_empty_model(folder).parameters())
    buffers = 2 * 512 * 8  # position_ids and token_type_ids
    assert (wide, wide_total) == ("float32", 4 * parameters + buffers)
    embeddings = (10 + 512 + 2) * 4 + 2 * 4  # one layer, since the model says that it is not to be split
    assert wide_layer == 4 * embeddings + buffers
    assert (narrow, narrow_total, narrow_layer) == ("int8", wide_total // 4, wide_layer // 4)
    assert (wide_use["step"], narrow_use["step"]) == (4 * wide_total, -1)


def test_the_table(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    args = estimate_command_parser(commands).parse_args([folder, "--dtypes", "float32", "int8"])
    args.func(args)
    text = capsys.readouterr().out
    lines = text[: text.index("┘") + 1].splitlines()
    assert len({len(line) for line in lines}) == 1
    assert f"Memory Usage for loading `{folder}`" in lines[1]
    assert [line.split("│")[1].strip() for line in lines[3:4] + lines[5:7]] == ["dtype", "float32", "int8"]
    assert lines[6].rstrip("│").endswith("-" + " " * (len(lines[6].rstrip("│").split("│")[-1]) - 1))


def test_the_table_of_a_training(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*options: str) -> tuple[str, dict[tuple[str, str], list[str]]]:
        assert main(["estimate-memory", *options]) == 0
        _, title, *lines = capsys.readouterr().out.partition("┘\n")[2].splitlines()
        cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
        return title, {(row[0], row[1]): row[2:] for row in cells if len(row) == 8}

    title, alone = rows(folder)
    assert "Training with Adam on each of 1 devices, batches of 1 × 512 tokens" in title
    assert [key for key in alone if key[0] != "strategy"] == [("ddp", "no"), ("ddp", "bf16"), ("ddp", "bf16-true")]
    weights, gradients, optimizer, activations, _, bar = alone["ddp", "no"]
    assert weights == gradients != optimizer
    assert bar == "█" * 24, "the largest total"
    title, several = rows(folder, "--num_processes", "4", "--batch-size", "2", "--sequence_length", "16")
    assert "on each of 4 devices, batches of 2 × 16 tokens" in title
    rows_of_first = [weight.chunk(4)[0] for weight in create_empty_model(folder).parameters()]
    assert several["fsdp", "no"][1] == convert_bytes(sum(part.nbytes for part in rows_of_first))
    assert several["ddp", "no"][3] != activations
    vit = ViTConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32)
    vit.architectures = ["ViTForImageClassification"]
    vit.save_pretrained(tmp_path)
    title, images = rows(str(tmp_path))
    assert "batches of 1 × 3×32×32 values" in title
    assert images["ddp", "no"][3] != "unknown"


def test_a_table_is_as_wide_as_its_title_or_its_cells() -> None:
    assert create_ascii_table(["a", "bb"], [["x", 1], ["yyyy", 2]], "title").splitlines() == [
        "┌───────┐",
        "│ title │",
        "├────┬──┤",
        "│a   │bb│",
        "├────┼──┤",
        "│x   │1 │",
        "│yyyy│2 │",
        "└────┴──┘",
    ]
    assert create_ascii_table(["a", "b"], [["1", "2"]], "a longer title").splitlines()[1] == "│a longer title│"


def test_errors_of_models_that_are_not_there() -> None:
    assert check_has_model(OSError("x does not appear to have a file named config.json")) == "transformers"
    assert check_has_model(ValueError("anything else")) == "unknown"
