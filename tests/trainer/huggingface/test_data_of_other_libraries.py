"""Adapters, transforms, collators, image processors and metrics of other libraries, through a whole training."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.trainer.exact import assert_updates, updates_of
from tests.trainer.hugging_face import model, rows, run_snippet_of_page, their_arguments
from tests.trainer.tasks import arguments, network, points
from tests.worlds import run_world
from trainer_lib import Trainer
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import StateError, UnsupportedError
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.trainer.checkpoints.peft import LEFT_OUT_FILE

# PEFT asks transformers for a name that is on its way out.
OLD_NAME = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def adapted(seed: int = 0) -> Any:
    """Return a language model with an adapter, and a part that is trained whole."""
    from peft import LoraConfig, TaskType, get_peft_model

    below = model(dropout=0.1)
    torch.manual_seed(seed)
    adapter = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=2,
        lora_dropout=0.1,
        target_modules=["q_proj"],
        modules_to_save=["norm"],
    )
    return get_peft_model(below, adapter)


class PulledPlug(Callback):
    """Ends a run by an error that it cannot go on after."""

    may_change_training = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == self.step:
            raise KeyError("pulled")


@pytest.mark.filterwarnings(OLD_NAME)
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_checkpoints_have_adapters_alone_and_go_on_to_the_bit(tmp_path: Path, processes: int) -> None:
    def run(folder: str, trained: Any, resume: str = "never", callbacks: Any = ()) -> Any:
        args = arguments(
            output_dir=str(tmp_path / folder),
            max_steps=6,
            per_device_train_batch_size=4 // processes,
            log_every=1,
            save_every="2 steps",
            keep_last=None,
            resume=resume,
        )
        trainer = Trainer(trained, args, train_dataset=rows(), callbacks=list(callbacks))
        return trainer.fit(), {
            name: parameter.clone() for name, parameter in trained.named_parameters() if parameter.requires_grad
        }

    def body() -> tuple[Any, ...]:
        straight, wanted = run("straight", adapted())
        with pytest.raises(KeyError, match="pulled"):
            run("broken", adapted(), callbacks=[PulledPlug(3)])
        result, trained = run("broken", adapted(seed=5), resume="auto")  # its adapter is that of the checkpoint
        assert trained.keys() == wanted.keys()
        same = all(torch.equal(trained[name], wanted[name]) for name in wanted)
        losses = [[entry["loss"] for entry in one_of.history] for one_of in (straight, result)]
        return same, *losses, str(result.last_checkpoint)

    fit_result = run_world(body, num_processes=processes, timeout=90) if processes > 1 else [body()]
    for same, losses, resumed, _ in fit_result:
        assert same
        assert losses == resumed
    checkpoint = Path(fit_result[0][-1])
    saved = load_file(checkpoint / "model.safetensors")
    assert len(saved) == 2 + 3  # two matrices of the adapter, and the norms
    assert sum(parameter.numel() for parameter in saved.values()) < 0.1 * sum(
        parameter.numel() for parameter in model().parameters()
    )
    assert (checkpoint / LEFT_OUT_FILE).is_file()


@pytest.mark.filterwarnings(OLD_NAME)
def test_adapters_of_a_checkpoint_are_taken_up_by_the_same_model_only(tmp_path: Path) -> None:
    args = arguments(output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4)
    trained = adapted()
    checkpoint = Trainer(trained, args, train_dataset=rows(), eval_dataset=rows(7)).fit().last_checkpoint
    assert checkpoint is not None
    again = adapted(seed=5)
    Trainer.from_checkpoint(checkpoint, again, eval_dataset=rows(7))
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)
    other = adapted()
    with torch.no_grad():
        other.base_model.model.model.embed_tokens.weight[3, 5] += 1e-3
    for refused in (
        lambda: Trainer.from_checkpoint(checkpoint, other),
        lambda: Trainer(other, args, train_dataset=rows()).fit(resume=str(checkpoint)),
    ):
        with pytest.raises(StateError, match=r"the base weights of this model differ .*embed_tokens\.weight\. Make"):
            refused()


@pytest.mark.filterwarnings(OLD_NAME)
def test_adapters_of_their_checkpoint_resume(tmp_path: Path) -> None:
    def prefixes() -> Any:
        from peft import PrefixTuningConfig, TaskType, get_peft_model

        torch.manual_seed(0)
        return get_peft_model(
            model(dropout=0.1), PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
        )

    def added() -> Any:
        network = model(dropout=0.1)
        torch.manual_seed(0)
        network.add_adapter(adapted().peft_config["default"])
        return network

    def theirs(make: Any) -> Any:
        options = {"save_strategy": "steps", "save_steps": 4, "max_grad_norm": 0.1}
        return transformers.Trainer(make(), their_arguments(tmp_path, **options), train_dataset=rows())

    for make in (adapted, added, prefixes):
        wanted = theirs(make)
        wanted.train()
        taken = Trainer.from_transformers(theirs(make))
        taken.fit(resume=tmp_path / "checkpoint-4")
        assert taken.run.state.step == 6
        for name, value in taken.unwrapped_model.state_dict().items():
            torch.testing.assert_close(value, wanted.model.state_dict()[name], msg=name)
    with pytest.raises(StateError, match=r"'default' in .* differs from that of the model: .*lora_A"):
        Trainer(adapted(), arguments(), train_dataset=rows()).fit(resume=tmp_path / "checkpoint-4")
    with pytest.raises(StateError, match="only the adapters of a model, and this model has none"):
        Trainer(model(), arguments(), train_dataset=rows()).fit(resume=tmp_path / "checkpoint-4")


@pytest.mark.slow
@pytest.mark.filterwarnings(OLD_NAME)
def test_sharded_ones_are_saved_as_a_whole_and_take_up_no_adapters_alone(tmp_path: Path) -> None:
    def run(folder: str, **options: Any) -> str:
        args = arguments(output_dir=str(tmp_path / folder), max_steps=1, per_device_train_batch_size=2, **options)
        return str(Trainer(adapted(), args, train_dataset=rows()).fit().last_checkpoint)

    def body() -> None:
        plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
        with pytest.raises(
            UnsupportedError, match="holds only the adapters of a model, which cannot be loaded into a sharded model"
        ):
            run("others", resume=alone, fsdp=plugin)
        run("shards", fsdp=plugin)

    alone = run("alone")
    run_world(body, timeout=90)
    (checkpoint,) = (tmp_path / "shards").rglob("checkpoint-00000001")
    saved = load_file(checkpoint / "model.safetensors")
    assert saved.keys() == adapted().state_dict().keys()


@pytest.mark.filterwarnings(OLD_NAME)
def test_weights_that_an_optimizer_has_are_saved_with_the_adapters(tmp_path: Path) -> None:
    trained = adapted()
    trained.base_model.model.model.embed_tokens.weight.requires_grad_(True)
    args = arguments(output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4)
    checkpoint = str(Trainer(trained, args, train_dataset=rows()).fit().last_checkpoint)
    assert [name for name in load_file(Path(checkpoint) / "model.safetensors") if "embed_tokens" in name]


class Doubled:
    """Turns rows into tensors when they are read."""

    def __call__(self, read: dict[str, list[Any]]) -> dict[str, Tensor]:
        return {"input": 2 * torch.tensor(read["numbers"]), "labels": torch.tensor(read["side"])}


@pytest.mark.parametrize("processes", [1, 2])
def test_transforms_of_datasets_are_called(processes: int) -> None:
    from datasets import Dataset

    inputs, sides = points(8)
    data = Dataset.from_dict({"numbers": inputs.tolist(), "side": sides.tolist()}).with_transform(Doubled())

    def body() -> Any:
        return updates_of(network(), data, loss_fn=cross_entropy, gradient_accumulation_steps=2 // processes)

    compared = network()
    whole = [
        lambda half=half: cross_entropy(compared(2 * inputs[half]), sides[half]) for half in (slice(4), slice(4, 8))
    ]
    for actual in run_world(body, num_processes=processes, timeout=60) if processes > 1 else [body()]:
        assert_updates(actual, compared, whole)


def tokenizer() -> Any:
    """Return a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[PAD]", "[MASK]", "[UNK]", *"abcdefghij"])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]")


