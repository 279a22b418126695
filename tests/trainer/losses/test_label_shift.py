"""Whether models shift their labels is measured, which decides how many targets a batch has."""

import copy
import importlib
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig

from tests.trainer.fit.test_exact_updates import IGNORED, arguments, train
from tests.worlds import run_world
from trainer_lib import Trainer
from trainer_lib.callbacks import LabelSmoothing
from trainer_lib.trainer.losses.label_shift import LabelShift, probing, shifts_labels

# Sizes, under the names that configurations have for them.
_SIZES = {
    16: "hidden_size d_model n_embd dim emb_dim embedding_size n_embed d_embed model_dim moe_intermediate_size",
    32: "hidden_dim intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner d_inner image_size",
    2: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads num_kv_heads "
    "encoder_attention_heads decoder_attention_heads num_key_value_heads num_encoder_attention_heads "
    "num_decoder_attention_heads num_experts num_local_experts n_routed_experts eos_token_id",
    1: "encoder_layers decoder_layers num_decoder_layers num_encoder_layers num_experts_per_tok bos_token_id "
    "decoder_start_token_id",
    8: "d_kv head_dim d_head",
    50: "vocab_size",
    64: "max_position_embeddings n_positions n_ctx",
    0: "pad_token_id",
}
# What each of them does is read from its source: only the name of the class says otherwise for some.
_SHIFTS = {
    "GPT2LMHeadModel": True, "LlamaForCausalLM": True, "BertLMHeadModel": True, "BertGenerationDecoder": True,
    "Gemma3ForCausalLM": True, "GPT2DoubleHeadsModel": True, "Qwen2AudioForConditionalGeneration": True,
    "BartForCausalLM": False, "MBartForCausalLM": False, "PegasusForCausalLM": False, "BlenderbotForCausalLM": False,
    "TrOCRForCausalLM": False, "ProphetNetForCausalLM": False, "XLNetLMHeadModel": False, "XLMWithLMHeadModel": False,
    "FlaubertWithLMHeadModel": False, "BertForMaskedLM": False, "T5ForConditionalGeneration": False,
    "BartForConditionalGeneration": False, "BertForTokenClassification": False,
}  # fmt: skip


