"""Evaluation is that of one process, on any number of them: whatever the data, its size, and the batch size."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from tests.conftest import Body
from tests.strategies.sharded import Stack
from tests.trainer.evaluated import Bench, Given, Streamed, Texts, classify, dataset, expected, read, scores
from tests.worlds import run_world
from trainer_lib import FullyShardedDataParallelPlugin
from trainer_lib.data_loader import prepare_data_loader
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.foundation.errors import (
    ConfigurationError,
    DistributedOperationException,
    NoExecutableBatchSizeError,
)
from trainer_lib.launchers import ProcessFailedError
from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.trainer.evaluation.eval_loop import EvaluationSet
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput

NAMED = ["accuracy", "top2_accuracy"]
# A sample, fewer than processes, uneven, and a last round in which some processes have nothing.
SIZES = [1, 2, 3, 7, 18, 29]


def close(actual: dict[str, float], wanted: dict[str, float]) -> None:
    assert list(actual) == list(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, equal_nan=True, err_msg=name)


class TestNumbers:
    @pytest.mark.parametrize("processes", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
    def test_are_those_of_all_samples_at_once(self, processes: int) -> None:
        def body() -> dict[tuple[int, int, bool], Any]:
            bench = Bench()
            metrics: dict[tuple[int, int, bool], Any] = {}
            for samples in SIZES:
                for batch_size in (1, 4, 50):
                    for streams in (False, True):
                        data = Streamed(dataset(samples)) if streams else dataset(samples)
                        dev_set = bench.set(data, NAMED, batch_size)
                        metrics[samples, batch_size, streams] = bench.evaluate({"": dev_set})
            return metrics

        everywhere = run_world(body, num_processes=processes, timeout=60)
        for evaluated in everywhere:
            assert evaluated == everywhere[0]
            for (samples, _, _), metrics in evaluated.items():
                close(metrics, expected(samples))

    def test_loss_is_summed_in_double_precision(self) -> None:
        def tenth(model: Any, batch: Any) -> EvaluationOutput:
            return EvaluationOutput(torch.tensor(0.1), 1.0)

        assert Bench(tenth).evaluate({"": Bench(tenth).set(dataset(5000), batch_size=1)})["eval_loss"] == pytest.approx(
            float(torch.tensor(0.1)), rel=1e-12
        )

    @pytest.mark.parametrize("kind", [float, torch.tensor])
    def test_batches_without_items_count_for_nothing(self, kind: Any) -> None:
        def step(model: Any, batch: Any) -> EvaluationOutput:
            number = batch[0].item()
            return EvaluationOutput(batch[0].sum() / number, kind(number))  # 0 / 0 for the first

        numbers = torch.utils.data.TensorDataset(torch.arange(4.0))
        assert Bench(step).evaluate({"": Bench(step).set(numbers, batch_size=1)}) == {"eval_loss": 3 / 6}

    def test_where_no_item_counts_there_is_no_mean(self) -> None:
        def nothing(model: Any, batch: Any) -> EvaluationOutput:
            return EvaluationOutput(torch.tensor(0.0), torch.tensor(0))

        assert np.isnan(Bench(nothing).evaluate({"": Bench(nothing).set(dataset(3))})["eval_loss"])

    def test_without_a_loss_there_is_none(self) -> None:
        def step(model: Any, batch: Any) -> EvaluationOutput:
            return EvaluationOutput(predictions=batch[0], labels=batch[1])

        bench = Bench(step)
        assert list(bench.evaluate({"": bench.set(dataset(6), ["accuracy"])})) == ["eval_accuracy"]

    def test_sets_have_their_own_names_metrics_and_limits(self) -> None:
        bench = Bench()
        sets = {
            "dev": bench.set(dataset(18), ["accuracy"]),
            "test": bench.set(dataset(29), {"hits": "top2_accuracy"}),
            "some": bench.set(dataset(29), batch_size=6, limit=3),
        }
        metrics = bench.evaluate(sets, "final")
        logits, labels = scores(29)
        wanted = {
            "final_dev_loss": expected(18)["eval_loss"],
            "final_dev_accuracy": expected(18)["eval_accuracy"],
            "final_test_loss": expected(29)["eval_loss"],
            "final_test_hits": expected(29)["eval_top2_accuracy"],
            "final_some_loss": nn.functional.cross_entropy(logits[:18], labels[:18]).item(),
        }
        close(metrics, wanted)
        assert bench.run.metrics == metrics
        close(bench.evaluate(sets, "final"), wanted)  # from the beginning, also after a limit

    def test_limit_is_of_batches_of_each_process(self) -> None:
        def body() -> dict[str, float]:
            bench = Bench()
            return bench.evaluate({"": bench.set(dataset(29), batch_size=3, limit=2)})

        logits, labels = scores(29)
        for metrics in run_world(body, timeout=60):
            close(metrics, {"eval_loss": nn.functional.cross_entropy(logits[:12], labels[:12]).item()})

    def test_a_limit_means_the_same_batches_each_time(self) -> None:
        bench = Bench()
        loader = bench.loader(dataset(29), 3, shuffle=True)
        results: list[Any] = []
        for _ in range(3):
            results.append(bench.evaluate({"": EvaluationSet(loader=loader, limit=2)}))
            torch.rand(3)  # as training does in between
        assert results[0] == results[1] == results[2]

    def test_batches_need_not_be_cut(self) -> None:
        def flattened(samples: list[int]) -> dict[str, Tensor]:
            return {
                "lengths": torch.tensor(samples),
                "tokens": torch.cat([torch.full((number + 1,), float(number)) for number in samples]),
            }

        def step(model: Any, batch: Any) -> EvaluationOutput:
            assert len(batch["tokens"]) == (batch["lengths"] + 1).sum()
            return EvaluationOutput(batch["tokens"].sum(), float(len(batch["tokens"])))

        def body() -> dict[str, float]:
            bench = Bench(step)
            data: Any = list(range(7))
            return bench.evaluate({"": EvaluationSet(loader=bench.loader(data, 2, collate_fn=flattened))})

        wanted = sum(number * (number + 1) for number in range(7)) / sum(range(8))
        assert run_world(body, num_processes=3, timeout=60) == [{"eval_loss": wanted}] * 3

    def test_loaders_of_all_kinds_are_read_exactly(self) -> None:
        def body() -> list[dict[str, float]]:
            bench = Bench()
            loaders = [
                bench.loader(dataset(11), 4, num_workers=1),
                bench.loader(Streamed(dataset(11)), 4, num_workers=1),
                bench.loader(dataset(11), 4, drop_last=False, shuffle=True),
                bench.loader(dataset(11), None, sampler=[[0, 1, 2], [3, 4, 5, 6, 7, 8, 9], [10]]),
                prepare_data_loader(torch.utils.data.DataLoader(dataset(11), 4), dispatch_batches=True),
            ]
            sets = [EvaluationSet(loader=loader) for loader in loaders]
            evens = [loader.even_batches for loader in loaders]
            results = [bench.evaluate({"": eval_set}) for eval_set in sets]
            assert [loader.even_batches for loader in loaders] == evens
            return results

        for outcomes in run_world(body, timeout=60):
            for metrics in outcomes:
                close(metrics, {"eval_loss": expected(11)["eval_loss"]})

    def test_structures_and_texts_come_as_they_are(self) -> None:
        def step(model: Any, batch: Any) -> EvaluationOutput:
            seen.extend(batch["text"])
            assert len(batch["text"]) == len(batch["pair"][0]) == len(batch["pair"][1])
            return EvaluationOutput(predictions=batch)

        class Structured(Dataset[Any]):
            def __len__(self) -> int:
                return 5

            def __getitem__(self, index: int) -> dict[str, Any]:
                return {"text": f"text {index}", "pair": (index, torch.ones(2))}

        seen: list[str] = []

        def body() -> list[str]:
            Bench(step).evaluate({"": Bench(step).set(Structured(), batch_size=2)})
            return seen

        results = run_world(body, num_processes=3, timeout=60)
        assert sorted(text for rank_values in results for text in rank_values) == [
            f"text {index}" for index in range(5)
        ]


class Everything(nn.Module):
    """Has a layer of each kind that modes and statistics matter to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen, self.dropout = nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.modes: list[bool] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.dropout(self.frozen(self.norm(inputs)))

    def train(self, mode: bool = True) -> "Everything":
        self.modes.append(mode)
        return super().train(mode)


