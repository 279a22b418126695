"""The page of the `Accelerator` class, in the version of `split_batches=` and `logging_dir=`."""

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerate_docs.training import assert_plain, loss_function, parts
from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, DistributedType
from trainer_lib.tracking import GeneralTracker


def test_print_writes_once() -> None:
    def body() -> str:
        accelerator = Accelerator()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            accelerator.print("My thing I want to print!")
        return output.getvalue()

    assert run_world(body) == ["My thing I want to print!\n", ""]


def test_statements_and_functions_run_on_the_processes_they_name() -> None:
    def body() -> list[str]:
        accelerator, done = Accelerator(), []
        if accelerator.is_local_main_process:
            done.append("once per server")
        if accelerator.is_main_process:
            done.append("once")

        @accelerator.on_local_main_process
        def do_my_thing() -> None:
            "Something done once per server"
            done.append("local main")

        @accelerator.on_main_process
        def do_it_once() -> None:
            done.append("main")

        @accelerator.on_local_process(local_process_idx=0)
        def on_local_zero() -> None:
            done.append("local 0")

        @accelerator.on_local_process(local_process_index=1)
        def on_local_one() -> None:
            done.append("local 1")

        @accelerator.on_process(process_index=0)
        def on_zero() -> None:
            done.append("0")

        @accelerator.on_last_process
        def on_last() -> None:
            done.append("last")

        for function in (do_my_thing, do_it_once, on_local_zero, on_local_one, on_zero, on_last):
            function()
        return done

    first, second = run_world(body)
    assert first == ["once per server", "once", "local main", "main", "local 0", "0"]
    assert second == ["local 1", "last"]


def test_the_main_process_goes_first_and_the_others_wait(tmp_path: Path) -> None:
    def body() -> list[bool]:
        accelerator, file = Accelerator(), tmp_path / "cache"
        with accelerator.main_process_first():
            found = [file.exists()]
            file.touch()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            file.unlink()
        accelerator.wait_for_everyone()
        with accelerator.local_main_process_first():
            found.append(file.exists())
            file.touch()
        return found

    assert run_world(body) == [[False, False], [True, True]]


def test_unwrapping_gives_the_model_without_its_wrapper() -> None:
    def body() -> list[Any]:
        accelerator, plain = Accelerator(), nn.Linear(2, 2)
        model = accelerator.prepare(plain)
        wrapped = list(model.state_dict())
        model = accelerator.unwrap_model(model)
        return [wrapped, list(model.state_dict()), model is plain]

    for wrapped, names, is_plain in run_world(body):
        assert wrapped == ["module.weight", "module.bias"]
        assert names == ["weight", "bias"]
        assert is_plain


