"""Generation as an evaluation step: each row is continued as it would be alone, and the loss is that of its labels."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.evaluated import Bench
from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.evaluation.eval_loop import EvaluationSet
from trainer_lib.trainer.evaluation.generation import generate_step

PAD, END = 0, 1
OPTIONS = {"max_new_tokens": 5, "do_sample": False}


def causal() -> Any:
    """Return a model that writes something else after each prompt, and after the first nothing but the end."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"vocab_size": 40, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    options = {"bos_token_id": END, "eos_token_id": END, "initializer_range": 0.6, "tie_word_embeddings": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **options)).eval()


def seq2seq() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    options = {"decoder_start_token_id": PAD, "initializer_factor": 4.0, "tie_word_embeddings": False}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **options)).eval()


def alone(model: Any, prompt: list[int]) -> list[int]:
    """Return what the model writes after one row without padding."""
    tokens = torch.tensor([prompt])
    written = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), pad_token_id=PAD, **OPTIONS)
    return written[0].tolist() if model.config.is_encoder_decoder else written[0, len(prompt) :].tolist()


def assert_continued(written: Any, wanted: list[list[int]]) -> None:
    for row, continuation in zip(written.tolist(), wanted, strict=True):
        assert row[: len(continuation)] == continuation
        assert set(row[len(continuation) :]) <= {PAD, END, -100}


PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15]]
ANSWERS = [[20, 21], [22, 23, 24], [25], [26, 27]]


