"""Training on parts of sequences (cp_size, sp_size) against training on whole ones."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.trainer.fit.meshes import OF_SEQUENCES
from tests.worlds import run_world
from trainer_lib import Accelerator, ParallelismConfig, Trainer, TrainingArguments
from trainer_lib.callbacks import SAM, LabelSmoothing, SampleLosses
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.launchers import ProcessFailedError
from trainer_lib.options.parallel.pipeline_options import TorchPipelineParallelConfig
from trainer_lib.options.parallel.sequence_options import TorchContextParallelConfig
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelConfig
from trainer_lib.trainer.data.packing import PackedDataset

WORDS = 31


class Losses(Callback):
    """Keeps what each log says."""

    def __init__(self) -> None:
        self.logs: list[tuple[float, float]] = []

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.logs.append((values["loss"], values.get("accuracy", values["grad_norm"])))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inner = heads, nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inner(inputs).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return inputs + self.outer(out.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """A language model that knows positions by its causal attention alone."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList([Attention(16, 4) for _ in range(layers)])
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).transpose(1, 2).contiguous()


def plain(**options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens = torch.randint(0, WORDS, (16, 24), generator=torch.Generator().manual_seed(1))
    data = [(row[:-1], row[1:]) for row in tokens]
    return {"model": Plain(), "train_dataset": data, "loss_fn": F.cross_entropy, **options}


def llama(**options: Any) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    generator = torch.Generator().manual_seed(1)
    lengths = [7, 21, 14, 9, 30, 5, 17, 11, 23, 8, 19, 26, 6, 13, 10, 28]
    rows = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]
    return {"model": LlamaForCausalLM(config), "train_dataset": data, "collate_fn": padded, **options}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
        for name, value in filled.items()
    }


def trained(parts: dict[str, Any], parallelism: ParallelismConfig | None, **options: Any) -> list[tuple[float, float]]:
    losses = Losses()
    defaults: dict[str, Any] = {
        "max_steps": 4,  # each sample once
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "log_every": 1,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "progress_bar": False,
        "seed": 3,
    }
    callbacks: list[Callback] = [make() for make in options.pop("callbacks", ())]
    args = TrainingArguments(**{**defaults, **options}, parallelism=parallelism)
    Trainer(args=args, callbacks=[losses, *callbacks], **parts).fit()
    return losses.logs


def check(parts: Any, ranks: int, config: dict[str, Any], **options: Any) -> None:
    """Compare the logs of every rank with those of one process that has whole sequences."""
    per_rank = options.pop("per_rank", {})
    expected = run_world(lambda: trained(parts(), None, **options), num_processes=1)[0]
    found = run_world(
        lambda: trained(parts(), ParallelismConfig(**config), **{**options, **per_rank}), num_processes=ranks
    )
    assert len(expected) == options.get("max_steps", 4)
    for logs in found:
        for (loss, norm), (expected_loss, expected_norm) in zip(logs, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert norm == pytest.approx(expected_norm, rel=2e-6)


def ring(**options: Any) -> TorchContextParallelConfig:
    return TorchContextParallelConfig("ring", **options)


@pytest.mark.slow
def test_a_model_of_transformers_trains_on_parts_as_on_whole_sequences() -> None:
    check(llama, 2, {"cp_size": 2}, max_steps=3)


def test_a_plain_model_trains_on_parts_as_on_whole_sequences() -> None:
    check(plain, 2, {"cp_size": 2, "cp_handler": ring()}, max_steps=3)


def test_sam_climbs_and_descends_on_parts_as_on_whole_sequences() -> None:
    check(plain, 2, {"cp_size": 2}, max_steps=3, callbacks=[partial(SAM, 0.5)])


@pytest.mark.parametrize("model", [plain, llama])
def test_training_metrics_are_those_of_whole_sequences(model: Any) -> None:
    check(partial(model, train_metrics=["accuracy"]), 2, {"cp_size": 2})


def test_what_needs_whole_samples_is_refused() -> None:
    def rows(predictions: Any, labels: Any) -> Any:
        return (predictions.argmax(1) == labels).float().mean(1)

    config = ParallelismConfig(cp_size=2)
    for options, callbacks in (({"train_metrics": {"hits": rows}}, []), ({}, [SampleLosses])):
        with pytest.raises(ProcessFailedError, match=r"of which a rank has parts with cp_size or sp_size"):
            run_world(partial(trained, plain(**options), config, callbacks=callbacks), num_processes=2)


def test_a_plain_model_trains_on_parts_of_sequences_and_of_matrices() -> None:
    plan = {"embedding": "embedding_colwise", "*.outer": "rowwise_split_input"}
    check(plain, 4, {"cp_size": 2, "tp_size": 2, "tp_handler": TorchTensorParallelConfig(plan=plan)}, max_steps=3)


def bert(**options: Any) -> dict[str, Any]:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    dropout: dict[str, Any] = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes, **dropout))
    data = llama()["train_dataset"]
    for row in data:
        row["labels"] = torch.where(torch.arange(len(row["labels"])) % 3 == 0, row["labels"], -100)
    return {"model": model, "train_dataset": data, "collate_fn": padded, **options}


