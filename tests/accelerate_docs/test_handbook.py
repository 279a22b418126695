"""A handbook of Accelerate: training, evaluation, states, trackers, large models, seeds, tools for processes."""

import copy
import json
import logging
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerate_docs.training import LR, assert_plain, loss_function, parts
from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    DistributedType,
    UnsupportedError,
    cpu_offload,
    debug_launcher,
    disk_offload,
    dispatch_model,
    hooks,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    notebook_launcher,
    set_seed,
)
from trainer_lib.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from trainer_lib.logging import get_logger
from trainer_lib.state import AcceleratorState, GradientState
from trainer_lib.tracking import GeneralTracker, TensorBoardTracker
from trainer_lib.utils import DummyOptim, DummyScheduler, LoggerType, megatron_lm

# What the handbook shows and what is not covered here.
NOT_COVERED = {
    "pip install, conda install, git clone": "not about this library",
    "accelerate config, config default, config update": "tests/commands/test_config.py and test_questionnaire.py",
    "accelerate env": "tests/commands/test_env.py",
    "accelerate test": "tests/commands/test_self_check.py",
    "notebook_launcher on TPUs": "it needs a TPU",
    "accelerate launch --multi_gpu, CUDA_VISIBLE_DEVICES": "needs GPUs; the options are tested in tests/commands",
    "deepspeed_config in YAML, zero_stage2_config.json": "tests/commands/test_launch_deepspeed.py",
    "model.save_checkpoint, zero_to_fp32": "DeepSpeed's own methods",
    "AutoModelForSequenceClassification.from_pretrained": "downloads a model",
}


# -- training --------------------------------------------------------------------------------------------------------


def test_device_placement_can_be_left_to_the_script() -> None:
    accelerator = Accelerator(device_placement=False)
    loader = accelerator.prepare(parts()[2])
    assert loader.device is None
    assert Accelerator().prepare(parts()[2]).device == accelerator.device


@pytest.mark.parametrize("split_batches", [False, True])
def test_the_batch_size_is_of_a_process_or_of_all(split_batches: bool) -> None:
    def body() -> list[int]:
        accelerator = Accelerator(split_batches=split_batches)
        (training_dataloader,) = (accelerator.prepare(parts(6)[2]),)
        return [len(training_dataloader), len(next(iter(training_dataloader))[0]), training_dataloader.total_batch_size]

    assert run_world(body) == [[8, 3, 6] if split_batches else [4, 6, 12]] * 2


def test_a_metric_over_a_prepared_loader_counts_each_sample_once() -> None:
    class Metric:
        def __init__(self) -> None:
            self.predictions: list[float] = []
            self.references: list[float] = []

        def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
            self.predictions += predictions.flatten().tolist()
            self.references += references.flatten().tolist()

    inputs, targets, _ = toy.data()
    inputs, targets = inputs[:23], targets[:23]

    def body() -> list[list[float]]:
        accelerator, metric = Accelerator(), Metric()
        model, validation_dataloader = accelerator.prepare(
            toy.model(), DataLoader(TensorDataset(inputs, targets), batch_size=4)
        )
        for batch in validation_dataloader:
            with torch.no_grad():
                predictions = model(batch[0])
            all_predictions, all_targets = accelerator.gather_for_metrics((predictions, batch[1]))
            metric.add_batch(all_predictions, all_targets)
        return [metric.predictions, metric.references]

    expected = toy.model()(inputs).flatten().tolist()
    for predictions, references in run_world(body):
        assert predictions == pytest.approx(
            expected, rel=1e-6, abs=1e-7
        )  # products of 4 rows are rounded otherwise than of 23
        assert references == targets.flatten().tolist()


def test_dynamic_padding_is_gathered_after_padding_across_processes() -> None:
    def body() -> list[list[int]]:
        accelerator = Accelerator()
        tokens = torch.full((1, accelerator.process_index + 2), accelerator.process_index + 1)
        padded = accelerator.pad_across_processes(tokens, dim=1, pad_index=0)
        return accelerator.gather(padded).tolist()

    assert run_world(body) == [[[1, 1, 0], [2, 2, 2]]] * 2


def test_code_for_tpus_is_left_out() -> None:
    accelerator = Accelerator()
    assert accelerator.distributed_type != DistributedType.TPU
    assert DistributedType.TPU == DistributedType.XLA