def test_collators_of_transformers_make_the_batches(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    texts = ["a b c d", "e f", "g h i", "j a b c d e"]
    data = Dataset.from_dict({"input_ids": words(texts)["input_ids"]})
    seen: list[Any] = []

    class Seeing(Callback):
        def on_micro_batch_begin(self, run: Run) -> None:
            seen.append({name: value.clone() for name, value in run.batch.items()})

    collate = DataCollatorForLanguageModeling(words, mlm=False)
    args = arguments(num_train_epochs=1, per_device_train_batch_size=2, shuffle=False, output_dir=str(tmp_path))
    trainer = Trainer(
        model(), args, train_dataset=data, collate_fn=collate, processing_class=words, callbacks=[Seeing()]
    )
    checkpoint = trainer.fit().last_checkpoint
    for batch, first in zip(seen, (0, 2), strict=True):
        wanted = collate([{"input_ids": tokens} for tokens in words(texts[first : first + 2])["input_ids"]])
        assert batch.keys() == wanted.keys()
        assert all(torch.equal(batch[name], wanted[name]) for name in wanted)
        assert (batch["labels"] == -100).any()
    assert checkpoint is not None
    assert (checkpoint / "tokenizer.json").is_file()


MODULE = """
import datasets
import evaluate


class {kind}(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        features = datasets.Features({{"predictions": number, "references": number}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        hits = sum(int(one == other) for one, other in zip(predictions, references))
        return {{"{name}": {value}}}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings(OLD_NAME)
def test_images_of_a_processor_are_learned_and_measured_by_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import evaluate
    import torchmetrics
    from datasets import Dataset
    from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=24)
    pixels = (generator.random((24, 10, 10, 3)) * 90 + 150 * labels[:, None, None, None]).astype("uint8")
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})

    def prepare(read: dict[str, list[Any]]) -> dict[str, Any]:
        images = [np.array(image, dtype="uint8") for image in read["image"]]
        return {**processor(images, return_tensors="pt"), "labels": read["label"]}

    data = Dataset.from_dict({"image": pixels.tolist(), "label": labels.tolist()}).with_transform(prepare)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    options: dict[str, Any] = {"num_labels": 2, "attn_implementation": "sdpa"}
    classifier = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, **options))

    def module(kind: str, value: str) -> Any:
        path = tmp_path / f"{kind.lower()}.py"
        path.write_text(MODULE.format(kind=kind, name=kind.lower(), value=value))
        return evaluate.load(str(path), cache_dir=str(tmp_path / "cache"))

    kinds: dict[str, Callable[..., Any]] = {"f1": torchmetrics.F1Score, "recall": torchmetrics.Recall}
    trainer = Trainer(
        classifier,
        arguments(num_train_epochs=6, learning_rate=0.02, output_dir=str(tmp_path / "runs"), save_every="never"),
        train_dataset=data,
        eval_dataset=data.select(range(19)),
        processing_class=processor,
        metrics={
            "accuracy": "accuracy",
            "of_torch": torchmetrics.MetricCollection(
                {name: kind(task="multiclass", num_classes=2, average="macro") for name, kind in kinds.items()}
            ),
            "both": evaluate.combine([module("Hits", "hits"), module("Share", "hits / len(predictions)")]),
        },
    )
    result = trainer.fit().metrics
    assert result["eval_accuracy"] > 0.9
    assert result["eval_both_share"] == pytest.approx(result["eval_accuracy"])
    assert result["eval_both_hits"] == pytest.approx(result["eval_accuracy"] * 19)
    predicted = torch.from_numpy(trainer.predict(data.select(range(19))).predictions)
    for name, kind in kinds.items():
        alone = kind(task="multiclass", num_classes=2, average="macro")
        assert result[f"eval_{name}"] == pytest.approx(alone(predicted, torch.from_numpy(labels[:19])).item())
    trainer.save_model(tmp_path / "saved")
    again = ViTForImageClassification.from_pretrained(tmp_path / "saved").eval()
    read = AutoImageProcessor.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        logits = again(**read(list(pixels[:5]), return_tensors="pt")).logits
    torch.testing.assert_close(logits, predicted[:5], rtol=1e-5, atol=1e-6)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


@pytest.mark.filterwarnings(OLD_NAME)
def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_snippet_of_page("other_libraries.md", tmp_path)["result"].status == "finished"
    assert sorted(path.name for path in (tmp_path / "adapter").glob("*.safetensors")) == ["adapter_model.safetensors"]
    assert (tmp_path / "adapter" / "preprocessor_config.json").is_file()
