"""Models that a trainer saves and other libraries load."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.strategies import split
from tests.trainer.tasks import arguments, points
from tests.worlds import run_world
from trainer_lib import FullyShardedDataParallelPlugin, ParallelismConfig, Trainer, load_checkpoint_in_model


class Images(nn.Module):
    """A network for images as those of timm are: plain, with a stem, a head, running statistics and a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_cfg = {"architecture": "tiny", "num_classes": 3}
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward_features(self, images: Tensor) -> Tensor:
        return self.stem(images).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.forward_features(images))


class Hubbed(nn.Module, PyTorchModelHubMixin):
    """A module that the Hub's mixin saves and reads, with what it was made with."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Sentences(nn.Sequential):
    """Saves itself in a way of its own, part by part, as a SentenceTransformer does."""

    def save_pretrained(self, path: str | Path) -> None:
        for name, part in self.named_children():
            (Path(path) / f"{name}_{type(part).__name__}").mkdir(parents=True)
            torch.save(part.state_dict(), Path(path) / f"{name}_{type(part).__name__}" / "part.pt")


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config: Any = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    return BertForSequenceClassification(config)


def texts() -> list[dict[str, Any]]:
    return [{"input_ids": torch.arange(i % 3, i % 3 + 4), "labels": i % 2} for i in range(16)]


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 1, 5, 5, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3


def read_images(folder: Path) -> nn.Module:
    model = Images()
    model.load_state_dict(load_file(folder / "model.safetensors"))  # as timm.create_model(checkpoint_path=…) does
    other = Images()
    load_checkpoint_in_model(other, folder, strict=True)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    return model


def read_bert(folder: Path) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder)


def read_sentences(folder: Path) -> nn.Module:
    model = Sentences(nn.Linear(6, 4), nn.Linear(4, 2))
    for name, part in model.named_children():
        part.load_state_dict(torch.load(folder / f"{name}_Linear" / "part.pt"))
    return model


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[Path], nn.Module], dict[str, Any]]
CASES: dict[str, Case] = {
    "transformers": (bert, texts, read_bert, {}),
    "like timm": (Images, images, read_images, {"loss_fn": cross_entropy}),
    "the Hub's mixin": (lambda: Hubbed(hidden=5), points, Hubbed.from_pretrained, {"loss_fn": cross_entropy}),
    "like sentence-transformers": (
        lambda: Sentences(nn.Linear(6, 4), nn.Linear(4, 2)),
        points,
        read_sentences,
        {"loss_fn": cross_entropy},
    ),
}


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_saved_is_read_by_its_kind(processes: int, tmp_path: Path) -> None:
    def body() -> None:
        for name, (make, data, _, options) in CASES.items():
            torch.manual_seed(0)
            trainer = Trainer(make(), arguments(max_steps=2, mixed_precision="bf16"), train_dataset=data(), **options)
            trainer.fit()
            trainer.save_model(tmp_path / name)
            if trainer.accelerator.is_main_process:
                torch.save(trainer.unwrapped_model.state_dict(), tmp_path / f"{name}.pt")
            trainer.accelerator.free_memory()

    run_world(body, num_processes=processes, timeout=100)
    for name, (make, _, read, _) in CASES.items():
        torch.manual_seed(0)
        before, expected = make().state_dict(), torch.load(tmp_path / f"{name}.pt")
        actual = read(tmp_path / name).state_dict()
        assert actual.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in actual.items()), name
        assert not all(torch.equal(value, before[key]) for key, value in actual.items()), name


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("size", ["tp_size", "dp_shard_size"])
def test_adapters_of_split_and_sharded_models_are_saved_whole(size: str, tmp_path: Path) -> None:
    def body() -> dict[str, Tensor]:
        sizes: dict[str, Any] = {size: 2}
        model = split.model_of(partial(split.adapted, split.llama))
        args = arguments(max_steps=1, parallelism=ParallelismConfig(**sizes))
        trainer = Trainer(model, args, train_dataset=split.data(8))
        trainer.fit()
        trainer.save_model(tmp_path / "adapter")
        prepared: Any = trainer.model
        return {name: value.clone() for name, value in trainer.accelerator.get_state_dict(prepared).items()}

    state = run_world(body, timeout=100)[0]
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = {name.replace(".default", ""): value for name, value in state.items() if "lora_" in name}
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)


# Kinds of prompts, each with what its encoder makes of weights: rows of them, or outputs of a network.
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prefixes": ("PrefixTuningConfig", {}),
    "projected prefixes": ("PrefixTuningConfig", {"prefix_projection": True, "encoder_hidden_size": 8}),
    "prompts": ("PromptTuningConfig", {}),
    "p-tuning": ("PromptEncoderConfig", {"encoder_hidden_size": 8}),
    "p-tuning with an LSTM": (
        "PromptEncoderConfig",
        {"encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM", "encoder_dropout": 0.0},
    ),
}


def prompted(prompt: str) -> Any:
    import peft

    kind, options = PROMPTS[prompt]
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3, **options)
    return peft.get_peft_model(split.model_of(split.llama), config)  # type: ignore[arg-type]  # a PreTrainedModel


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module", "ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("least", [None, 1])  # parameters of a module that is sharded by itself
def test_prompts_of_sharded_models_are_saved_whole(least: int | None, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    wrapping: dict[str, Any] = {} if least is None else {"auto_wrap_policy": "size_based_wrap", "min_num_params": least}

    def body() -> None:
        for prompt in PROMPTS:
            args = arguments(max_steps=1, learning_rate=0.1, fsdp=FullyShardedDataParallelPlugin(**wrapping))
            trainer = Trainer(prompted(prompt), args, train_dataset=split.data(8))
            trainer.fit()
            trainer.save_model(tmp_path / prompt)
            trainer.evaluate(split.data(4))  # with the parts of each rank
            state = trainer.accelerator.get_state_dict(trainer.model)  # type: ignore[arg-type]  # a module
            if trainer.accelerator.is_main_process:
                torch.save(state, tmp_path / f"{prompt}.pt")
            trainer.accelerator.free_memory()

    run_world(body, timeout=100)
    from peft import PeftModel

    for prompt in PROMPTS:
        model = prompted(prompt)
        before = model.get_prompt_embedding_to_save("default")
        model.load_state_dict(torch.load(tmp_path / f"{prompt}.pt"))
        expected = model.get_prompt_embedding_to_save("default")
        loaded: Any = PeftModel.from_pretrained(split.model_of(split.llama), tmp_path / prompt)  # type: ignore[arg-type]
        actual = loaded.prompt_encoder["default"].embedding.weight
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7, msg=prompt)
        assert not torch.allclose(actual, before), prompt
