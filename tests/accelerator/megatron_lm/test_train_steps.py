"""Train steps of Megatron-LM's options: on one process, against the model's own losses."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.accelerator.megatron_lm.chapter import KeyTokens, SomeTokens
from tests.strategies.split import LENGTH, VOCABULARY, bert, gpt2, llama, model_of
from trainer_lib import Accelerator
from trainer_lib.accelerator.megatron_lm.megatron_engine import as_engine
from trainer_lib.data_loader.megatron_lm.indexed_dataset import write_indexed_dataset
from trainer_lib.foundation.errors import ConfigurationError, StateError, UnsupportedError
from trainer_lib.utils import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    T5TrainStep,
)
from trainer_lib.utils.megatron_lm import MegatronEngine, gather_across_data_parallel_groups

TOKENS = torch.randint(0, VOCABULARY - 1, (8, LENGTH), generator=torch.Generator().manual_seed(3))


def prepared(model: nn.Module, rate: float = 0.1, **options: Any) -> tuple[Accelerator, Any, Any]:
    """Return an Accelerator with these options, and a prepared model and optimizer."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(gradient_clipping=0, **options))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
    return accelerator, model, optimizer


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    options: dict[str, Any] = {"decoder_start_token_id": 0}
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            **options,
        )
    )  # fmt: skip


def classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    none: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, intermediate_size=32, **sizes, **none))


def pretraining() -> nn.Module:
    from transformers import BertConfig, BertForPreTraining

    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    none: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForPreTraining(BertConfig(vocab_size=VOCABULARY, intermediate_size=32, **sizes, **none))


def masked() -> Tensor:
    labels = TOKENS.clone()
    labels[:, ::3] = -100
    return labels


PADDING = torch.ones_like(TOKENS)
PADDING[:, -2:] = 0
BATCHES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Tensor]]] = {
    "gpt2": (gpt2, GPTTrainStep, {"input_ids": TOKENS, "labels": masked(), "attention_mask": PADDING}),
    "llama": (llama, GPTTrainStep, {"input_ids": TOKENS, "labels": TOKENS}),
    "bert": (bert, BertTrainStep, {"input_ids": TOKENS, "labels": masked(), "attention_mask": PADDING}),
    "both tasks": (
        pretraining, BertTrainStep, {"input_ids": TOKENS, "labels": masked(), "next_sentence_label": TOKENS[:, 0] % 2}
    ),
    "classifier": (classifier, BertTrainStep, {"input_ids": TOKENS, "labels": TOKENS[:, 0] % 2}),
    "t5": (t5, T5TrainStep, {"input_ids": TOKENS, "labels": masked(), "attention_mask": PADDING}),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_losses_and_gradients_are_those_of_the_model(name: str) -> None:
    make, step, batch = BATCHES[name]
    expected: Any = model_of(make)
    parts: list[Tensor] = []
    for begin in (0, 4):
        part = {key: value[begin : begin + 4] for key, value in batch.items()}
        loss = expected(**part).loss
        (loss / 2).backward()
        parts.append(loss.detach())
    accelerator, model, _ = prepared(model_of(make), num_micro_batches=2, custom_train_step_class=step)
    assert type(model.train_step_handler) is step
    outputs = model(**batch)
    accelerator.backward(outputs.loss)
    torch.testing.assert_close(outputs.loss, torch.stack(parts).mean(), rtol=1e-6, atol=0)
    accelerator.unscale_gradients()  # they are sums over rows until then, or until the step
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-7)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, outputs.loss, rtol=1e-6, atol=0)
    assert not isinstance(accelerator.unwrap_model(model), MegatronEngine)
    accelerator.free_memory()
    assert not isinstance(model, MegatronEngine)
    torch.testing.assert_close(model(**batch).loss, expected.eval()(**batch).loss)