def test_save_writes_what_torch_loads(tmp_path: Path) -> None:
    def body() -> int:
        accelerator = Accelerator()
        model = accelerator.prepare(toy.model())
        state_dict = accelerator.unwrap_model(model).state_dict()
        accelerator.save(state_dict, "my_state.pkl")
        return len(list(tmp_path.iterdir()))

    run_world(body)
    saved = torch.load(tmp_path / "my_state.pkl", weights_only=True)
    toy.assert_same(list(saved.values()), toy.parameters(toy.model()), rtol=0)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_accumulated_gradients_are_those_of_one_large_batch(num_processes: int) -> None:
    def body() -> Any:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer, training_dataloader, scheduler = accelerator.prepare(*parts(6 // num_processes))
        for input, label in training_dataloader:
            with accelerator.accumulate(model):
                predictions = model(input)
                loss = loss_function(predictions, label)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return toy.parameters(model), scheduler.get_last_lr()[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for weights, rate in run_world(body, num_processes=num_processes):
            assert_plain(weights, rate, batch_size=12)


def test_the_arguments_of_that_version_are_taken(tmp_path: Path) -> None:
    accelerator = Accelerator(
        device_placement=True,
        split_batches=True,
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        cpu=True,
        deepspeed_plugin=None,
        fsdp_plugin=None,
        rng_types=["torch", "cuda", "generator"],
        log_with=[Remembering()],
        logging_dir=tmp_path,
        dispatch_batches=True,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[],
    )
    loader = accelerator.prepare(parts(6)[2])
    assert loader.total_batch_size == 6
    assert type(loader).__name__ == "DataLoaderDispatcher"
    assert (accelerator.mixed_precision, accelerator.logging_dir) == ("bf16", tmp_path)
    assert (accelerator.device, accelerator.num_processes) == (torch.device("cpu"), 1)
    assert (accelerator.process_index, accelerator.local_process_index) == (0, 0)
    assert (accelerator.sync_gradients, accelerator.use_distributed) == (True, False)
    assert not accelerator.optimizer_step_was_skipped
    assert accelerator.state.mixed_precision == "bf16"
    assert accelerator.distributed_type == DistributedType.NO


def test_autocast_computes_in_the_chosen_precision() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    layer = nn.Linear(2, 2)
    with accelerator.autocast():
        assert layer(torch.ones(1, 2)).dtype is torch.bfloat16
    assert layer(torch.ones(1, 2)).dtype is torch.float32


def test_clear_and_free_memory_let_go_of_what_was_prepared() -> None:
    accelerator = Accelerator()
    for release in (accelerator.clear, accelerator.free_memory):
        accelerator.prepare(toy.model())
        assert len(accelerator._models) == 1
        release()
        assert accelerator._models == []


def test_gradients_are_clipped_by_their_norm_and_by_value() -> None:
    accelerator = Accelerator()
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    inputs, targets = next(iter(loader))
    accelerator.backward(1e3 * loss_function(model(inputs), targets))
    accelerator.unscale_gradients()  # no effect without fp16
    before = torch.nn.utils.get_total_norm(toy.gradients(model))
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=2) == before > 1
    assert torch.nn.utils.get_total_norm(toy.gradients(model)) == pytest.approx(1.0)
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    assert max(float(gradient.abs().max()) for gradient in toy.gradients(model)) == pytest.approx(0.01)
    optimizer.zero_grad()


def test_collectives_work_on_nested_tensors_of_all_processes() -> None:
    def body() -> list[Any]:
        accelerator = Accelerator()
        rank = accelerator.process_index
        values = {"a": [torch.tensor([rank, rank + 10])]}
        uneven = torch.ones(rank + 1, dtype=torch.long)
        return [
            accelerator.gather(values)["a"][0].tolist(),
            [accelerator.reduce(torch.tensor(float(rank)), reduction).item() for reduction in ("sum", "mean", "none")],
            accelerator.pad_across_processes(uneven, dim=0, pad_index=7, pad_first=False).tolist(),
            accelerator.pad_across_processes({"b": uneven}, pad_index=7, pad_first=True)["b"].tolist(),
        ]

    first, second = run_world(body)
    assert first == [[0, 10, 1, 11], [1.0, 0.5, 0.0], [1, 7], [7, 1]]
    assert second == [[0, 10, 1, 11], [1.0, 0.5, 1.0], [1, 1], [1, 1]]


def test_predictions_of_all_processes_come_without_duplicates() -> None:
    def body() -> list[float]:
        accelerator, seen = Accelerator(), []
        loader = accelerator.prepare(torch.utils.data.DataLoader(range(11), 4))  # type: ignore[arg-type]
        for batch in loader:
            seen += accelerator.gather_for_metrics(batch).tolist()
        return seen

    assert run_world(body) == [list(range(11))] * 2


def test_no_sync_keeps_gradients_on_their_process() -> None:
    def body() -> list[float]:
        accelerator, plain = Accelerator(), nn.Linear(1, 1, bias=False)
        model = accelerator.prepare(plain)
        gradients = []
        for context in (accelerator.no_sync(model), contextlib.nullcontext()):
            with context:
                accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
            gradients.append(float(toy.gradients(plain)[0]))
            model.zero_grad()
        return gradients

    assert run_world(body) == [[1.0, 1.5], [2.0, 1.5]]


class Remembering(GeneralTracker):
    """A tracker of a user's own."""

    name = "remembering"
    requires_logging_directory = False

    def __init__(self) -> None:
        self.calls: list[Any] = []
        super().__init__()

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step, kwargs))

    def finish(self) -> None:
        self.calls.append("finished")


def test_trackers_get_what_is_logged() -> None:
    mine = Remembering()
    accelerator = Accelerator(log_with=mine)
    accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs={"remembering": {}})
    accelerator.log({"loss": 0.5, "phase": "warm-up"}, step=3, log_kwargs={"remembering": {"commit": True}})
    assert accelerator.get_tracker("remembering").name == "remembering"
    accelerator.end_training()
    assert mine.calls == [{"lr": 0.1}, ({"loss": 0.5, "phase": "warm-up"}, 3, {"commit": True}), "finished"]


def test_the_state_comes_back_with_registered_objects(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)
    with pytest.raises(ConfigurationError, match="state_dict"):
        accelerator.register_for_checkpointing(object())
    accelerator.save_state(tmp_path / "state")
    before = toy.parameters(model)
    for inputs, targets in loader:
        accelerator.backward(loss_function(model(inputs), targets))
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() != [0.1]
    accelerator.load_state(tmp_path / "state")
    toy.assert_same(toy.parameters(model), before, rtol=0)
    assert scheduler.get_last_lr() == [0.1]
