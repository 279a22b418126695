"""`Accelerator.maybe_context_parallel`: buffers cut in place, and attention over ranks for any loop."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainer.fit.test_sequence_parts import Plain
from tests.worlds import run_world
from trainer_lib import Accelerator, ParallelismConfig
from trainer_lib.accelerator.weighted_backward import WeightedLoss
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.launchers import ProcessFailedError
from trainer_lib.options.parallel.sequence_options import TorchContextParallelConfig
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelConfig

sdpa = F.scaled_dot_product_attention  # a name of the model's own file, which is replaced too


class Model(nn.Module):
    def __init__(self, mask: Any = None) -> None:
        super().__init__()
        self.embedding, self.inner, self.head, self.mask = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 9), mask

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + positions.unsqueeze(-1).sin()
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inner(hidden).chunk(3, -1))
        mask = None if self.mask is None else self.mask(tokens)
        out = sdpa(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.head(hidden + out.transpose(1, 2).flatten(2))


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, 9, (2, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:], torch.arange(16).repeat(2, 1)


def gradient(config: ParallelismConfig | None, mask: Any = None, name: str = "embedding") -> Tensor:
    """Return the gradient of a layer's weights after a loop as written for Accelerate."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = accelerator.prepare(Model(mask))
    inputs, labels, positions = tensors()
    with accelerator.maybe_context_parallel(
        buffers=[inputs, labels, positions], buffer_seq_dims=[1, 1, 1], no_restore_buffers={positions}
    ):
        loss = F.cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten())
        accelerator.backward(loss)
    assert torch.equal(inputs, tensors()[0])
    assert torch.equal(labels, tensors()[1])
    assert positions.shape[1] == 16 // (1 if config is None else config.sizes["cp"] * config.sizes["sp"])
    found = accelerator.unwrap_model(model).get_parameter(f"{name}.weight").grad
    assert found is not None
    return found


def padding(tokens: Tensor) -> Tensor:
    return (tokens != 3)[:, None, None, :]


@pytest.mark.parametrize("mask", [None, padding])
def test_a_loop_has_the_gradients_of_whole_sequences(mask: Any) -> None:
    def body() -> list[Tensor]:
        configs = [
            ParallelismConfig(cp_size=2),
            ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig("ring", load_balance=False)),
            ParallelismConfig(sp_size=2),
        ]
        found: list[Tensor] = []
        for config in configs:
            found.append(gradient(config, mask))
            Accelerator(cpu=True, parallelism_config=config).free_memory()
        return found

    (expected,) = run_world(lambda: gradient(None, mask), num_processes=1)
    assert float(expected.abs().max()) > 1e-3
    for found in run_world(body):
        for each in found:
            torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-7)


def llama_gradient(config: ParallelismConfig | None) -> Tensor:
    """Return a gradient of a model of transformers, with a mask of padding that is not cut."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = accelerator.prepare(LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes, **heads)))
    inputs, labels, positions = tensors()
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, :5] = 0
    labels = labels.masked_fill(mask == 0, -100)
    buffers = [inputs, labels, positions]
    with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
        batch = {"input_ids": inputs, "attention_mask": mask, "position_ids": positions}
        loss = model(**batch, labels=labels, shift_labels=labels, num_items_in_batch=torch.tensor(27.0)).loss
        accelerator.backward(loss * accelerator.num_processes)
    bare: Any = accelerator.unwrap_model(model)
    return bare.model.embed_tokens.weight.grad


@pytest.mark.slow
def test_a_model_of_transformers_takes_masks_of_whole_sequences() -> None:
    (expected,) = run_world(lambda: llama_gradient(None), num_processes=1)
    assert float(expected.abs().max()) > 1e-4
    for config in (ParallelismConfig(cp_size=2), ParallelismConfig(sp_size=2)):
        for found in run_world(llama_gradient, (config,)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def _packed() -> Any:
    """Compute packed documents, which position_ids show."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    positions = torch.cat([torch.arange(7), torch.arange(9)]).repeat(2, 1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=9, use_cache=False, num_attention_heads=4, **sizes)), positions, {}


def _with_image() -> Any:
    """Compute tokens of an image, which attend to each other in both directions."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    image: dict[str, Any] = {"num_attention_heads": 2, "image_size": 14, "patch_size": 7}
    tokens: dict[str, Any] = {"image_token_id": 8, "mm_tokens_per_image": 4}
    config = Gemma3Config(
        text_config={"vocab_size": 9, "use_cache": False, **sizes, **heads},
        vision_config={**sizes, **image},
        **tokens,
    )
    types = torch.zeros(2, 16, dtype=torch.int64)
    types[:, 3:9] = 1
    return Gemma3ForConditionalGeneration(config), torch.arange(16).repeat(2, 1), {"token_type_ids": types}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (_packed, "position_ids restart within a sequence, .* and maybe_context_parallel does not know them"),
        (_with_image, r"some positions attend to others by their content \(blockwise_overlay\)"),
    ],
)
@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"sp_size": 2}], ids=str)
def test_rules_of_transformers_that_need_whole_sequences_are_refused(
    kind: Any, error: str, sizes: dict[str, Any]
) -> None:
    def run() -> None:
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
        model, positions, types = kind()
        model = accelerator.prepare(model)
        batch = {"input_ids": torch.zeros(2, 16, dtype=torch.int64), "position_ids": positions, **types}
        buffers = list(batch.values())
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
            model(**batch)

    with pytest.raises(ProcessFailedError, match=error):
        run_world(run, timeout=120)


def modernbert_gradient(config: ParallelismConfig | None) -> Tensor:
    """Return a gradient of an encoder whose layers attend to a window around each position."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 9}
    tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 1)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    options = ModernBertConfig(**sizes, **tokens, pad_token_id=0, num_attention_heads=4, local_attention=4)
    model = ModernBertForMaskedLM(options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20 if parameter.ndim > 1 else 1)  # so that attention differs from position to position
    model = accelerator.prepare(model)
    inputs, labels, positions = tensors()
    buffers = [inputs, labels, positions]
    with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
        logits = model(input_ids=inputs, position_ids=positions).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        accelerator.backward(loss)
    bare: Any = accelerator.unwrap_model(model)
    return bare.get_input_embeddings().weight.grad