def test_the_step_follows_from_the_model_and_tokens_weigh_alike() -> None:
    batch = {"input_ids": TOKENS, "labels": masked()}
    batch["labels"][:4, 1:] = -100
    batch["labels"][0, 2] = 5  # one token in the first micro-batch
    expected: Any = model_of(llama)
    loss = expected(**batch).loss  # the mean over all tokens
    loss.backward()
    options: dict[str, Any] = {"num_micro_batches": 2, "calculate_per_token_loss": True, "return_logits": True}
    accelerator, model, optimizer = prepared(model_of(llama), **options)
    assert isinstance(model.train_step_handler, GPTTrainStep)
    outputs = model(**batch)
    accelerator.backward(outputs.loss)
    torch.testing.assert_close(outputs.loss, loss.detach(), rtol=1e-6, atol=0)
    assert outputs.logits.shape == (8, LENGTH, VOCABULARY)
    optimizer.step()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other - 0.1 * other.grad, rtol=1e-5, atol=1e-7)


def test_what_follows_an_end_of_text_is_left_out() -> None:
    tokens = TOKENS.clone()
    tokens[:, 3] = 0  # GPT-2's end of text in this model
    labels = tokens.clone()
    labels[:, 4] = -100
    expected: Any = model_of(gpt2)
    _accelerator, model, _ = prepared(model_of(gpt2), eod_mask_loss=True)
    torch.testing.assert_close(model(input_ids=tokens).loss, expected(input_ids=tokens, labels=labels).loss.detach())


class Regression(AbstractTrainStep):
    """A step of a plain model."""

    def __init__(self, args: Any, scale: float) -> None:
        super().__init__("Regression")
        self.scale, self.count = scale, args.num_micro_batches

    def get_forward_step_func(self) -> Any:
        def loss(targets: Tensor, outputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value = (outputs - targets).square().mean() * self.scale
            return value, {"mse": value.detach()}

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
            batch = next(data_iterator)
            return model(batch["inputs"]), partial(loss, batch["targets"])

        return forward_step


def test_a_step_of_a_plain_model_makes_updates() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 3), torch.randn(12, 1)
    model, expected = nn.Linear(3, 1), nn.Linear(3, 1)
    expected.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"num_micro_batches": 3, "custom_train_step_class": Regression}
    _accelerator, engine, _ = prepared(model, custom_train_step_kwargs={"scale": 2.0}, **options)
    report, skipped, norm, zeros = engine.train_step(inputs=inputs, targets=targets)
    loss = 2 * (expected(inputs) - targets).square().mean()
    loss.backward()
    assert (skipped, norm, zeros, engine.train_step_handler.count) == (0, None, None, 3)
    torch.testing.assert_close(report, {"mse": loss.detach()})
    assert expected.weight.grad is not None
    torch.testing.assert_close(engine.module.weight.data, (expected.weight - 0.1 * expected.weight.grad).detach())
    assert engine.module.weight.grad is None
    after = engine.eval_step(inputs=inputs, targets=targets)
    assert after["mse"] < report["mse"]
    assert [len(part["inputs"]) for part in engine.get_batch_data_iterator({"inputs": inputs})] == [4, 4, 4]
    assert engine(inputs).shape == (12, 1)  # by position: the model itself
    assert engine(inputs=inputs, targets=targets).item() == pytest.approx(after["mse"].item())


def test_steps_written_for_any_version_of_accelerate_run() -> None:
    losses: list[float] = []
    for step in (KeyTokens, SomeTokens):
        options = {"keytoken_ids": [3, 5], "alpha": 0.25}
        accelerator, model, _ = prepared(
            model_of(gpt2), num_micro_batches=2, custom_train_step_class=step, custom_train_step_kwargs=options
        )
        losses.append(model(input_ids=TOKENS).loss.item())
        accelerator.free_memory()
    accelerator, plain, _ = prepared(model_of(gpt2), num_micro_batches=2, custom_train_step_class=GPTTrainStep)
    assert losses[0] == losses[1] != plain(input_ids=TOKENS).loss.item()