def packed(**options: Any) -> dict[str, Any]:
    parts = llama()
    samples = [row["input_ids"].tolist() for row in parts["train_dataset"]]
    return {"model": parts["model"], "train_dataset": PackedDataset(samples, length=38), **options}


def sliding(**options: Any) -> dict[str, Any]:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = MistralConfig(vocab_size=WORDS, num_key_value_heads=2, sliding_window=9, **sizes)
    return {**llama(), "model": MistralForCausalLM(config), **options}


def gpt2(**options: Any) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=64, **none))
    return {**llama(), "model": model, **options}


def gpt2_with_dropout() -> dict[str, Any]:
    parts = gpt2()
    for name, module in parts["model"].named_modules():
        if name.endswith("attn_dropout"):
            module.p = 0.1
    return parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "config"),
    [
        (plain, {"cp_size": 4, "cp_handler": TorchContextParallelConfig("alltoall")}),
        (llama, {"cp_size": 4, "cp_handler": TorchContextParallelConfig("allgather", load_balance=False)}),
        (llama, {"sp_size": 4}),
        (bert, {"cp_size": 4, "cp_handler": ring()}),
        (bert, {"sp_size": 4}),
        (packed, {"cp_size": 4}),
        (packed, {"sp_size": 4}),
        (sliding, {"cp_size": 4, "cp_handler": ring(load_balance=False)}),
        (gpt2, {"cp_size": 4}),
        (llama, {"pp_size": 2, "sp_size": 2}),
    ],
)
def test_every_model_trains_on_parts_as_on_whole_sequences(parts: Any, config: dict[str, Any]) -> None:
    check(parts, 4, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "config"),
    [
        (llama, OF_SEQUENCES["cp2_dp2"]),
        (plain, {**OF_SEQUENCES["cp2_fsdp2"], "cp_handler": ring()}),
        (llama, OF_SEQUENCES["cp2_fsdp2"]),
        (llama, OF_SEQUENCES["sp2_fsdp2"]),
        (plain, OF_SEQUENCES["sp2_dp2"]),
    ],
)
def test_parts_of_sequences_combine_with_ddp_and_fsdp(parts: Any, config: dict[str, Any]) -> None:
    check(parts, 4, config, per_rank={"gradient_accumulation_steps": 1})


@pytest.mark.slow
def test_weights_are_sharded_over_the_ranks_of_sequences() -> None:
    check(llama, 2, {"cp_size": 2}, per_rank={"fsdp": True})
    check(llama, 2, {"cp_size": 2}, per_rank={"gradient_checkpointing": True})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", None])
def test_stages_compute_parts_of_sequences_and_recompute_them(schedule: str | None) -> None:
    """Documents differ between the micro-batches of a schedule, whose backwards compute attention again."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "max_steps": 2}
    config = {
        "pp_size": 2,
        "cp_size": 2,
        "cp_handler": ring(),
        "pp_handler": TorchPipelineParallelConfig(None, schedule),
    }
    check(packed, 4, config, gradient_checkpointing=True, **options)


@pytest.mark.slow
def test_a_zero_bubble_computes_parts_of_sequences() -> None:
    config = {"pp_size": 2, "cp_size": 2, "pp_handler": TorchPipelineParallelConfig(schedule="InterleavedZeroBubble")}
    check(lambda: plain(model=Plain(4)), 4, config, gradient_accumulation_steps=4, per_device_train_batch_size=1)


class Counting(Plain):
    """Counts positions itself, and so begins at 0 on every part."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + torch.arange(tokens.shape[1]).sin().unsqueeze(-1) / 100
        return self.head(self.layers[0](hidden)).transpose(1, 2)


