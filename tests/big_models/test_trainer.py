"""A Trainer evaluates, predicts and generates with a model spread by a device map, and trains adapters over it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer_lib import Trainer, TrainingArguments, cpu_offload, dispatch_model
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError

ROWS = [{"x": row, "labels": torch.tensor(number % 3)} for number, row in enumerate(torch.randn(10, 4))]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(x).relu())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Adapted(nn.Module):
    """A model with a trained layer behind its frozen ones."""

    def __init__(self, base: Classifier) -> None:
        super().__init__()
        self.base, self.adapter = base.requires_grad_(False), nn.Linear(3, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.adapter(self.base(x, labels)["logits"])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def made(kind: type[nn.Module] = Classifier) -> Any:
    torch.manual_seed(0)
    return kind()


def arguments(**options: Any) -> TrainingArguments:
    settings: dict[str, Any] = {"num_train_epochs": 2, "learning_rate": 0.1, "use_cpu": True}
    settings |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, **options}
    return TrainingArguments(**settings)


def results(model: nn.Module, **options: Any) -> tuple[dict[str, float], np.ndarray]:
    trainer = Trainer(model, arguments(**options), eval_dataset=ROWS)
    return trainer.evaluate(), trainer.predict(ROWS).predictions


@pytest.mark.parametrize(
    ("options", "offloaded"),
    [
        ({"device_map": "auto"}, []),
        ({"device_map": "auto", "max_memory": {"cpu": "250"}, "offload_folder": "weights"}, ["body", "head"]),
        ({"device_map": {"body": "disk", "head": "cpu"}, "offload_folder": "weights"}, ["body"]),
        ({"device_map": {"": "disk"}, "offload_folder": "weights"}, ["body", "head"]),
    ],
)
def test_metrics_and_predictions_are_those_of_the_model_in_memory(
    options: dict[str, Any], offloaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected_metrics, expected_rows = results(made())
    model = made()
    metrics, rows = results(model, **options)
    assert metrics == expected_metrics
    assert np.array_equal(rows, expected_rows)
    assert [name for name, child in model.named_children() if child.weight.is_meta] == offloaded


def test_a_model_spread_by_hand_is_taken_as_it_is(tmp_path: Path) -> None:
    model = dispatch_model(made(), {"body": "disk", "head": "cpu"}, offload_dir=tmp_path)
    assert results(model)[0] == results(made())[0]
    assert results(cpu_offload(made()))[0] == results(made())[0]
    with pytest.raises(ConfigurationError, match="has a device map already"):
        results(model, device_map="auto")


@pytest.mark.filterwarnings("ignore")
def test_a_spread_model_generates(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(3, 7), "labels": torch.arange(3, 7)} for _ in range(3)]

    def generated(**options: Any) -> np.ndarray:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        settings = arguments(predict_with_generate=True, generation_kwargs={"max_new_tokens": 4}, **options)
        return Trainer(model, settings).predict(rows).predictions

    layers = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    spread = generated(device_map={**layers, "lm_head": "disk"}, offload_folder=tmp_path)
    assert np.array_equal(spread, generated())


def test_adapters_over_an_offloaded_base_are_trained_and_resumed(tmp_path: Path) -> None:
    def weights(spread: bool, **options: Any) -> dict[str, Tensor]:
        base: Any = made()
        if spread:
            dispatch_model(base, {"body": "disk", "head": "cpu"}, offload_dir=tmp_path)
        model = Adapted(base)
        Trainer(model, arguments(**options), train_dataset=ROWS).fit()
        return {name: value.clone() for name, value in model.adapter.state_dict().items()}

    torch.manual_seed(1)
    expected = weights(spread=False)
    for name, value in weights(spread=True).items():
        assert torch.equal(value, expected[name])
    folder: Any = {"output_dir": tmp_path / "runs", "save_every": "1 step", "schedule_steps": 10}
    weights(spread=True, max_steps=4, **folder)
    for name, value in weights(spread=True, resume="extend", **folder).items():
        assert torch.equal(value, expected[name])


def test_training_an_offloaded_weight_is_refused_by_name(tmp_path: Path) -> None:
    options: Any = {"device_map": {"body": "cpu", "head": "disk"}, "offload_folder": tmp_path}
    with pytest.raises(UnsupportedError, match=r"head\.weight of the Classifier is offloaded"):
        Trainer(made(), arguments(**options), train_dataset=ROWS).fit()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "outo"}, "Did you mean 'auto'"),
        ({"device_map": {"body": 1.5}}, "the index of an accelerator"),
        ({"device_map": {"": "cpu"}, "fsdp": True}, "device_map and fsdp are both given"),
        ({"device_map": {"": "cpu"}, "max_memory": {"cpu": "1GB"}}, "max_memory has no effect"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "much"),
        ({"offload_folder": "x"}, "offload_folder has no effect"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments(**options)


def test_a_map_that_needs_a_folder_says_so() -> None:
    with pytest.raises(ConfigurationError, match="Give offload_folder, or more max_memory"):
        Trainer(made(), arguments(device_map={"": "disk"}), eval_dataset=ROWS).evaluate()