def test_only_the_local_main_process_shows_a_bar(capfd: pytest.CaptureFixture[str]) -> None:
    from tqdm.auto import tqdm

    def body() -> bool:
        accelerator = Accelerator()
        return tqdm(range(3), disable=not accelerator.is_local_main_process).disable

    assert run_world(body) == [False, True]


def test_a_process_waits_until_every_other_one_is_there(tmp_path: Path) -> None:
    def body() -> bool:
        accelerator = Accelerator()
        if accelerator.is_main_process:
            (tmp_path / "made").touch()
        accelerator.wait_for_everyone()
        return (tmp_path / "made").exists()

    assert run_world(body) == [True, True]


def test_weights_are_saved_from_and_loaded_into_the_unwrapped_model(tmp_path: Path) -> None:
    filename = tmp_path / "weights.bin"

    def body() -> list[torch.Tensor]:
        accelerator = Accelerator()
        model = accelerator.prepare(toy.model(seed=3))
        accelerator.wait_for_everyone()
        unwrapped_model = accelerator.unwrap_model(model)
        accelerator.save(unwrapped_model.state_dict(), filename)
        accelerator.wait_for_everyone()
        other = accelerator.prepare(toy.model(seed=4))
        unwrapped_model = accelerator.unwrap_model(other)
        unwrapped_model.load_state_dict(torch.load(filename, weights_only=True))
        return toy.parameters(other)

    for weights in run_world(body):
        toy.assert_same(weights, toy.parameters(toy.model(seed=3)), rtol=0)


def test_the_starting_state_comes_back_after_training() -> None:
    accelerator = Accelerator()
    my_model, my_optimizer, my_training_dataloader, _ = parts()
    my_scheduler = torch.optim.lr_scheduler.StepLR(my_optimizer, step_size=1, gamma=0.99)
    my_model, my_optimizer, my_training_dataloader = accelerator.prepare(my_model, my_optimizer, my_training_dataloader)
    accelerator.register_for_checkpointing(my_scheduler)
    accelerator.save_state("my/save/path")
    device = accelerator.device
    my_model.to(device)
    for _ in range(2):
        for inputs, targets in my_training_dataloader:
            my_optimizer.zero_grad()
            outputs = my_model(inputs.to(device))
            accelerator.backward(loss_function(outputs, targets.to(device)))
            my_optimizer.step()
        my_scheduler.step()
    assert my_scheduler.get_last_lr()[0] == pytest.approx(LR * 0.99**2)
    accelerator.load_state("my/save/path")
    assert my_scheduler.get_last_lr() == [LR]
    toy.assert_same(toy.parameters(my_model), toy.parameters(toy.model()), rtol=0)


def test_the_loss_is_computed_in_the_precision_of_autocast() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    outputs = model(torch.ones(3, 2))
    with accelerator.autocast():
        assert (outputs @ outputs.T).dtype is torch.bfloat16
    assert (outputs @ outputs.T).dtype is torch.float32


def test_a_schedule_by_hand_asks_whether_the_step_was_skipped() -> None:
    accelerator = Accelerator()
    model, optimizer, loader, lr_scheduler = parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    inputs, targets = next(iter(loader))
    accelerator.backward(loss_function(model(inputs), targets))
    optimizer.step()
    if not accelerator.optimizer_step_was_skipped:
        lr_scheduler.step()
    assert lr_scheduler.get_last_lr() == [LR / 2]


