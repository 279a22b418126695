"""Datasets of Hugging Face and adapters of PEFT go through a training as plain data and plain models do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.exact import Updates, assert_updates, updates_of
from tests.worlds import run_world
from trainer_lib import Trainer, TrainingArguments

ROWS = 7
GENERATOR = torch.Generator().manual_seed(1)
INPUTS, TARGETS = torch.randn(ROWS, 6, generator=GENERATOR), torch.randint(5, (ROWS,), generator=GENERATOR)


class Classifier(nn.Module):
    """Takes its inputs by the name of a column."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels)


def columns(form: str) -> Any:
    """Return the samples as a dataset of Hugging Face."""
    from datasets import Dataset

    data = Dataset.from_dict({"pixels": INPUTS.tolist(), "label": TARGETS.tolist()})
    if form == "streaming":
        return data.to_iterable_dataset()
    if form == "sharded stream":
        return data.to_iterable_dataset(num_shards=4)
    return data if form == "plain" else data.with_format(form)


@pytest.mark.parametrize("form", ["plain", "torch", "numpy", "streaming"])
@pytest.mark.parametrize("processes", [1, 2])
def test_datasets_of_every_format_train_the_same(form: str, processes: int) -> None:
    def body() -> Updates:
        return updates_of(
            Classifier(), columns(form), loss_fn=cross_entropy, gradient_accumulation_steps=2 // processes
        )

    model = Classifier()
    whole = [
        lambda: cross_entropy(model(INPUTS[:4]), TARGETS[:4]),
        lambda: cross_entropy(model(INPUTS[4:]), TARGETS[4:]),
    ]
    for actual in run_world(body, num_processes=processes, timeout=60) if processes > 1 else [body()]:
        assert_updates(actual, model, whole)


def _of_images(kind: str, name: str, processor: Any, removes_columns: bool) -> dict[str, Tensor]:
    from datasets import Dataset
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = ViTConfig(image_size=4, patch_size=2, num_channels=1, id2label={n: str(n) for n in range(5)}, **sizes)
    pixels = torch.randn(ROWS, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    rows: Any = {"pixel_values": pixels, name: TARGETS}
    if kind == "dataset":
        rows = Dataset.from_dict({"pixel_values": pixels.tolist(), name: TARGETS.tolist()})
    model = ViTForImageClassification(config)
    options: dict[str, Any] = {
        "train_dataset": rows,
        "eval_dataset": rows,
        "metrics": ["accuracy"],
        "processing_class": processor,
    }
    trainer = Trainer(model, quiet(num_train_epochs=2, remove_unused_columns=removes_columns), **options)
    trainer.fit()
    assert torch.equal(torch.as_tensor(trainer.predict(rows).labels), TARGETS)
    return {**model.state_dict(), "accuracy": torch.tensor(trainer.evaluate()["eval_accuracy"])}


@pytest.mark.parametrize("kind", ["dataset", "tensors"])
@pytest.mark.parametrize(("processor", "removes_columns"), [(None, False), (None, True), (object(), False)])
def test_a_column_named_label_is_the_labels_of_a_model_of_transformers(
    kind: str, processor: Any, removes_columns: bool
) -> None:
    expected = _of_images(kind, "labels", processor, removes_columns)
    actual = _of_images(kind, "label", processor, removes_columns)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize("processes", [1, 2])
def test_streams_of_several_shards_are_read_once(processes: int) -> None:
    def body() -> tuple[float, list[float]]:
        trainer = Trainer(Classifier(), quiet(), eval_dataset=columns("sharded stream"), loss_fn=cross_entropy)
        labels = trainer.predict(columns("sharded stream")).labels
        return trainer.evaluate()["eval_loss"], sorted(labels.tolist())

    wanted = cross_entropy(Classifier()(INPUTS), TARGETS).item()
    for loss, labels in run_world(body, num_processes=processes, timeout=60):
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert labels == sorted(TARGETS.tolist())


def quiet(**options: Any) -> TrainingArguments:
    return TrainingArguments(use_cpu=True, progress_bar=False, per_device_train_batch_size=2, **options)


# PEFT asks transformers for a name that is on its way out.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
class TestAdapters:
    def plain(self) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 13, "n_positions": 8}
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))

    def adapted(self) -> Any:
        from peft import LoraConfig, TaskType, get_peft_model

        model = self.plain()
        adapter = LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(model, adapter)

    def batch(self) -> dict[str, Tensor]:
        ids = torch.randint(13, (ROWS, 8), generator=torch.Generator().manual_seed(2))
        lengths = torch.tensor([8, 3, 5, 2, 7, 4, 6])
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) >= lengths[:, None], -100)}

    def rows(self) -> list[dict[str, Tensor]]:
        return [{name: value[row] for name, value in self.batch().items()} for row in range(ROWS)]

    @pytest.mark.parametrize("processes", [1, 2])
    def test_are_all_that_is_trained_and_saved(self, tmp_path: Path, processes: int) -> None:
        from peft import PeftModel

        def body() -> Updates:
            model = self.adapted()
            updates = updates_of(model, self.rows(), gradient_accumulation_steps=2 // processes)
            args = quiet(max_steps=3, learning_rate=0.1, lr_scheduler="constant")
            trainer = Trainer(model, args, train_dataset=self.rows())
            trainer.fit()
            trainer.save_model(tmp_path / "saved")
            if trainer.accelerator.is_main_process:
                torch.save(model.state_dict(), tmp_path / "trained.pt")
            trainer.accelerator.wait_for_everyone()
            return updates

        model, batch = self.adapted(), self.batch()
        whole = [
            lambda: model(**{name: value[:4] for name, value in batch.items()}).loss,
            lambda: model(**{name: value[4:] for name, value in batch.items()}).loss,
        ]
        for actual in run_world(body, num_processes=processes, timeout=60):
            assert {name.split(".")[-3] for name in actual.gradients[0]} == {"lora_A", "lora_B"}
            assert_updates(actual, model, whole)

        assert sorted(path.name for path in (tmp_path / "saved").iterdir() if path.suffix != ".md") == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        trained = torch.load(tmp_path / "trained.pt")
        saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
        assert saved
        assert all("lora" in name for name in saved)
        again = PeftModel.from_pretrained(self.plain(), tmp_path / "saved")
        before = self.adapted().state_dict()
        for name, value in again.state_dict().items():
            torch.testing.assert_close(value, trained[name], rtol=0, atol=0)
            assert ("lora" in name) is not torch.equal(value, before[name]), name