def test_functions_of_the_plugin_replace_those_of_a_step() -> None:
    def get_batch(data_iterator: Iterator[Any]) -> Any:
        tokens = next(data_iterator)["ids"]
        return tokens, tokens.roll(-1, 1), torch.ones(tokens.shape), None, None

    def loss(loss_mask: Tensor, losses: Tensor) -> Any:
        value = (losses * loss_mask).sum()
        return value, {"sum": value.detach()}

    _accelerator, model, _ = prepared(model_of(gpt2), custom_get_batch_function=get_batch, custom_loss_function=loss)
    logits = model_of(gpt2)(TOKENS).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten(), reduction="sum")
    torch.testing.assert_close(model(ids=TOKENS).loss, expected.detach())


def test_masks_of_megatron_lm_hide_tokens() -> None:
    from trainer_lib.accelerator.megatron_lm.model_calls import GPTCall, T5Call

    model: Any = model_of(llama)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    call: Any = GPTCall(model, model)
    torch.testing.assert_close(call(TOKENS, None, hidden), model(TOKENS).logits)
    assert call.config is model.config
    first = hidden.clone()
    first[..., 1:, 0] = True  # other tokens do not see the first one
    assert not torch.allclose(call(TOKENS, None, first), model(TOKENS).logits)
    pairs = PADDING[:, None, :] * PADDING[:, :, None] < 0.5
    encoder_decoder: Any = model_of(t5)
    expected = encoder_decoder(input_ids=TOKENS, attention_mask=PADDING, decoder_input_ids=TOKENS).logits
    torch.testing.assert_close(T5Call(encoder_decoder, encoder_decoder)(TOKENS, TOKENS, pairs), expected)


def datasets(folder: Path) -> MegatronLMDummyDataLoader:
    sequences = torch.randint(0, VOCABULARY - 1, (36, 9), generator=torch.Generator().manual_seed(1)).tolist()
    write_indexed_dataset(folder / "text", [[sequence] for sequence in sequences])
    return MegatronLMDummyDataLoader(
        data_path=str(folder / "text"), splits_string="29,7", seq_length=LENGTH, micro_batch_size=2
    )


def loaders(folder: Path) -> tuple[Accelerator, Any]:
    plugin = MegatronLMPlugin(num_micro_batches=2, gradient_clipping=0)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model, dummy = model_of(gpt2), datasets(folder)
    values = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dummy, dummy, dummy)
    return accelerator, values


def test_datasets_of_megatron_lm_are_read_and_resumed(tmp_path: Path) -> None:
    accelerator, (model, optimizer, train, validation, test) = loaders(tmp_path)
    assert test is None
    assert accelerator.state.megatron_lm_plugin is not None
    assert accelerator.state.megatron_lm_plugin.global_batch_size == 4
    assert len(train) == 32 // 4  # batches: samples of 8 tokens, four at a time
    assert next(validation)["text"].shape == (4, LENGTH + 1)
    seen: list[Any] = []
    for step in range(2 * len(train) + 3):
        batch = next(train)
        seen.append(batch["text"])
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == len(train) + 1:
            accelerator.save_state(tmp_path / "state")
    first, second = (torch.cat(seen[begin : begin + len(train)]) for begin in (0, len(train)))
    assert not torch.equal(first, second)
    assert sorted(first.tolist()) == sorted(second.tolist())
    accelerator.free_memory()
    accelerator, (model, optimizer, train, *_) = loaders(tmp_path)
    next(train)
    accelerator.load_state(tmp_path / "state")
    torch.testing.assert_close(next(train)["text"], seen[len(train) + 2], rtol=0, atol=0)
    assert len(list(train)) in (len(train), len(train) - 3)  # a loop reads one pass


