"""Small models of six architectures, with inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 200


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def architectures() -> dict[str, Callable[[], nn.Module]]:
    import transformers

    hf: Any = transformers

    small: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    gpt2 = hf.GPT2Config(
        n_layer=3, n_embd=32, vocab_size=VOCABULARY, n_positions=64, n_head=4, bos_token_id=1, eos_token_id=2
    )
    t5 = hf.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    mixtral = hf.MixtralConfig(num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4, **small)
    return {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=3, **small)),
        "gpt2": lambda: hf.GPT2LMHeadModel(gpt2),
        "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(num_hidden_layers=3, **small)),
        "t5": lambda: hf.T5ForConditionalGeneration(t5),
        "mixtral": lambda: hf.MixtralForCausalLM(mixtral),
        "convolutions": Convolutions,
    }


BLOCKS = ["LlamaDecoderLayer", "GPT2Block", "BertLayer", "T5Block", "MixtralDecoderLayer"]


def made(name: str) -> nn.Module:
    """Return a model with random weights, ready to evaluate."""
    torch.manual_seed(0)
    model = architectures()[name]()
    if name == "convolutions":
        model(torch.randn(8, 3, 8, 8))  # statistics of BatchNorm
    return model.eval()


def output(model: nn.Module, name: str) -> Tensor:
    """Return the output for fixed inputs; for models that generate also what they do."""
    random = torch.Generator().manual_seed(1)
    if name == "convolutions":
        return model(torch.randn(2, 3, 8, 8, generator=random))
    tokens = torch.randint(5, VOCABULARY, (2, 7), generator=random)
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if name == "t5":
        inputs["decoder_input_ids"] = tokens[:, :5]
    with torch.no_grad():
        logits = model(**inputs).logits
    if name == "bert":
        return logits
    generate: Any = model.generate
    written = generate(
        tokens, attention_mask=inputs["attention_mask"], max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    return torch.cat([logits.flatten(), written.flatten().float()])