def shrunk(config: Any, causal: bool = False) -> Any:
    for value, names in _SIZES.items():
        for name in names.split():
            with suppress(NotImplementedError):  # as a configuration says of some names
                if hasattr(config, name):
                    setattr(config, name, value)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 1
    for name, value in list(vars(config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    if causal and hasattr(config, "is_decoder"):
        config.is_decoder = True
    for part in list(vars(config).values()):
        if isinstance(part, PretrainedConfig):
            shrunk(part, causal)
    return config


def tiny(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(shrunk(cls.config_class(), causal="CausalLM" in name or "LMHead" in name)).float()
    for parameter_name, parameter in model.named_parameters():
        if "encoder_attn" in parameter_name or parameter_name.endswith(("mask_emb", "seg_embed", "r_s_bias")):
            parameter.requires_grad_(False)  # which these batches do not use
    return model


def batches(count: int, labels_up_to: int = 20) -> list[dict[str, Tensor]]:
    """Rows with different numbers of valid labels, down to one."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 20, (count, 7), generator=generator)
    lengths = torch.randint(1, 8, (count,), generator=generator)
    labels = (tokens % labels_up_to).masked_fill(torch.arange(7) >= lengths[:, None], IGNORED)
    return [{"input_ids": row, "labels": targets} for row, targets in zip(tokens, labels, strict=True)]


def big_batch_losses(model: Any, data: list[dict[str, Tensor]], size: int) -> list[float]:
    """Return the losses of a model on batches of rows."""
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    return [model(**{key: torch.stack([row[key] for row in part]) for key in part[0]}).loss.item() for part in parts]


@pytest.mark.parametrize("name", sorted(_SHIFTS))
def test_the_first_batch_shows_whether_a_model_shifts_its_labels(name: str) -> None:
    model = tiny(name)
    batch = {key: torch.stack([row[key] for row in batches(2, 2)]) for key in ("input_ids", "labels")}
    model.train()
    drawn = torch.get_rng_state()
    assert shifts_labels(model, batch) is _SHIFTS[name]
    assert model.training
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "name",
    ["BartForCausalLM", "XLNetLMHeadModel", "TrOCRForCausalLM", "BertGenerationDecoder", "GPT2LMHeadModel"],
)
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_updates_equal_those_of_one_big_batch(name: str, processes: int) -> None:
    data = batches(14)

    def body() -> list[float]:
        options = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=2)
        return train(Trainer(tiny(name), options, train_dataset=data)).losses

    expected = big_batch_losses(tiny(name), data, 4 * processes)
    for losses in run_world(body, (), processes, timeout=60) if processes > 1 else [body()]:
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["BartForCausalLM", "GPT2LMHeadModel"])
def test_smoothing_compares_what_the_model_compares(name: str) -> None:
    model, data, shift = tiny(name), batches(8), int(_SHIFTS[name])
    losses = train(Trainer(model, arguments(), train_dataset=data, callbacks=[LabelSmoothing(0.2)])).losses
    expected: list[float] = []
    for start in (0, 4):
        batch = {key: torch.stack([row[key] for row in data[start : start + 4]]) for key in data[0]}
        logits, labels = model(batch["input_ids"]).logits, batch["labels"][:, shift:]
        smoothed = cross_entropy(logits[:, : 7 - shift].flatten(0, 1), labels.flatten(), label_smoothing=0.2)
        expected.append(smoothed.item())
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["BartForCausalLM", "GPT2LMHeadModel"])
def test_sharded_models_are_measured_on_all_ranks(name: str) -> None:
    data = batches(14)

    def body() -> list[float]:
        options = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=2, fsdp=True)
        return train(Trainer(tiny(name), options, train_dataset=data)).losses

    expected = big_batch_losses(tiny(name), data, 8)
    for losses in run_world(body, (), 2, timeout=60):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_answers_after_the_end_of_the_text_are_not_counted() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 20, (12, 7), generator=generator)
    starts = torch.tensor([0, 9, 9, 9, 3, 2, 9, 1, 5, 5, 9, 9])
    rows = zip(tokens, starts, starts + 1, strict=True)
    data = [dict(zip(("input_ids", "start_positions", "end_positions"), row, strict=True)) for row in rows]
    model = tiny("BertForQuestionAnswering")
    reference = copy.deepcopy(model)
    options = arguments(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    losses = train(Trainer(model, options, train_dataset=data)).losses
    for step, start in enumerate(range(0, 12, 6)):
        part = data[start : start + 6]
        loss = reference(**{key: torch.stack([row[key] for row in part]) for key in part[0]}).loss
        assert losses[step] == pytest.approx(loss.item(), rel=1e-6)


class Shifting(nn.Module):
    """A model outside of transformers: its class name decides, since it may not ignore -100."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, labels: Tensor) -> Any:
        self.calls += 1
        return {"loss": labels.float().mean()}


class ShiftingForCausalLM(Shifting):
    pass


def test_models_outside_of_transformers_are_not_measured() -> None:
    batch = {"labels": torch.ones(2, 3, dtype=torch.int64)}
    for model, expected in ((Shifting(), False), (ShiftingForCausalLM(), True)):
        assert LabelShift(model, False, None)(batch) is expected
        assert model.calls == 0


def test_a_model_is_measured_once_and_only_with_token_labels() -> None:
    model: Any = tiny("GPT2LMHeadModel")
    forward, asked = model.forward, list[Any]()
    model.forward = lambda **inputs: asked.append(inputs) or forward(**inputs)
    shift = LabelShift(model, False, None)
    tokens = torch.arange(3, 9).reshape(2, 3)
    assert shift({"input_ids": tokens, "labels": torch.tensor([0, 1])})  # by name
    assert not asked
    for _ in range(2):
        assert shift({"input_ids": tokens, "labels": tokens})
    assert len(asked) == 1


@contextmanager
def at_most(seconds: int) -> Generator[None]:
    def end(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def heads() -> list[str]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    kinds = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING")
    listed = [name for kind in kinds for name in getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values()]
    flat = [name for names in listed for name in ([names] if isinstance(names, str) else names)]
    return sorted(set(flat))


@pytest.mark.slow
def test_the_label_shift_of_every_head_of_transformers_is_detected(request: pytest.FixtureRequest) -> None:
    """The logits of a head show the expected answer: its loss is the cross entropy with unshifted or shifted labels.

    Every eighth head in turn; all of them with `--soak`.
    """
    every = 1 if request.config.getoption("--soak") else 8
    judged: dict[str, bool] = {}
    wrong: list[str] = []
    for name in heads()[::every]:
        try:
            with at_most(10):
                model = tiny(name).eval()
                tokens = torch.randint(3, 20, (2, 6), generator=torch.Generator().manual_seed(1))
                with torch.no_grad():
                    outputs = model(input_ids=tokens, labels=tokens)
                logits = outputs.logits.float()
                plain = cross_entropy(logits.flatten(0, -2), tokens.flatten()).item()
                shifted = cross_entropy(logits[:, :-1].flatten(0, -2), tokens[:, 1:].flatten()).item()
                loss = outputs.loss.item()
                if abs(plain - shifted) < 1e-3 or min(abs(loss - plain), abs(loss - shifted)) > 1e-5 * loss:
                    continue  # its loss has other parts, or its logits other rows
                judged[name] = abs(loss - shifted) < abs(loss - plain)
                if shifts_labels(model, {"input_ids": tokens, "labels": tokens}) is not judged[name]:
                    wrong.append(name)
        except Exception:  # noqa: BLE001 - a tiny model cannot be made, or wants images
            continue
    assert not wrong
    assert len(judged) > 120 / every
    assert 10 / every < sum(not shifts for shifts in judged.values()) < len(judged) - 60 / every


def test_a_model_that_is_probed_draws_afterwards_what_it_would_have() -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.drawn_from = torch.Generator().manual_seed(3)
    before = model.drawn_from.get_state()
    with probing(model):
        torch.rand(4, generator=model.drawn_from)
    assert torch.equal(model.drawn_from.get_state(), before)


def test_a_model_that_is_probed_counts_afterwards_as_before() -> None:
    """As routers of transformers do, which remember the capacity of evaluations."""

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.capacity = 64
            self.mean: Any = None

    model = Counts()
    with probing(model):
        model.capacity, model.mean = 44, torch.nn.Parameter(torch.ones(2))
    assert model.capacity == 64
    assert isinstance(model.mean, torch.nn.Parameter)