class TestTraining:
    def test_finds_modes_gradients_and_generators_as_it_left_them(self) -> None:
        def step(model: Any, batch: Any) -> EvaluationOutput:
            assert not torch.is_grad_enabled()
            assert not any(module.training for module in model.modules())
            torch.rand(1)
            random.random()
            np.random.rand()
            return classify(model, batch)

        model = Everything()
        bench = Bench(step, model=model)
        model.train()
        model.frozen.eval()
        model(torch.randn(8, 5)).sum().backward()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        bench.run.batch, bench.run.outputs, bench.run.loss_sum, bench.run.weight = (
            "batch",
            "outputs",
            torch.ones(()),
            2.0,
        )
        drawn = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
        bench.evaluate({"": bench.set(dataset(9))})
        assert torch.equal(drawn[0], torch.get_rng_state())
        assert random.getstate() == drawn[1]
        np.testing.assert_equal(np.random.get_state(legacy=False), drawn[2])
        assert [m.training for m in (model, model.norm, model.frozen, model.dropout)] == [True, True, False, True]
        assert model.modes == [True, False, True]  # its own train() was asked, which may do more than set flags
        after = [parameter.grad for parameter in model.parameters()]
        assert all(
            torch.equal(gradient, other) for gradient, other in zip(gradients, after, strict=True) if other is not None
        )
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert (bench.run.batch, bench.run.outputs, bench.run.weight) == ("batch", "outputs", 2.0)

    def test_finds_them_so_after_an_error_too(self) -> None:
        def step(model: Any, batch: Any) -> EvaluationOutput:
            raise ValueError("no")

        model = Everything()
        bench = Bench(step, model=model)
        drawn = torch.get_rng_state()
        with pytest.raises(ValueError, match="no"):
            bench.evaluate({"": bench.set(dataset(9))})
        assert model.training
        assert torch.is_grad_enabled()
        assert torch.equal(drawn, torch.get_rng_state())

    def test_of_a_frozen_model_stays_frozen(self) -> None:
        model = Everything().eval()
        bench = Bench(model=model)
        bench.evaluate({"": bench.set(dataset(9))})
        assert not any(module.training for module in model.modules())

    def test_optimizers_with_modes_are_switched_and_back(self) -> None:
        class Switched(torch.optim.SGD):
            def __init__(self, model: nn.Module) -> None:
                super().__init__(model.parameters(), lr=0.1)
                self.param_groups[0]["train_mode"] = False

            def train(self) -> None:
                self.param_groups[0]["train_mode"] = True

            def eval(self) -> None:
                self.param_groups[0]["train_mode"] = False

        def step(model: Any, batch: Any) -> EvaluationOutput:
            assert not optimizer.param_groups[0]["train_mode"]
            return classify(model, batch)

        bench = Bench(step)
        optimizer = Switched(bench.model)
        bench.run.optimizers = {"default": AcceleratedOptimizer(optimizer)}
        dev_set = bench.set(dataset(4))
        for was in (True, False):
            optimizer.param_groups[0]["train_mode"] = was
            bench.evaluate({"": dev_set})
            assert optimizer.param_groups[0]["train_mode"] is was

    def test_statistics_are_those_of_the_main_process(self) -> None:
        def body(rank: int, size: int) -> tuple[dict[str, float], dict[str, float]]:
            def step(model: Any, batch: Any) -> EvaluationOutput:
                assert type(model) is Everything  # DDP's forward would wait for the others
                return classify(model, batch)

            bench = Bench(step, model=Everything())
            bench.model(torch.full((4, 5), float(rank)) + torch.eye(4, 5)).sum().backward()
            before = bench.evaluate({"": bench.set(dataset(9), batch_size=2)})
            bench.model.eval()
            bench.model(torch.ones(2, 5))  # DDP shares buffers by itself here
            return before, bench.evaluate({"": bench.set(dataset(9), batch_size=2)})

        def with_place() -> Any:
            import os

            return body(int(os.environ["RANK"]), 3)

        results = run_world(with_place, num_processes=3, timeout=60)
        assert all(before == after == results[0][0] for before, after in results)