def test_accumulation_by_hand_is_that_of_plain_pytorch() -> None:
    gradient_accumulation_steps = 2

    def body() -> Any:
        accelerator = Accelerator()
        model, optimizer, training_dataloader, scheduler = accelerator.prepare(*parts(3))
        for index, (inputs, targets) in enumerate(training_dataloader):
            loss = loss_function(model(inputs), targets) / gradient_accumulation_steps
            accelerator.backward(loss)
            if (index + 1) % gradient_accumulation_steps == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return toy.parameters(model), scheduler.get_last_lr()[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for weights, rate in run_world(body):
            assert_plain(weights, rate, batch_size=12)


def test_two_batches_taken_by_hand_sync_with_the_second() -> None:
    def body() -> Any:
        accelerator = Accelerator()
        dataloader, model, optimizer = accelerator.prepare(parts(6)[2], plain := toy.model(), _sgd(plain))
        (inputs, targets), (inputs_b, targets_b) = next(iter(dataloader)), next(iter(dataloader))
        with accelerator.no_sync(model):
            accelerator.backward(loss_function(model(inputs), targets))
        local = toy.gradients(plain)
        accelerator.backward(loss_function(model(inputs_b), targets_b))
        optimizer.step()
        return local, toy.parameters(plain)

    (local, weights), (other_local, other_weights) = run_world(body)
    assert not torch.equal(local[0], other_local[0])
    toy.assert_same(weights, other_weights, rtol=0)
    toy.assert_same(weights, [p - LR * 2 * g for p, g in zip(*_first_12(), strict=True)], rtol=1e-5)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def _first_12() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights, and the gradients of the first 12 samples' mean loss."""
    model, (inputs, targets, _) = toy.model(), toy.data()
    loss_function(model(inputs[:12]), targets[:12]).backward()
    return toy.parameters(toy.model()), toy.gradients(model)


def test_uneven_inputs_are_joined() -> None:
    def body() -> Any:
        accelerator = Accelerator(even_batches=True)
        ddp_model, optimizer, dataloader = accelerator.prepare(plain := toy.model(), _sgd(plain), parts(10)[2])
        seen = 0
        with accelerator.join_uneven_inputs([ddp_model], even_batches=False):
            for input, output in dataloader:
                outputs = ddp_model(input)
                loss_function(outputs, output).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += len(input)
        return seen, toy.parameters(plain)

    (first, weights), (second, other_weights) = run_world(body)
    assert (first, second) == (28, 20)
    toy.assert_same(weights, other_weights, rtol=0)


# -- launchers -------------------------------------------------------------------------------------------------------


def _training_function(mixed_precision: str, seed: int, batch_size: int) -> None:
    set_seed(seed)
    accelerator = Accelerator(mixed_precision=mixed_precision)
    loader = accelerator.prepare(parts(batch_size)[2])
    total = accelerator.reduce(torch.tensor(len(next(iter(loader))[0])))
    Path(f"{accelerator.process_index}.json").write_text(
        json.dumps([accelerator.num_processes, accelerator.mixed_precision, seed, int(total)])
    )


@pytest.mark.parametrize("launch", [notebook_launcher, debug_launcher])
def test_a_function_of_a_notebook_runs_on_two_processes(launch: Any, tmp_path: Path) -> None:
    args = ("bf16", 42, 8)
    launch(_training_function, args, num_processes=2)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[2, "bf16", 42, 16]] * 2


def test_a_notebook_chooses_one_process_without_accelerators(tmp_path: Path) -> None:
    notebook_launcher(_training_function, ("no", 1, 8))
    assert json.loads((tmp_path / "0.json").read_text()) == [1, "no", 1, 8]


# -- what this version does not have ----------------------------------------------------------------------------------


def test_a_script_that_knows_deepspeed_takes_the_optimizer_of_torch() -> None:
    accelerator: Any = Accelerator()
    model: Any = toy.model()
    has_none = accelerator.state.deepspeed_plugin is None
    optimizer_cls: Any = (
        torch.optim.AdamW
        if has_none or "optimizer" not in accelerator.state.deepspeed_plugin.deepspeed_config
        else DummyOptim
    )
    optimizer = optimizer_cls(model.parameters(), lr=LR)
    if has_none or "scheduler" not in accelerator.state.deepspeed_plugin.deepspeed_config:
        lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    else:
        lr_scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=1)
    model, optimizer, lr_scheduler = accelerator.prepare(model, optimizer, lr_scheduler)
    accelerator.backward(model(torch.ones(1, 8)).sum())
    optimizer.step()
    lr_scheduler.step()
    assert lr_scheduler.get_last_lr() == [LR / 2]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: megatron_lm.prepare_optimizer(None, None), "prepare_optimizer needs Megatron-LM"),
        (lambda: megatron_lm.MegatronLMOptimizerWrapper(None), "MegatronLMOptimizerWrapper needs Megatron-LM"),
    ],
)
def test_what_is_not_there_says_so_and_what_to_use_instead(call: Any, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says) as error:
        call()
    assert "this version does not have" in str(error.value)