@pytest.mark.slow
def test_an_encoder_of_transformers_attends_to_windows_around_each_position() -> None:
    (expected,) = run_world(lambda: modernbert_gradient(None), num_processes=1)
    assert float(expected.abs().max()) > 1e-4
    for config in (ParallelismConfig(cp_size=2), ParallelismConfig(sp_size=2)):
        for found in run_world(modernbert_gradient, (config,)):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def state_after_a_window(config: ParallelismConfig | None) -> dict[str, Tensor]:
    """Return the weights after an update by two micro-batches, which a pipeline computes in its schedule."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=2)
    model: Any = Plain()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    tokens = torch.randint(0, 9, (2, 2, 17), generator=torch.Generator().manual_seed(0))
    batches = [(rows[:, :-1].clone(), rows[:, 1:].clone()) for rows in tokens]
    buffers = [tensor for batch in batches for tensor in batch]

    def loss_of(batch: tuple[Tensor, Tensor]) -> WeightedLoss:
        loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return WeightedLoss(loss, float(batch[1].numel()))

    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
        for number, batch in enumerate(batches):
            with accelerator.accumulate(model):
                if accelerator.takes_windows(model) and number == 1:
                    accelerator.backward_window(model, loss_of, batches)
                elif not accelerator.takes_windows(model):
                    part = loss_of(batch)
                    accelerator.backward(part.loss, weight=part.weight)
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.slow
def test_a_window_of_a_pipeline_runs_within_the_context() -> None:
    (expected,) = run_world(state_after_a_window, (None,), 1)
    found, *_ = run_world(state_after_a_window, (ParallelismConfig(pp_size=2, cp_size=2),), 4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_cut_is_refused() -> None:
    def body() -> list[str]:
        accelerator, refused = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2)), []
        model = accelerator.prepare(Model(lambda tokens: torch.ones(tokens.shape[1], tokens.shape[1]).bool()))
        bias = accelerator.prepare(Model(lambda tokens: torch.ones(2, 1, 1, tokens.shape[1])))
        inputs, labels, positions = tensors()
        cases: list[Any] = [
            ({"buffers": [inputs[:, :7]], "buffer_seq_dims": [1]}, None),
            ({"buffers": [inputs], "buffer_seq_dims": []}, None),
            ({"buffers": [inputs], "buffer_seq_dims": [2]}, None),
            ({"buffers": [inputs], "buffer_seq_dims": [1], "no_restore_buffers": {labels}}, None),
            ({"buffers": [inputs, labels], "buffer_seq_dims": [0, 1]}, None),
            ({"buffers": [inputs, positions], "buffer_seq_dims": [1, 1]}, model),
            ({"buffers": [inputs, positions], "buffer_seq_dims": [1, 1]}, bias),
        ]
        for options, called in cases:
            with (
                pytest.raises((ConfigurationError, UnsupportedError)) as error,
                accelerator.maybe_context_parallel(**options),
            ):
                called(inputs, positions)
            refused.append(str(error.value))
        assert torch.equal(inputs, tensors()[0])
        return refused

    expected = [
        "A sequence of 7 cannot be cut for 2 ranks: its length must be a multiple of 4. Pad it to 8",
        "buffer_seq_dims must name a dimension for each of the 1 buffers (got 0).",
        "buffers[0] must be a tensor with the dimension 2 (got shape (2, 16)).",
        "no_restore_buffers has a tensor that is not in buffers.",
        "buffers have sequences of 2, 16: give those of one length",
        "attn_mask of shape (8, 8) cannot be cut",
        "attn_mask adds a bias to the scores",
    ]
    for refused in run_world(body):
        assert [message[: len(start)] for message, start in zip(refused, expected, strict=True)] == expected


@pytest.mark.parametrize("sequences", ["cp_size", "sp_size"])
def test_sequences_and_matrices_are_split_together(sequences: str) -> None:
    handler = TorchTensorParallelConfig(plan={"embedding": "embedding_colwise"})
    sizes: dict[str, Any] = {sequences: 2, "tp_size": 2}
    config = ParallelismConfig(**sizes, tp_handler=handler)

    def body(config: ParallelismConfig | None) -> Tensor:
        return gradient(config, name="inner")

    (expected,) = run_world(body, (None,), 1)
    assert float(expected.abs().max()) > 1e-4
    for found in run_world(body, (config,), 4):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_whole_sequences_stay_whole() -> None:
    accelerator, (inputs, _, _) = Accelerator(cpu=True), tensors()
    with accelerator.maybe_context_parallel(buffers=[inputs], buffer_seq_dims=[1]):
        assert inputs.shape == (2, 16)
    assert accelerator.context_parallel_rank == 0
    with pytest.raises(ConfigurationError, match="both split sequences"):
        ParallelismConfig(cp_size=2, sp_size=2)
