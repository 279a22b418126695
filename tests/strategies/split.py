"""The models and the loop of the tests of tensor parallelism."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from trainer_lib.state import PartialState
from trainer_lib.utils import TorchTensorParallelConfig

VOCABULARY, LENGTH = 64, 8


class Perceptron(nn.Module):
    """A block of a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


class Plain(nn.Module):
    """A plain module: an embedding, two blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([Perceptron() for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


PLAIN = {"*.up": "colwise", "*.down": "rowwise"}
WITH_VOCABULARY = {**PLAIN, "embed": "rowwise", "head": "colwise_gather_output"}
WITH_LOGITS = {**WITH_VOCABULARY, "head": "colwise_loss_parallel"}
SEQUENCES = {
    "embed": "rowwise_scatter_sequence",
    "*.norm": "sequence_parallel_gather",
    "*.up": "colwise",
    "*.down": "rowwise_scatter_sequence",
    "norm": "sequence_parallel_gather",
}
LLAMA_SEQUENCES = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.0": "scatter_sequence",
    "*.*_layernorm": "sequence_parallel",
    "*.self_attn": "gather_sequence",
    "*.[qkv]_proj": "colwise",
    "*.o_proj": "rowwise_scatter_sequence",
    "*.mlp": "gather_sequence",
    "*.gate_proj": "colwise",
    "*.up_proj": "colwise",
    "*.down_proj": "rowwise_scatter_sequence",
    "model.norm": "sequence_parallel_gather",
    "lm_head": "colwise_gather_output",
}


def llama(layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {**_SMALL, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, max_position_embeddings=32, **sizes))


def qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, tie_word_embeddings=True, **_SMALL
    )
    return Qwen3ForCausalLM(config)


def mixtral(**options: Any) -> nn.Module:
    """Return a model of experts, whose loss has a part for balancing them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = MixtralConfig(
        num_key_value_heads=2, max_position_embeddings=32, router_aux_loss_coef=0.1, **{**experts, **options}, **_SMALL
    )
    return MixtralForCausalLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(max_position_embeddings=32, **_NO_DROPOUT, **_SMALL))


def roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(RobertaConfig(max_position_embeddings=32, **_NO_DROPOUT, **_SMALL))


def electra() -> nn.Module:
    from transformers import ElectraConfig, ElectraForMaskedLM

    return ElectraForMaskedLM(ElectraConfig(embedding_size=16, max_position_embeddings=32, **_NO_DROPOUT, **_SMALL))


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    sizes: dict[str, Any] = {
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return DistilBertForMaskedLM(DistilBertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))


def opt() -> nn.Module:
    """Return a model whose attention arranges its projections by the number of heads."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "max_position_embeddings": 32}
    return OPTForCausalLM(
        OPTConfig(**sizes, **{name: size for name, size in _SMALL.items() if name != "intermediate_size"})
    )


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    parts = ("encoder", "decoder")
    sizes: dict[str, Any] = {f"{part}_layers": 2 for part in parts} | {f"{part}_ffn_dim": 48 for part in parts}
    sizes |= {f"{part}_attention_heads": 4 for part in parts}
    options: dict[str, Any] = {"d_model": 32, "dropout": 0.0, "max_position_embeddings": 32}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, **sizes, **options))


def t5(kind: str = "T5", **options: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **options)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


class Pictures(nn.Module):
    """A model of pictures, which it makes of numbers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.tp_plan = model, model.config, model.tp_plan

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        waves = [torch.sin(input_ids * float(channel + 1)) for channel in range(3)]
        logits = self.model(pixel_values=torch.stack([wave[:, None] * wave[:, :, None] for wave in waves], 1)).logits
        return {"loss": cross_entropy(logits, labels[:, 0] % logits.shape[1]), "logits": logits}


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {name: value for name, value in _SMALL.items() if name != "vocab_size"}
    sizes |= {"image_size": LENGTH, "patch_size": 4, "num_labels": 3}
    return Pictures(ViTForImageClassification(ViTConfig(**_NO_DROPOUT, **sizes)))