def test_large_models_run_from_the_cpu_and_the_disk(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    batch = torch.ones(1, 4)
    expected = model(batch)
    assert torch.equal(cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))(batch), expected)
    assert torch.equal(disk_offload(copy.deepcopy(model), str(tmp_path / "all"))(batch), expected)
    device_map = {"0": "cpu", "1": "disk"}
    dispatched = dispatch_model(copy.deepcopy(model), device_map=device_map, offload_dir=str(tmp_path / "half"))
    assert torch.equal(dispatched(batch), expected)
    assert dispatched.get_submodule("1").weight.device == torch.device("meta")
    hooks.attach_align_device_hook(model, torch.device("cpu"), offload=True)
    assert torch.equal(model(batch), expected)


# -- trackers and logs ------------------------------------------------------------------------------------------------


def test_trackers_are_chosen_by_name_or_kind(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(log_with=["tensorboard", LoggerType.TENSORBOARD], project_dir=tmp_path)
    accelerator.init_trackers("my_project", config={"num_iterations": 5, "learning_rate": 1e-2})
    accelerator.log({"train_loss": 1.12, "valid_loss": 0.8}, step=1)
    assert accelerator.get_tracker("tensorboard").name == "tensorboard"
    accelerator.end_training()
    assert _scalars(tmp_path / "my_project") == {"train_loss": [(1, 1.12)], "valid_loss": [(1, 0.8)]}


def test_a_tracker_of_its_own_is_made_with_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker("run", logging_dir=tmp_path)
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=2)
    tracker.finish()
    assert _scalars(tmp_path / "run") == {"loss": [(2, 0.5)]}
    assert isinstance(tracker, GeneralTracker)


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)]  # type: ignore[misc]
        for name in events.Tags()["scalars"]
        if "loss" in name
    }