class Limited(Given):
    """Has memory for so many rows."""

    def __init__(self, rows: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.rows, self.error, self.sizes = rows, error, list[int]()

    def forward(self, inputs: Any) -> Any:
        self.sizes.append(len(inputs))
        if len(inputs) > self.rows:
            raise self.error("CUDA out of memory. Tried to allocate")
        return super().forward(inputs)


class Reduced(Callback):
    """Hears which batch sizes are tried after one that did not fit."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_batch_size_reduced(self, run: Run, batch_size: int) -> None:
        self.sizes.append(batch_size)


def rows_twice(samples: list[Any]) -> Any:
    """Make a batch with two rows for each sample, which cannot be split by samples."""
    return default_collate(samples * 2)


NOT_SPLIT = r"A batch of 4 samples did not fit .* it has 8 rows"


class TestOutOfMemory:
    def test_batches_are_split_and_numbers_stay(self) -> None:
        reduced, model = Reduced(), Limited(3)
        bench = Bench(classify, reduced, model=model)
        calls: list[int] = []

        def compute(prediction: Any) -> dict[str, float]:
            calls.append(len(prediction.predictions))
            return {"first": prediction.predictions[:, 0].sum()}

        metrics = bench.evaluate({"": bench.set(dataset(29), NAMED, batch_size=12, compute_metrics=compute)})
        close(metrics, {**expected(29), "eval_first": float(scores(29)[0][:, 0].sum())})
        assert calls == [29]
        assert reduced.sizes == [6, 3]
        assert model.sizes == [12, 6, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2]  # no second try of what did not fit
        assert bench.predict(dataset(29), batch_size=12).predictions.shape == (29, 5)

    def test_a_batch_that_cannot_be_split_is_refused_before_callbacks_hear_of_a_smaller_one(self) -> None:
        reduced = Reduced()
        bench = Bench(classify, reduced, model=Limited(3))
        with pytest.raises(ConfigurationError, match=NOT_SPLIT) as caught:
            bench.evaluate({"": EvaluationSet(loader=bench.loader(dataset(8), collate_fn=rows_twice))})
        assert isinstance(caught.value.__context__, torch.OutOfMemoryError)
        assert reduced.sizes == []

    def test_a_later_batch_that_cannot_be_split_is_refused_too(self) -> None:
        def once_then_twice(samples: list[Any]) -> Any:
            seen.append(len(samples))
            return default_collate(samples) if len(seen) == 1 else rows_twice(samples)

        seen: list[int] = []
        bench = Bench(classify, model=Limited(3))
        with pytest.raises(ConfigurationError, match=NOT_SPLIT):
            bench.evaluate({"": EvaluationSet(loader=bench.loader(dataset(8), collate_fn=once_then_twice))})

    def test_a_single_row_that_does_not_fit_is_the_error_it_was(self) -> None:
        bench = Bench(model=Limited(0))
        with pytest.raises(torch.OutOfMemoryError):
            bench.evaluate({"": bench.set(dataset(8))})

    def test_other_errors_are_left_alone(self) -> None:
        class Other(Limited):
            def forward(self, inputs: Any) -> Any:
                self.sizes.append(len(inputs))
                raise RuntimeError("shapes do not fit")

        model = Other(0)
        bench = Bench(model=model)
        with pytest.raises(RuntimeError, match="shapes"):
            bench.evaluate({"": bench.set(dataset(8))})
        assert model.sizes == [4]

    def test_processes_split_each_for_itself(self) -> None:
        def body() -> dict[str, float]:
            import os

            bench = Bench(model=Limited(2 if os.environ["RANK"] == "1" else 99))
            return bench.evaluate({"": bench.set(dataset(29), NAMED)})

        for metrics in run_world(body, timeout=60):
            close(metrics, expected(29))


class Recorder(Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_evaluate_begin(self, run: Run) -> None:
        self.heard.append("begin")

    def on_evaluate_set_begin(self, run: Run, name: str, batches: int | None) -> None:
        self.heard.append((name, batches))

    def on_evaluate_batch_begin(self, run: Run) -> None:
        self.heard.append(len(run.batch[0]))

    def on_evaluate_batch_end(self, run: Run) -> None:
        assert run.loss is not None
        self.heard.append((tuple(run.outputs.shape), round(float(run.loss), 4)))

    def on_evaluate_set_end(self, run: Run, name: str, metrics: dict[str, float]) -> None:
        self.heard.append((name, list(metrics)))

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.heard.append(list(metrics))
        assert run.metrics == metrics

    def on_predict_begin(self, run: Run, batches: int | None) -> None:
        self.heard.append(("predict", batches))

    def on_predict_batch_begin(self, run: Run) -> None:
        self.heard.append(len(run.batch[0]))

    def on_predict_batch_end(self, run: Run) -> None:
        self.heard.append("batch")

    def on_predict_end(self, run: Run) -> None:
        self.heard.append("end")


class TestEvents:
    def test_come_in_order(self) -> None:
        recorder = Recorder()
        bench = Bench(classify, recorder)
        logits, labels = scores(5)
        losses = [round(nn.functional.cross_entropy(logits[s], labels[s]).item(), 4) for s in (slice(4), slice(4, 5))]
        bench.evaluate({"dev": bench.set(dataset(5)), "stream": bench.set(Streamed(dataset(2)))})
        assert recorder.heard[:8] == [
            "begin", ("dev", 2), 4, ((4, 5), losses[0]), 1, ((1, 5), losses[1]), ("dev", ["eval_dev_loss"]),
            ("stream", None),
        ]  # fmt: skip
        assert recorder.heard[-1] == ["eval_dev_loss", "eval_stream_loss"]
        recorder.heard.clear()
        bench.predict(dataset(5))
        assert recorder.heard == [("predict", 2), 4, "batch", 1, "batch", "end"]

    def test_a_transformer_may_replace_a_batch(self) -> None:
        class Doubled(Modifier):
            def on_evaluate_batch_begin(self, run: Run) -> None:
                run.batch = (run.batch[0] * 2, run.batch[1])

        bench = Bench(classify, Doubled())
        logits, labels = scores(9)
        wanted = nn.functional.cross_entropy(logits * 2, labels).item()
        close(bench.evaluate({"": bench.set(dataset(9))}), {"eval_loss": wanted})


class TestSharded:
    def test_processes_without_data_run_along(self) -> None:
        def body() -> list[Any]:
            torch.manual_seed(0)
            bench = Bench(step, model=Stack(), fsdp_plugin=FullyShardedDataParallelPlugin())
            metrics = [
                bench.evaluate({"": bench.set(torch.utils.data.TensorDataset(inputs[:n]), {"first": first})})
                for n in (1, 3, 9, 17)
            ]
            return [*metrics, bench.predict(torch.utils.data.TensorDataset(inputs)).predictions]

        def step(model: Any, batch: Any) -> EvaluationOutput:
            outputs = model(batch[0])
            return EvaluationOutput(outputs.square().sum(), float(len(outputs)), outputs, batch[0])

        def first(predictions: Tensor, labels: Tensor) -> Tensor:
            return predictions[:, 0]

        inputs = torch.randn(17, 8)
        torch.manual_seed(0)
        with torch.no_grad():
            outputs = Stack()(inputs)
        for *evaluated, predictions in run_world(body, num_processes=3, timeout=60):
            for metrics, n in zip(evaluated, (1, 3, 9, 17), strict=True):
                mean = outputs[:n].square().sum(1).mean().item()
                assert metrics["eval_loss"] == pytest.approx(mean, rel=1e-5)
                assert metrics["eval_first"] == pytest.approx(outputs[:n, 0].mean().item(), rel=1e-4)
            np.testing.assert_allclose(predictions, outputs, rtol=1e-4, atol=1e-5)

    def test_memory_that_runs_out_and_uneven_loaders_are_refused(self) -> None:
        def body() -> list[str]:
            bench = Bench(step, model=Stack(), fsdp_plugin=FullyShardedDataParallelPlugin())
            messages: list[str] = []
            data = torch.utils.data.TensorDataset(torch.randn(8, 8))
            with pytest.raises(NoExecutableBatchSizeError) as error:
                bench.evaluate({"": bench.set(data)})
            messages.append(str(error.value))
            loader = prepare_data_loader(torch.utils.data.DataLoader(data), even_batches=False)
            with pytest.raises(ConfigurationError) as refused:
                bench.evaluate({"": EvaluationSet(loader=loader)})
            return [*messages, str(refused.value)]

        def step(model: Any, batch: Any) -> EvaluationOutput:
            raise torch.OutOfMemoryError("CUDA out of memory")

        for memory, uneven in run_world(body, timeout=60):
            assert "4 rows" in memory
            assert "Give a smaller per_device_eval_batch_size" in memory
            assert "even_batches=False" in uneven


class TestErrors:
    def test_an_empty_set_is_named(self) -> None:
        bench = Bench()
        with pytest.raises(ConfigurationError, match="'dev' has no samples"):
            bench.evaluate({"dev": bench.set(Streamed(dataset(0)))})

    def test_a_step_that_returns_something_else_is_told(self) -> None:
        bench = Bench(lambda model, batch: batch[0])
        with pytest.raises(ConfigurationError, match="evaluation_step returned a Tensor"):
            bench.evaluate({"": bench.set(dataset(3))})

    def test_processes_that_measure_different_things_are_told(self) -> None:
        def body() -> str:
            import os

            bench = Bench()
            metrics = ["accuracy", "top2_accuracy"] if os.environ["RANK"] == "0" else ["accuracy", "top3_accuracy"]
            with pytest.raises(DistributedOperationException) as error:
                bench.evaluate({"dev": bench.set(dataset(9), metrics)})
            return str(error.value)

        for result in run_world(body, timeout=60):
            assert "rank 0: top2_accuracy of dev" in result
            assert "rank 1: top3_accuracy of dev" in result

    def test_two_metrics_of_one_name_are_told(self) -> None:
        bench = Bench()
        dev_set = bench.set(dataset(3), ["accuracy"], compute_metrics=lambda prediction: {"accuracy": 1.0})
        with pytest.raises(ConfigurationError, match="'eval_accuracy'"):
            bench.evaluate({"": dev_set})

    def test_a_process_that_raises_ends_all(self) -> None:
        def body() -> None:
            import os

            def step(model: Any, batch: Any) -> EvaluationOutput:
                if os.environ["RANK"] == "1":
                    raise ValueError("only here")
                return classify(model, batch)

            Bench(step).evaluate({"": Bench(step).set(dataset(9))})

        with pytest.raises(ProcessFailedError, match="only here"):
            run_world(body, timeout=60)


def test_texts_are_compared_as_they_are(everywhere: Any) -> None:
    def body(rank: int, size: int) -> dict[str, float]:
        bench = Bench(read)

        def right(texts: list[str], numbers: Tensor) -> list[bool]:
            return [text == f"TEXT {number}" for text, number in zip(texts, numbers.tolist(), strict=True)]

        return bench.evaluate({"": bench.set(Texts(10), {"right": right}, batch_size=3)})

    checked: Body = body
    assert all(metrics == {"eval_right": 1.0} for metrics in everywhere(checked))