class Eager(Plain):
    """Computes attention by hand, and so sees its part alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        weights = (hidden @ hidden.transpose(1, 2)).tril().softmax(-1)
        return self.head(weights @ hidden).transpose(1, 2)


def refusal(parts: dict[str, Any], **options: Any) -> str:
    before = [parameter.clone() for parameter in parts["model"].parameters()]
    with pytest.raises((ConfigurationError, UnsupportedError)) as refused:
        trained(parts, ParallelismConfig(cp_size=2), **options)
    pairs = zip(before, parts["model"].parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
    return str(refused.value)


def test_models_that_need_whole_sequences_are_refused_before_the_first_step() -> None:
    def body() -> list[str]:
        torch.manual_seed(0)
        one_target = [(torch.arange(8), torch.tensor(0.0))] * 4
        return [
            refusal(plain(model=Counting())),
            refusal(plain(model=Eager())),
            refusal(plain(train_dataset=one_target)),
            refusal(plain(), per_device_train_batch_size="auto"),
        ]

    counting, by_hand, one_target, auto = run_world(body)[0]
    assert counting.startswith("The loss of Counting changes when its sequences are cut: ")
    assert by_hand.startswith("The loss of Eager changes when its sequences are cut: ")
    assert "F.scaled_dot_product_attention" in by_hand
    assert "needs a target for each position" in one_target
    assert 'per_device_train_batch_size="auto" splits batches' in auto


@pytest.mark.slow
def test_models_of_transformers_that_need_whole_sequences_are_refused() -> None:
    def body() -> list[str]:
        eager, chunked = llama(), llama()
        eager["model"].set_attn_implementation("eager")
        chunked["model"].config.layer_types = ["full_attention", "chunked_attention"]
        return [refusal(eager), refusal(chunked), refusal(gpt2_with_dropout())]

    eager, chunked, dropout = run_world(body)[0]
    assert "LlamaForCausalLM uses attn_implementation='eager'" in eager
    assert "Set attn_implementation='sdpa'" in eager
    assert "LlamaForCausalLM has layers of chunked_attention" in chunked
    assert "no dropout of attention weights (got 0.1)" in dropout


def test_label_smoothing_needs_whole_sequences() -> None:
    def body() -> str:
        args = TrainingArguments(
            max_steps=1, use_cpu=True, progress_bar=False, parallelism=ParallelismConfig(cp_size=2)
        )
        with pytest.raises(UnsupportedError) as error:
            Trainer(args=args, callbacks=[LabelSmoothing(0.1)], **plain()).fit()
        return str(error.value)

    for message in run_world(body):
        assert "LabelSmoothing compares the outputs with the targets of whole sequences" in message


def test_heads_that_cannot_be_shared_out_are_an_error_before_anything_is_built() -> None:
    def body() -> list[str]:
        from transformers import LlamaConfig, LlamaForCausalLM

        accelerator, texts = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2)), list[str]()
        for heads in (1, 3):
            sizes: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1}
            model = LlamaForCausalLM(LlamaConfig(vocab_size=9, num_attention_heads=heads, **sizes))
            with pytest.raises(ConfigurationError) as refused:
                accelerator.prepare(model)
            texts.append(str(refused.value))
        return texts

    for one, three in run_world(body):
        assert one.startswith("sp_size=2 cannot share out the 1 attention heads of a rank (the model's, divided by tp_")
        assert "the 3 attention heads" in three
        assert "The nearest size that does is 1." in three


@pytest.mark.slow
def test_heads_that_a_plan_leaves_whole_are_shared_out() -> None:
    """With 6 heads on each of the ranks that split the other matrices, sp_size=2 has 3 for each."""

    def body() -> int:
        from transformers import LlamaConfig, LlamaForCausalLM

        plan = {"*.up_proj": "colwise", "*.gate_proj": "colwise", "*.down_proj": "rowwise"}
        config = ParallelismConfig(tp_size=2, sp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=9, num_attention_heads=6, **sizes))
        model, tokens = accelerator.prepare(model), torch.arange(8).reshape(1, 8)
        with accelerator.maybe_context_parallel([tokens], [1]):
            return model(tokens).logits.shape[1]

    assert run_world(body, (), 4, timeout=120) == [4] * 4


@pytest.mark.slow
def test_a_run_on_parts_resumes_evaluates_and_saves(tmp_path: Path) -> None:
    def run(folder: str, steps: int, resume: str, config: dict[str, Any]) -> tuple[list[Any], dict[str, float], Any]:
        losses, parts = Losses(), llama()
        args = TrainingArguments(
            output_dir=folder, max_steps=steps, schedule_steps=4, learning_rate=1e-2, log_every=1, save_every=2,
            per_device_train_batch_size=2, use_cpu=True, progress_bar=False, seed=3,
            parallelism=ParallelismConfig(**config),
        )  # fmt: skip
        trainer = Trainer(args=args, callbacks=[losses], eval_dataset=parts["train_dataset"], **parts)
        trainer.fit(resume=resume)
        trainer.save_model(folder + "/model")
        model: Any = trainer.unwrapped_model
        tokens = model.generate(torch.ones(1, 3).long(), max_new_tokens=4, do_sample=False)
        return losses.logs, trainer.evaluate(), tokens

    whole, again, other = (str(tmp_path / name) for name in ("whole", "again", "other"))
    first = run_world(run, (whole, 4, "never", {"cp_size": 2}))
    run_world(run, (again, 2, "never", {"cp_size": 2}))
    shutil.copytree(again, other)
    resumed = run_world(run, (again, 4, "extend", {"cp_size": 2}))
    (on_whole,) = run_world(run, (other, 4, "extend", {}), num_processes=1)
    (expected,) = run_world(run, (str(tmp_path / "one"), 4, "never", {}), num_processes=1)
    assert len(resumed[0][0]) == 2
    assert first[0][0][2:] == resumed[0][0]
    assert [log[0] for log in on_whole[0]] == pytest.approx([log[0] for log in expected[0][2:]], rel=1e-5)
    assert [log[0] for log in first[0][0]] == pytest.approx([log[0] for log in expected[0]], rel=1e-5)
    for each in first:
        assert each[1]["eval_loss"] == pytest.approx(expected[1]["eval_loss"], rel=1e-5)
        assert torch.equal(each[2], expected[2])
    assert "context_parallel" not in Path(whole, "model", "config.json").read_text()