class Attends(nn.Module):
    """A plain module with attention, which arranges its projections by the number of heads, and the size of a head."""

    def __init__(self, knows_size: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.n_heads, self.n_kv_heads = 4, 2
        if knows_size:
            self.head_dim = 4
        self.q_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k_proj, self.v_proj = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        rows, length, _ = hidden.shape
        queries = self.q_proj(hidden).view(rows, length, self.n_heads, -1).transpose(1, 2)
        keys, values = (
            part(hidden).view(rows, length, self.n_kv_heads, -1).transpose(1, 2) for part in (self.k_proj, self.v_proj)
        )
        outputs = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        logits = self.head(hidden + self.o_proj(outputs.transpose(1, 2).reshape(rows, length, -1)))
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


ATTENTION = {"*[qkv]_proj": "colwise", "o_proj": "rowwise", "embed": "rowwise", "head": "colwise_gather_output"}


def gpt2(layers: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = GPT2Config(vocab_size=VOCABULARY - 1, n_embd=32, n_layer=layers, n_head=4, n_positions=32, **none)
    return GPT2LMHeadModel(config)  # an odd vocabulary, and a head tied to the embedding


def adapted(kind: Callable[[], nn.Module], targets: Any = "all-linear", **options: Any) -> nn.Module:
    """Return a model with adapters of LoRA that change its outputs from the start."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(action="ignore"):  # PEFT calls what transformers deprecate
        model: Any = get_peft_model(kind(), LoraConfig(r=4, target_modules=targets, **options))  # type: ignore[arg-type]
    for name, weight in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.1)
    return model


_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass
class Split:
    """One way to train a model; `sizes` and `fsdp` do not count in one process."""

    kind: Callable[[], nn.Module] = Plain
    sizes: dict[str, Any] = field(default_factory=lambda: {"tp_size": 2})
    plan: Mapping[str, str] | None = None
    loss_parallel: bool = False
    fsdp: bool = False
    precision: str = "no"
    weighted: bool = False
    steps: int = 2
    updates: int = 3
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def model_of(kind: Callable[[], nn.Module]) -> nn.Module:
    """Return the model, always with the same weights."""
    torch.manual_seed(0)
    return kind()


def data(count: int = 12) -> Any:
    """Return sequences: as many as one and a half windows of an update, unless told otherwise."""
    tokens = torch.randint(0, VOCABULARY - 1, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.roll(1)} for row in tokens]


def accelerator_for(case: Split, **options: Any) -> Accelerator:
    """Return an Accelerator with the mesh of a case, or without one in a single process."""
    if PartialState(cpu=True).num_processes == 1:
        return Accelerator(cpu=True, mixed_precision=case.precision, **options)
    handler = TorchTensorParallelConfig(plan=case.plan, loss_parallel=case.loss_parallel)
    return Accelerator(
        cpu=True,
        mixed_precision=case.precision,
        parallelism_config=ParallelismConfig(**case.sizes, tp_handler=handler),
        fsdp_plugin=FullyShardedDataParallelPlugin(**case.options) if case.fsdp else None,
        **options,
    )


def train(case: Split) -> dict[str, Any]:
    """Train, and return what one process and several must agree on."""
    accelerator = accelerator_for(case, gradient_accumulation_steps=case.steps)
    model = model_of(case.kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # Adam would amplify the last bits
    replicas = accelerator.data_group.size
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data(), batch_size=4 // replicas, shuffle=True, generator=torch.Generator())
    )
    losses: list[float] = []
    norms: list[float] = []
    stored = 0
    while len(norms) < case.updates:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                rows = len(batch["input_ids"])
                if case.weighted:
                    accelerator.backward(loss, weight=float(rows), is_mean=True)
                else:
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            sums = accelerator.gather_for_metrics((loss.detach() * rows).repeat(rows))
            losses.append(float(accelerator.gather(loss.detach()).mean()))
            stored += len(sums)
            if len(norms) == case.updates:
                break
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "stored": stored, "state": state, "parts": parts_of(model)}


def assert_as_one_process(case: Split, ranks: int, holds_less_than: float = math.inf) -> None:
    """Compare a way to train with the same on one process; each rank holds less than this fraction of its weights."""
    (expected,) = run_world(train, (case,), 1, timeout=90)
    for rank, actual in enumerate(run_world(train, (case,), ranks, timeout=90)):
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        assert actual["stored"] == expected["stored"], "no sample twice"
        assert actual["parts"] < holds_less_than
        if rank == 0:
            assert list(actual["state"]) == list(expected["state"])
            torch.testing.assert_close(actual["state"], expected["state"], rtol=1e-5, atol=1e-6)


def parts_of(model: nn.Module) -> float:
    """Return which fraction of the model's numbers this rank holds."""
    parameters: list[Any] = list(model.parameters())
    local = sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters)
    return local / sum(parameter.numel() for parameter in parameters)