def test_all_trackers_are_those_that_are_there(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = Accelerator(log_with="all", project_dir=tmp_path)
    assert "tensorboard" in [str(name) for name in accelerator.log_with]


def test_a_logger_writes_on_the_main_process_or_on_all() -> None:
    def body() -> list[str]:
        Accelerator()
        logger, written = get_logger("handbook", log_level="DEBUG"), []
        handler = logging.Handler()
        handler.emit = lambda record: written.append(record.getMessage())
        logger.logger.addHandler(handler)
        logger.info("My log", main_process_only=False)
        logger.debug("My log of the main process", main_process_only=True)
        get_logger("handbook", log_level="INFO").debug("filtered out")
        logger.logger.removeHandler(handler)
        return written

    assert run_world(body) == [["My log", "My log of the main process"], ["My log"]]


# -- large models ----------------------------------------------------------------------------------------------------


def test_an_empty_model_of_any_size_takes_no_memory() -> None:
    with init_empty_weights():
        tst = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
    assert sum(parameter.numel() for parameter in tst.parameters()) > 1e11
    assert all(parameter.is_meta for parameter in tst.parameters())


def test_shards_with_a_flat_index_are_loaded(tmp_path: Path) -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
    first, second = (
        {name: state[name] for name in ("0.weight", "0.bias")},
        {n: state[n] for n in ("1.weight", "1.bias")},
    )
    torch.save(first, tmp_path / "first_state_dict.bin")
    torch.save(second, tmp_path / "second_state_dict.bin")
    index = {name: "first_state_dict.bin" if name in first else "second_state_dict.bin" for name in state}
    (tmp_path / "index.json").write_text(json.dumps(index))
    (tmp_path / "other.json").write_text(json.dumps(index))
    for checkpoint in (tmp_path, tmp_path / "index.json", tmp_path / "other.json"):
        with init_empty_weights():
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        load_checkpoint_in_model(model, checkpoint, device_map={"": "cpu"})
        toy.assert_same(list(model.state_dict().values()), list(state.values()), rtol=0)


@pytest.mark.slow
def test_a_model_of_transformers_is_made_empty() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.slow
def test_a_checkpoint_is_loaded_into_an_empty_model_of_transformers_and_dispatched(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTJConfig(n_embd=32, n_layer=2, n_head=2, rotary_dim=8, vocab_size=11, n_positions=8)
    whole = transformers.AutoModelForCausalLM.from_config(config).eval()
    whole.save_pretrained(tmp_path / "sharded-gpt-j", max_shard_size="40KB")
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    tokens = torch.arange(6).reshape(1, 6)
    for weights_location in (tmp_path / "sharded-gpt-j", tmp_path / "pytorch_model.bin"):
        with init_empty_weights():
            model = transformers.AutoModelForCausalLM.from_config(config)
        model = load_checkpoint_and_dispatch(
            model, weights_location, device_map="auto", no_split_module_classes=["GPTJBlock"]
        )
        assert model.hf_device_map == {"": "cpu"}
        with torch.no_grad():
            assert torch.equal(model.eval()(tokens).logits, whole(tokens).logits)


@pytest.mark.slow
def test_a_prepared_model_of_transformers_saves_itself(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)

    def body() -> int:
        accelerator = Accelerator()
        set_seed(5)
        model = accelerator.prepare(transformers.AutoModelForCausalLM.from_config(config))
        unwrapped_model: Any = accelerator.unwrap_model(model)
        unwrapped_model.save_pretrained(
            "saved",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
        return int(accelerator.is_main_process)

    run_world(body)
    set_seed(5)
    expected = transformers.AutoModelForCausalLM.from_config(config)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    toy.assert_same(toy.parameters(loaded), toy.parameters(expected), rtol=0)


def test_hooks_run_around_a_forward() -> None:
    class Adding(ModelHook):
        def __init__(self, value: float) -> None:
            self.value = value

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return (args[0] + self.value, *args[1:]), kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    model: Any = nn.Identity()
    add_hook_to_module(model, Adding(1.0))
    add_hook_to_module(model, Adding(10.0), append=True)
    assert isinstance(model._hf_hook, SequentialHook)
    assert model(torch.zeros(1)).item() == 44.0
    add_hook_to_module(model, Adding(1.0))
    assert model(torch.zeros(1)).item() == 2.0
    remove_hook_from_module(model, recurse=True)
    assert model(torch.zeros(1)).item() == 0.0


# -- seeds and processes ----------------------------------------------------------------------------------------------


def test_a_seed_is_that_of_all_generators() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    set_seed(42)
    values = drawn()
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    assert drawn() == values


def test_a_learning_rate_is_scaled_by_the_number_of_processes() -> None:
    def body() -> float:
        learning_rate = 1e-3
        accelerator = Accelerator()
        learning_rate *= accelerator.num_processes
        optimizer = accelerator.prepare(torch.optim.AdamW(params=toy.model().parameters(), lr=learning_rate))
        return optimizer.param_groups[0]["lr"]

    assert run_world(body) == [2e-3] * 2


def test_the_main_process_downloads_and_the_others_find_it(tmp_path: Path) -> None:
    def load_dataset() -> str:
        downloaded = (tmp_path / "glue").exists()
        (tmp_path / "glue").touch()
        return "cache" if downloaded else "network"

    def body() -> str:
        accelerator = Accelerator()
        with accelerator.main_process_first():
            return load_dataset()

    assert run_world(body) == ["network", "cache"]


def test_weights_saved_by_the_main_process_are_loaded_by_all() -> None:
    def body() -> list[torch.Tensor]:
        accelerator = Accelerator()
        model = accelerator.prepare(toy.model(seed=1))
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pth")
        with accelerator.main_process_first():
            state = torch.load("weights.pth", weights_only=True)
        other = toy.model(seed=2)
        other.load_state_dict(state)
        return toy.parameters(other)

    for weights in run_world(body):
        toy.assert_same(weights, toy.parameters(toy.model(seed=1)), rtol=0)


@pytest.mark.slow
def test_a_dataset_is_tokenized_by_the_main_process_first() -> None:
    datasets = pytest.importorskip("datasets")

    def body() -> list[Any]:
        accelerator = Accelerator()
        data = datasets.Dataset.from_dict({"idx": [0, 1], "sentence1": ["a b", "c"]})
        with accelerator.main_process_first():
            tokenized = data.map(
                lambda rows: {"tokens": [len(text.split()) for text in rows["sentence1"]]},
                batched=True,
                remove_columns=["idx", "sentence1"],
            )
        return [tokenized.column_names, list(tokenized["tokens"])]

    assert run_world(body) == [[["tokens"], [2, 1]]] * 2


def test_states_are_shared_and_answer_without_an_accelerator() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    state, gradients = AcceleratorState(), GradientState()
    assert state.initialized
    assert (state.mixed_precision, state.num_processes, state.process_index) == ("bf16", 1, 0)
    assert (state.device, state.local_process_index) == (accelerator.device, 0)
    assert (gradients.end_of_dataloader, gradients.remainder, gradients.sync_gradients) == (False, -1, True)
