"""Training with Megatron-LM's options: the numbers of one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.accelerator.megatron_lm.chapter import datasets, own_step
from tests.strategies.split import LENGTH, VOCABULARY, llama, mixtral, model_of
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.data_loader.megatron_lm.indexed_dataset import write_indexed_dataset
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.utils import MegatronLMPlugin, avg_losses_across_data_parallel_group

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

BATCH, MICRO_BATCHES, NORM = 4, 2, 0.3  # samples of all replicas


def train(options: dict[str, Any] | None) -> tuple[list[float], torch.Tensor | None]:
    """Return the losses of micro-batches and a weight, with the plugin or by hand in one process."""
    whole: Any = model_of(llama)
    inputs = torch.randint(0, VOCABULARY, (36, LENGTH), generator=torch.Generator().manual_seed(1))
    plugin = None if options is None else MegatronLMPlugin(
        num_micro_batches=MICRO_BATCHES, gradient_clipping=NORM, **options
    )  # fmt: skip
    accelerator = Accelerator(
        cpu=True, megatron_lm_plugin=plugin, gradient_accumulation_steps=None if plugin else MICRO_BATCHES
    )
    rows: Any = [{"input_ids": row, "labels": row} for row in inputs]
    loader: Any = DataLoader(rows, batch_size=BATCH // accelerator.data_group.size)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(whole, optimizer, loader)
    splits = options is not None and options.get("sequence_parallelism", False)
    lengths: list[int] = []
    whole.model.layers[0].register_forward_hook(lambda *values: lengths.append(values[2].shape[1]))
    here = [layer for layer in whole.model.layers if hasattr(layer, "gradient_checkpointing")]  # not on other stages
    assert {layer.gradient_checkpointing for layer in here} == {plugin is not None and plugin.recomputes}
    assert accelerator.state.is_fsdp2 == (plugin is not None and plugin.shards)
    losses: list[float] = []
    for batch in loader:  # nine micro-batches: the last window has one
        with accelerator.accumulate(model):
            losses.append(updated(accelerator, model, optimizer, batch))
    assert set(lengths) <= {LENGTH // 2 if splits else LENGTH}  # none on ranks with later stages
    return losses, accelerator.get_state_dict(model).get("model.layers.1.mlp.up_proj.weight")


def updated(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> float:
    """Train on a micro-batch, and return the mean of its losses; the plugin clips by itself."""
    loss = model(**batch).loss
    accelerator.backward(loss)
    if accelerator.state.megatron_lm_plugin is None:
        accelerator.clip_grad_norm_(model.parameters(), NORM)
    optimizer.step()
    optimizer.zero_grad()
    return avg_losses_across_data_parallel_group([loss]).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"tp_degree": 2, "recompute_activations": True}),
        (2, {"tp_degree": 2, "sequence_parallelism": True}),
        (2, {"use_distributed_optimizer": True}),
        (4, {"tp_degree": 2, "pp_degree": 2, "recompute_granularity": "full"}),
        (4, {"pp_degree": 2, "use_distributed_optimizer": True}),
        (4, {"tp_degree": 2, "use_custom_fsdp": True, "optimizer_cpu_offload": True}),
    ],
    ids=str,
)
def test_the_run_is_that_of_one_process(ranks: int, options: dict[str, Any]) -> None:
    (expected,) = run_world(train, (None,), 1)
    found = run_world(train, (options,), ranks)
    assert len(expected[0]) == 9
    for losses, _ in found:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[0][1], expected[1], rtol=1e-5, atol=1e-5)


def train_experts(options: dict[str, Any] | None) -> tuple[list[float], list[str]]:
    """Return the losses of some updates of a model of experts, and the shapes of a weight of experts on this rank."""
    whole: Any = model_of(partial(mixtral, output_router_logits=False))
    plugin = None if options is None else MegatronLMPlugin(gradient_clipping=NORM, **options)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(whole, optimizer)
    rows = torch.randint(0, VOCABULARY, (3, 4, LENGTH), generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    for batch in rows:
        share = batch.chunk(accelerator.data_group.size)[accelerator.data_group.rank]
        losses.append(updated(accelerator, model, optimizer, {"input_ids": share, "labels": share}))
    held = [weight for name, weight in whole.named_parameters() if ".experts." in name]
    return losses, [str(list(getattr(weight, "_local_tensor", weight).shape)) for weight in held]


@pytest.mark.slow
def test_experts_are_spread_as_megatron_lm_spreads_them() -> None:
    (expected,) = run_world(train_experts, (None,), 1)
    options = {"tp_degree": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for ranks in (2, 4):
        for losses, shapes in run_world(train_experts, (options,), ranks):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-6, atol=0)
            halves = [shape.replace("[4,", "[2,") for shape in expected[1]]  # two of four experts, each whole
            assert shapes == halves
            assert shapes != expected[1]


def test_a_model_without_experts_is_refused() -> None:
    def body() -> None:
        plugin = MegatronLMPlugin(tp_degree=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        with pytest.raises(
            ConfigurationError, match=r"expert_model_parallel_size=2 spreads experts .* LlamaForCausalLM"
        ):
            accelerator.prepare(model_of(llama))

    run_world(body, num_processes=2)


@pytest.mark.slow
def test_scripts_of_the_chapter_have_the_losses_of_one_process(tmp_path: Path) -> None:
    write_indexed_dataset(tmp_path / "text", [[list(range(begin, begin + 9))] for begin in range(50)])
    text = str(tmp_path / "text")
    (expected,) = run_world(own_step, (4, {}), 1, timeout=300)
    (of_datasets,) = run_world(datasets, (4, {}, text, tmp_path / "one"), 1, timeout=300)
    split: dict[str, Any] = {"tp_degree": 2, "pp_degree": 2}
    shards: dict[str, Any] = {"pp_degree": 2, "use_distributed_optimizer": True}  # of two replicas
    for name, micro_batches, options in (("split", 4, split), ("shards", 2, shards)):
        for losses, rates, evaluated in run_world(own_step, (micro_batches, options), 4, timeout=300):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-6, atol=0)
            assert rates == expected[1]
            assert evaluated == pytest.approx(expected[2], rel=1e-6)
        arguments = micro_batches, options, text, tmp_path / name
        for found in run_world(datasets, arguments, 4, timeout=300):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(of_datasets), rtol=1e-6, atol=0)


def blocks_held(size: int) -> list[int] | str:
    """Return the blocks of a model that this rank holds, with stages of some blocks."""
    plugin = MegatronLMPlugin(pp_degree=2, num_layers_per_virtual_pipeline_stage=size)
    whole: Any = model_of(partial(llama, 4))
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    try:
        accelerator.prepare(whole)
    except ConfigurationError as error:
        return str(error)
    return [number for number, block in enumerate(whole.model.layers) if any(True for _ in block.parameters())]


@pytest.mark.slow
def test_several_stages_on_each_rank_have_the_losses_of_one_process() -> None:
    assert run_world(blocks_held, (1,), 2) == [[0, 2], [1, 3]]
    for size, message in ((2, "Interleaved1F1B takes stages_per_rank=at least 2"), (3, "blocks do not fill stages")):
        assert all(message in str(told) for told in run_world(blocks_held, (size,), 2))
    (expected,) = run_world(own_step, (4, {}, 4), 1, timeout=300)
    options = {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}
    for losses, _, evaluated in run_world(own_step, (4, options, 4), 2, timeout=300):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-6, atol=0)
        assert evaluated == pytest.approx(expected[2], rel=1e-6)


@pytest.mark.parametrize("frees", [True, False], ids=["freed", "gone"])
def test_another_accelerator_does_not_clip_as_the_plugin_of_an_earlier_one(frees: bool) -> None:
    network = torch.nn.Linear(1, 1, bias=False)
    users = torch.optim.SGD(network.parameters(), lr=1.0)
    parts: Any = [network, users]
    for plugin, update in ((MegatronLMPlugin(gradient_clipping=0.5), 0.5), (None, 8.0)):
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model, optimizer = parts = accelerator.prepare(*parts)
        before = network.weight.item()
        accelerator.backward(model(torch.full((1, 1), 8.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert before - network.weight.item() == pytest.approx(update, rel=1e-5)
        if frees:
            accelerator.free_memory()
        del accelerator, model, optimizer