def batch_of(rows: list[int], padding_side: str = "right") -> dict[str, Tensor]:
    """Return prompts and answers in one row each, of which the answers are labels."""
    length = max(len(PROMPTS[row] + ANSWERS[row]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        tokens, labels = PROMPTS[row] + ANSWERS[row], [-100] * len(PROMPTS[row]) + ANSWERS[row]
        missing = length - len(tokens)
        for name, values, padding in (
            ("input_ids", tokens, PAD), ("attention_mask", [1] * len(tokens), 0), ("labels", labels, -100)
        ):  # fmt: skip
            filling = [padding] * missing
            batch[name].append(values + filling if padding_side == "right" else filling + values)
    return {name: torch.tensor(values) for name, values in batch.items()}


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return len(PROMPTS)

    def __getitem__(self, index: int) -> int:
        return index


class TestCausal:
    @pytest.mark.parametrize("padding_side", ["right", "left"])
    def test_prompts_are_what_stands_before_the_labels(self, padding_side: str) -> None:
        model = causal()
        output = generate_step(model, batch_of([0, 1, 2, 3], padding_side), OPTIONS)
        assert output.loss_sum is None
        assert_continued(output.predictions, [alone(model, prompt) for prompt in PROMPTS])
        assert torch.equal(output.labels, batch_of([0, 1, 2, 3], padding_side)["labels"])

    @pytest.mark.parametrize("padding_side", ["right", "left"])
    def test_other_values_of_tokens_stay_with_them(self, padding_side: str) -> None:
        model, batch = causal(), batch_of([1, 2], padding_side)
        batch["token_type_ids"] = batch["input_ids"] + 10
        wanted: list[list[int]] = []
        for prompt in (PROMPTS[1], PROMPTS[2]):
            tokens = torch.tensor([prompt])
            inputs = {"input_ids": tokens, "token_type_ids": tokens + 10, "attention_mask": torch.ones_like(tokens)}
            wanted.append(model.generate(**inputs, pad_token_id=PAD, **OPTIONS)[0, len(prompt) :].tolist())
        assert_continued(generate_step(model, batch, OPTIONS).predictions, wanted)

    def test_prompts_may_be_given(self) -> None:
        model = causal()
        tokens = torch.tensor([[PAD, 5, 6, 7], [PAD, PAD, 8, 9]])
        settings = {"prompt_input_ids": tokens, "prompt_attention_mask": (tokens != PAD).long()}
        seen: list[Any] = []

        def loss_of(model: Any, batch: Any) -> tuple[Tensor, float]:
            seen.append(sorted(batch))
            return torch.tensor(3.0), 2.0

        output = generate_step(model, {**batch_of([0, 1]), **settings}, OPTIONS, loss_of=loss_of)
        assert_continued(output.predictions, [alone(model, prompt) for prompt in PROMPTS[:2]])
        assert (float(output.loss_sum or 0), output.weight) == (3.0, 2.0)
        assert seen == [["attention_mask", "input_ids", "labels"]]

    def test_without_labels_all_is_prompt(self) -> None:
        model = causal()
        tokens = torch.tensor([PROMPTS[0]])
        for labels in ({}, {"labels": tokens}, {"labels": torch.full_like(tokens, -100)}):
            batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **labels}
            assert_continued(generate_step(model, batch, OPTIONS).predictions, [alone(model, PROMPTS[0])])

    def test_some_rows_without_a_prompt_are_refused(self) -> None:
        batch = batch_of([0, 1])
        batch["labels"][1] = batch["input_ids"][1]
        with pytest.raises(ConfigurationError, match="some rows have a prompt"):
            generate_step(causal(), batch, OPTIONS)

    def test_the_tokenizer_says_what_to_pad_with(self) -> None:
        class Tokenizer:
            pad_token_id = 39

        model = causal()
        seen: dict[str, Any] = {}
        generate = model.generate

        def spy(**options: Any) -> Any:
            seen.update(options)
            return generate(**options)

        model.generate = spy
        generate_step(model, batch_of([0, 1]), OPTIONS, Tokenizer())
        assert seen["pad_token_id"] == 39
        assert seen["input_ids"].tolist() == [[5, 6, 7], [39, 8, 9]]


class TestSequenceToSequence:
    def test_inputs_are_given_without_labels(self) -> None:
        model = seq2seq()
        tokens = torch.tensor([[5, 6, 7], [8, 9, PAD]])
        labels = torch.tensor([[20, 21], [22, -100]])
        batch = {
            "input_ids": tokens,
            "attention_mask": (tokens != PAD).long(),
            "labels": labels,
            "decoder_input_ids": torch.tensor([[PAD, 20], [PAD, 22]]),
        }

        def loss_of(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
            weight = (batch["labels"] != -100).sum()
            return model(**batch).loss * weight, weight

        output = generate_step(model, batch, OPTIONS, loss_of=loss_of)
        assert_continued(output.predictions, [alone(model, [5, 6, 7]), alone(model, [8, 9])])
        logits = model(**batch).logits
        wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        torch.testing.assert_close(output.loss_sum, wanted)
        assert output.weight == 3


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_model_that_pads_by_itself_gets_no_padding_token(has_tokenizer: bool) -> None:
    """BLIP gives the model that writes its captions a padding token, and a second one would be an error."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        **sizes,
        "vocab_size": 20,
        "encoder_hidden_size": 16,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = transformers.BlipConfig(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4})
    model = transformers.BlipForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = END
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END) if has_tokenizer else None
    pictures, prompts = torch.randn(2, 3, 8, 8), torch.tensor([[2, 5, 1], [2, 6, 1]])
    batch = {"pixel_values": pictures, "input_ids": prompts, "labels": prompts}
    output = generate_step(model, batch, OPTIONS, tokenizer)
    written = model.generate(pixel_values=pictures, input_ids=prompts, **OPTIONS)
    assert output.predictions.tolist() == written[:, 3:].tolist()


def test_models_and_batches_that_do_not_fit_are_told() -> None:
    with pytest.raises(ConfigurationError, match=r"Linear has no generate\(\)"):
        generate_step(nn.Linear(2, 2), {"input_ids": torch.ones(1, 2)})
    with pytest.raises(ConfigurationError, match="batches with names"):
        generate_step(causal(), torch.ones(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("sharded", [False, True])
def test_predictions_of_processes_are_those_of_one(sharded: bool) -> None:
    def body() -> Any:
        def step(model: Any, batch: Any) -> Any:
            return generate_step(model, batch, OPTIONS, in_lockstep=sharded)

        options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}
        bench = Bench(step, model=causal(), **options)
        loader = bench.accelerator.prepare_data_loader(DataLoader(Rows(), 1, collate_fn=batch_of))
        result = bench.evaluator.predict(bench.run, bench.model, loader)

        def compute(prediction: Any) -> dict[str, float]:
            np.testing.assert_array_equal(prediction.predictions, result.predictions)
            return {"tokens": (prediction.predictions > END).sum()}

        dev_set = EvaluationSet(loader=loader, compute_metrics=compute)
        return result.predictions, result.labels, bench.evaluate({"": dev_set})

    wanted = [alone(causal(), prompt) for prompt in PROMPTS]
    tokens = sum(token > END for row in wanted for token in row)
    for predictions, labels, metrics in run_world(body, num_processes=3, timeout=60):
        assert_continued(predictions, wanted)
        assert [[label for label in row if label != -100] for row in labels.tolist()] == ANSWERS
        assert metrics == {"eval_tokens": tokens}


def test_a_sharded_model_runs_its_encoder_by_itself() -> None:
    """`generate` of an encoder and decoder calls the encoder, and not the model, first."""
    prompt = [5, 6, 7]

    def body() -> list[list[int]]:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        model = accelerator.unwrap_model(accelerator.prepare(seq2seq()))
        return [alone(model, prompt) for _ in range(2)]

    wanted = alone(seq2seq(), prompt)
    assert run_world(body, num_processes=2, timeout=60) == [[wanted, wanted]] * 2