def test_datasets_of_a_script_take_their_place(tmp_path: Path) -> None:
    asked: list[Any] = []

    def provider(samples: list[int]) -> Any:
        asked.extend(samples)
        return [{"text": row} for row in TOKENS], None, None

    plugin = MegatronLMPlugin(
        num_micro_batches=2, train_iters=10, eval_interval=4, eval_iters=3,
        custom_megatron_datasets_provider_function=provider,
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    loader = accelerator.prepare(MegatronLMDummyDataLoader(micro_batch_size=2))
    assert asked == [40, 36, 12]
    assert len(next(loader)["text"]) == 4


def test_generation_calls_the_model_itself() -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(custom_train_step_class=GPTTrainStep))
    model: Any = as_engine(accelerator, model_of(gpt2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generated = model.eval().generate(TOKENS[:1], max_new_tokens=2, do_sample=False)
        greedy = model.megatron_generate(TOKENS[:1], max_new_tokens=2, top_k=1)
        torch.manual_seed(0)
        sampled = model.megatron_generate(TOKENS[:1], max_new_tokens=2, temperature=2.0, top_p=0.9)
        torch.manual_seed(0)
        options = {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "top_k": 0}
        expected = model.generate(TOKENS[:1], max_new_tokens=2, **options)
        beams = model.megatron_generate(TOKENS[:1], max_length=LENGTH + 2, num_beams=2)
    assert generated.shape[1] > LENGTH
    assert greedy.tolist() == generated.tolist()
    assert sampled.tolist() == expected.tolist()
    assert beams.shape[1] == LENGTH + 2
    plain: Any = as_engine(accelerator, nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match=r"megatron_generate needs a model with generate"):
        plain.megatron_generate(TOKENS)
    assert model(input_ids=TOKENS).loss.ndim == 0
    del accelerator
    with pytest.raises(StateError, match="The Accelerator that prepared this model no longer exists"):
        model(input_ids=TOKENS)


def test_a_short_last_batch_makes_an_update() -> None:
    rows: Any = [{"input_ids": row} for row in TOKENS[:6]]
    plugin = MegatronLMPlugin(num_micro_batches=2, custom_train_step_class=GPTTrainStep, gradient_clipping=0)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model: Any = model_of(gpt2)
    loader: Any = DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert [len(batch["input_ids"]) for batch in loader] == [4, 2]
    expected: Any = model_of(gpt2)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.sync_gradients
        other = expected(**batch, labels=batch["input_ids"]).loss
        torch.testing.assert_close(loss, other.detach(), rtol=1e-6, atol=0)
        other.backward()
        for parameter in expected.parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(ConfigurationError, match=r"custom_train_step_kwargs=\{'a': 1\} need custom_train_step_class"):
        MegatronLMPlugin(custom_train_step_kwargs={"a": 1})
    with pytest.raises(ConfigurationError, match="Unknown argument of MegatronLMDummyDataLoader 'seq_len'"):
        MegatronLMDummyDataLoader(seq_len=3)
    plugin = MegatronLMPlugin(custom_train_step_class=GPTTrainStep)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model: Any = accelerator.prepare(model_of(gpt2))
    with pytest.raises(ConfigurationError, match="the same number of rows"):
        model(input_ids=TOKENS, labels=TOKENS[:2])
    with pytest.raises(ConfigurationError, match="A train step needs a DataLoader with batch_size="):
        accelerator.prepare(DataLoader(cast(Any, [1, 2]), batch_size=None))
    with pytest.raises(ConfigurationError, match="MegatronLMDummyDataLoader needs data_path"):
        accelerator.prepare(MegatronLMDummyDataLoader(micro_batch_size=1, seq_length=2))
    with pytest.raises(ConfigurationError, match="prepare got 4 MegatronLMDummyDataLoaders"):
        accelerator.prepare(*[MegatronLMDummyDataLoader()] * 4)
    plugin.custom_train_step_class = AbstractTrainStep
    plugin.custom_train_step_kwargs = {"name": "x"}
    with pytest.raises(ConfigurationError, match="AbstractTrainStep has no forward_step"):
        accelerator.prepare(nn.Linear(1, 1))
    plugin.context_parallel_size = 2
    with pytest.raises(UnsupportedError, match=r"context_parallel_size=2\) does not work with train steps"):
        accelerator.prepare(nn.Linear(1, 1))


def test_values_of_all_replicas_are_gathered() -> None:
    gathered = gather_across_data_parallel_groups([torch.tensor(1.0), torch.ones(2)])
    assert [value.tolist() for value in gathered] == [[1.0], [1.0, 1.0]]


def test_a_schedule_of_samples_and_weight_decay() -> None:
    model = nn.Linear(2, 1)
    plugin = MegatronLMPlugin(
        train_samples=32, lr_warmup_fraction=0.25, weight_decay_incr_style="linear", start_weight_decay=0.1,
        end_weight_decay=0.5,
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    groups: Any = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    loader: Any = DataLoader(cast(Any, [torch.ones(2)] * 8), batch_size=4)
    dummy = MegatronLMDummyScheduler(optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, dummy)
    rates: list[float] = []
    decays: list[float] = []
    states: list[Any] = []
    for _ in range(9):
        rates.append(schedule.get_last_lr()[0])
        decays.append(optimizer.param_groups[0]["weight_decay"])
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        schedule.step()
        states.append(schedule.state_dict())
        assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert rates == pytest.approx([0, 0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])  # eight updates of four samples
    assert decays == pytest.approx([0.1 + 0.05 * step for step in range(9)])
    schedule.load_state_dict(states[2])
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(decays[3])


def test_uneven_micro_batches_are_one_big_batch() -> None:
    expected: Any = model_of(gpt2)
    loss = expected(input_ids=TOKENS[:7], labels=TOKENS[:7]).loss
    loss.backward()
    accelerator, model, optimizer = prepared(model_of(gpt2), num_micro_batches=2, custom_train_step_class=GPTTrainStep)
    assert accelerator.state.megatron_lm_plugin is not None
    accelerator.state.megatron_lm_plugin.micro_batch_size = 1  # of a loader for evaluation
    assert [len(part["x"]) for part in model.get_batch_data_iterator({"x": TOKENS[:7]})] == [4, 3]
    outputs = model(input_ids=TOKENS[:7])
    torch.testing.assert_close(outputs.loss, loss.detach(), rtol=1e-6, atol=0)
    optimizer.step()  # which divides by the rows
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other - 0.1 * other.grad, rtol=1e-6, atol=1e-6)
    model.eval()
    with pytest.raises(ConfigurationError, match="does not require gradients"):
        accelerator.backward(model(input_ids=TOKENS).loss)


def test_a_window_without_a_token_has_loss_0() -> None:
    _accelerator, model, _ = prepared(model_of(gpt2), calculate_per_token_loss=True)
    assert model(input_ids=TOKENS, labels=torch.full_like(TOKENS, -100)).loss.item() == 0


def test_decoders_start_with_the_token_of_the_configuration() -> None:
    model: Any = model_of(t5)
    model.config.decoder_start_token_id, model.config.pad_token_id = 3, 5
    expected = model(input_ids=TOKENS, labels=masked()).loss.detach()
    _accelerator, engine, _ = prepared(model, custom_train_step_class=T5TrainStep)
    torch.testing.assert_close(engine(input_ids=TOKENS, labels=masked()).loss, expected)
    engine.train_step_handler.args.decoder_start_token_id = None
    with pytest.raises(ConfigurationError, match="T5TrainStep needs decoder_start_token_id"):
        engine(input_ids=TOKENS, labels=masked())


def test_masks_of_ends_of_texts_need_ends() -> None:
    model: Any = model_of(gpt2)
    model.config.eos_token_id = [0, 1]
    expected = model(input_ids=TOKENS, labels=torch.where(TOKENS.roll(1, 1) < 2, -100, TOKENS)).loss.detach()
    accelerator, engine, _ = prepared(model, eod_mask_loss=True)
    torch.testing.assert_close(engine(input_ids=TOKENS).loss, expected)
    model = model_of(gpt2)
    model.config.eos_token_id = None
    with pytest.raises(ConfigurationError, match="needs the token that ends a text"):
        accelerator.prepare(model)
    for make in (bert, t5):
        with pytest.raises(ConfigurationError, match="needs GPTTrainStep"):
            accelerator.prepare(model_of(make))


def test_the_second_task_of_bert_is_not_weighed_by_tokens() -> None:
    _accelerator, model, _ = prepared(model_of(pretraining), calculate_per_token_loss=True)
    with pytest.raises(UnsupportedError, match="does not work with BERT's second task"):
        model(**BATCHES["both tasks"][2])
