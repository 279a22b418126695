"""An update is that of one big batch, however its samples are spread over micro-batches and processes."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.worlds import run_world
from trainer_lib import ConfigurationError, DistributedDataParallelKwargs, LossResult, Trainer, TrainingArguments
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.foundation.errors import NonFiniteError
from trainer_lib.state import PartialState
from trainer_lib.state.accumulation_window import Share, nan_if_negative

IGNORED = -100


class Gradients(Callback):
    """Keeps the gradients of each update, and the losses and norms that were logged."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_optimizer_step_begin(self, run: Run) -> None:
        assert isinstance(run.model, nn.Module)
        self.steps.append(
            [parameter.grad.clone() for parameter in run.model.parameters() if parameter.grad is not None]
        )

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if "loss" in values:  # not the last one, with nothing new in it
            self.losses.append(values["loss"])
            self.norms.append(values["grad_norm"])


def arguments(**options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "optimizer": "sgd",
        "learning_rate": 0.0,  # so that each update begins at the same weights
        "log_every": 1,
        "shuffle": False,
        "max_grad_norm": 1e9,
        "use_cpu": True,
        "progress_bar": False,
    }
    return TrainingArguments(**{**defaults, **options})


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(5, (count,), generator=generator)


def train(trainer: Trainer) -> Gradients:
    gradients = Gradients()
    trainer.events.add(gradients)
    trainer.fit()
    return gradients


def big_batches(model: nn.Module, inputs: Tensor, targets: Tensor, size: int) -> Gradients:
    """Return what one process makes of batches of `size`, written by hand."""
    expected = Gradients()
    for start in range(0, len(inputs), size):
        model.zero_grad()
        outputs = model(inputs[start : start + size])
        loss = cross_entropy(outputs.flatten(0, -2), targets[start : start + size].flatten(), ignore_index=IGNORED)
        loss.backward()
        expected.steps.append(
            [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        )
        expected.losses.append(loss.item())
        norm = torch.nn.utils.get_total_norm(expected.steps[-1])
        expected.norms.append(float(norm))
    return expected


def assert_equal(actual: Gradients, expected: Gradients) -> None:
    assert len(actual.steps) == len(expected.steps)
    assert actual.losses == pytest.approx(expected.losses, rel=1e-6)
    assert actual.norms == pytest.approx(expected.norms, rel=1e-6)
    for mine, theirs in zip(actual.steps, expected.steps, strict=True):
        for first, second in zip(mine, theirs, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("count", "accumulation"),
    [(24, 1), (24, 3), (20, 3), (22, 3), (21, 1), (7, 10), (1, 4)],
    ids=["whole", "accumulated", "short last window", "smaller last batch", "rest of one", "more than an epoch", "one"],
)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_samples_spread_over_micro_batches_and_processes(count: int, accumulation: int, processes: int) -> None:
    inputs, targets = samples(count)

    def body() -> Gradients:
        options = arguments(gradient_accumulation_steps=accumulation)
        return train(Trainer(classifier(), options, train_dataset=(inputs, targets), loss_fn=cross_entropy))

    expected = big_batches(classifier(), inputs, targets, 4 * accumulation * processes)
    for actual in run_world(body, (), processes, timeout=60) if processes > 1 else [body()]:
        assert_equal(actual, expected)


class TwoHeads(nn.Module):
    """Returns the scores of a second head too, which its loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 2)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.body(inputs).tanh()
        scores = self.head(hidden)
        return {"loss": cross_entropy(scores, labels), "logits": scores, "others": self.other(hidden)}


def test_outputs_that_the_loss_does_not_depend_on_reach_ranks_without_samples() -> None:
    inputs, labels = samples(10)  # the second rank has none for its last batch
    rows = [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]

    def body() -> Gradients:
        ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
        return train(Trainer(TwoHeads(), arguments(ddp=ddp, per_device_train_batch_size=2), train_dataset=rows))

    model = TwoHeads()
    whole = big_batches(nn.Sequential(model.body, nn.Tanh(), model.head), inputs, labels, 4)
    for actual in run_world(body, (), 2, timeout=60):
        assert_equal(actual, whole)


class Tagger(nn.Module):
    """Has a label for each of 7 places of a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def sentences(count: int) -> tuple[Tensor, Tensor]:
    """Rows of which some have many labels that count, and some none at all."""
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(top, (count, 7), generator=generator) for top in (11, 5))
    lengths = torch.randint(0, 8, (count,), generator=generator)
    lengths[:4] = torch.tensor([7, 0, 0, 0])  # the second batch of two has nothing to learn from
    return tokens, labels.masked_fill(torch.arange(7) >= lengths[:, None], IGNORED)


def tokens_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


class TaggerTrainer(Trainer):
    """Has a mean over tokens as its loss, which `num_items` counts."""

    def compute_loss(self, model: Any, batch: Any) -> Tensor:
        return tokens_loss(model(batch[0]), batch[1])


class DividingTrainer(Trainer):
    """Divides by the number of tokens itself: 0 / 0 where there are none, as are the gradients."""

    def compute_loss(self, model: Any, batch: Any) -> Tensor:
        targets = batch[1].flatten()
        losses = cross_entropy(model(batch[0]).flatten(0, -2), targets.clamp(min=0), reduction="none")
        counts = targets != IGNORED
        return (losses * counts).sum() / counts.sum()


class SummingTrainer(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> LossResult:
        outputs, targets = model(batch[0]), batch[1]
        loss = cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")
        return LossResult(loss, weight=(targets != IGNORED).sum(), outputs=outputs)


class HearsLosses(Modifier):
    """Has losses come as sums with weights."""

    def on_loss(self, run: Run) -> None:
        pass


@pytest.mark.parametrize("kind", ["loss_fn", "mean", "own mean", "own mean, listened to", "sum"])
@pytest.mark.parametrize("processes", [1, 2])
def test_tokens_spread_over_micro_batches_and_processes(kind: str, processes: int) -> None:
    tokens, labels = sentences(21)

    def body() -> Gradients:
        options = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=2)
        if kind == "loss_fn":
            return train(Trainer(Tagger(), options, train_dataset=(tokens, labels), loss_fn=tokens_loss))
        cls = {"mean": TaggerTrainer, "sum": SummingTrainer}.get(kind, DividingTrainer)
        callbacks = [HearsLosses()] if kind.endswith("listened to") else []
        return train(cls(Tagger(), options, train_dataset=(tokens, labels), callbacks=callbacks))

    expected = big_batches(Tagger(), tokens, labels, 4 * processes)
    for actual in run_world(body, (), processes, timeout=60) if processes > 1 else [body()]:
        assert_equal(actual, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_class_weights_and_smoothing_count_as_torch_counts_them(weighted: bool) -> None:
    inputs, targets = samples(18)
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0]) if weighted else None
    loss_fn = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1, ignore_index=3)
    options = arguments(gradient_accumulation_steps=2)
    actual = train(Trainer(classifier(), options, train_dataset=(inputs, targets), loss_fn=loss_fn))
    model = classifier()
    for step, start in enumerate(range(0, 18, 8)):
        model.zero_grad()
        loss_fn(model(inputs[start : start + 8]), targets[start : start + 8]).backward()
        for mine, parameter in zip(actual.steps[step], model.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-7)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples without a length."""

    def __init__(self, count: int) -> None:
        self.samples = samples(count)

    def __iter__(self) -> Any:
        return iter(list(zip(*self.samples, strict=True)))


@pytest.mark.parametrize("processes", [1, 2])
def test_iterable_data(processes: int) -> None:
    def body() -> Gradients:
        options = arguments(gradient_accumulation_steps=3, lr_scheduler="constant")
        return train(Trainer(classifier(), options, train_dataset=Stream(29), loss_fn=cross_entropy))

    expected = big_batches(classifier(), *samples(29), 12 * processes)
    for actual in run_world(body, (), processes, timeout=60) if processes > 1 else [body()]:
        assert_equal(actual, expected)


@pytest.mark.parametrize("processes", [1, 2])
def test_batch_statistics_do_not_see_repeated_samples(processes: int) -> None:
    """One of two processes has no sample of its own in the last round."""
    inputs, targets = samples(9 if processes == 2 else 5)

    def body() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None))
        options = arguments(learning_rate=0.1)
        Trainer(model, options, train_dataset=(inputs, targets), loss_fn=cross_entropy).fit()
        return [float(model[1].num_batches_tracked), float(model[1].running_mean.sum())]  # type: ignore[operator]

    # A batch of one sample cannot be normalized in training: torch says so, and so it is not what is tried here.
    if processes == 1:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            body()


def test_causal_models_of_transformers_count_the_targets_they_compare() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=11, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    reference = copy.deepcopy(model)
    tokens, labels = sentences(14)
    labels = torch.where(labels == IGNORED, IGNORED, tokens)
    data = [{"input_ids": first, "labels": two} for first, two in zip(tokens, labels, strict=True)]
    options = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    actual = train(Trainer(model, options, train_dataset=data))
    for step, start in enumerate(range(0, 14, 6)):
        reference.zero_grad()
        loss = reference(input_ids=tokens[start : start + 6], labels=labels[start : start + 6]).loss
        loss.backward()
        assert actual.losses[step] == pytest.approx(loss.item(), rel=1e-6)
        for mine, parameter in zip(actual.steps[step], reference.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(mine, parameter.grad, rtol=2e-5, atol=1e-7)


def test_classifiers_of_transformers_return_means_over_samples() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=11,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    config.num_labels = 5
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    reference = copy.deepcopy(model)
    tokens, targets = sentences(11)[0], samples(11)[1]
    data = [{"input_ids": first, "labels": two} for first, two in zip(tokens, targets, strict=True)]
    actual = train(Trainer(model, arguments(gradient_accumulation_steps=2), train_dataset=data))
    for step, start in enumerate(range(0, 11, 8)):
        reference.zero_grad()
        loss = reference(input_ids=tokens[start : start + 8], labels=targets[start : start + 8]).loss
        loss.backward()
        assert actual.losses[step] == pytest.approx(loss.item(), rel=1e-6)
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
        assert actual.norms[step] == pytest.approx(float(norm), rel=1e-5)


def test_a_ready_loader_is_taken_as_it_is() -> None:
    inputs, targets = samples(20)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=5)
    actual = train(Trainer(classifier(), arguments(), train_dataset=loader, loss_fn=cross_entropy))
    assert_equal(actual, big_batches(classifier(), inputs, targets, 5))


@pytest.mark.parametrize("weight", [math.inf, -3.0, torch.tensor(math.inf), torch.tensor(-3.0), torch.tensor([-1])])
def test_weights_that_are_no_numbers_of_items_are_refused(weight: Any) -> None:
    class Weighing(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> LossResult:
            return LossResult(cross_entropy(model(batch[0]), batch[1]), weight=weight)

    with pytest.raises(ConfigurationError, match=r"weight must be a finite number of at least 0 \(got"):
        train(Weighing(classifier(), arguments(), train_dataset=samples(4)))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_weight_that_only_the_device_knows_to_be_bad_is_named(processes: int) -> None:
    """Accelerators make NaN of negative weights, and nothing waits to read them; here it is given."""

    class Weighing(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> LossResult:
            bad = self.accelerator.is_last_process and self.state.step == 1
            return LossResult(cross_entropy(model(batch[0]), batch[1]), weight=torch.tensor(math.nan if bad else 4.0))

    def body() -> str:
        trainer = Weighing(classifier(), arguments(), train_dataset=samples(16 * processes))
        with pytest.raises(NonFiniteError) as caught:
            trainer.fit()
        assert trainer.state.step == 1
        return str(caught.value)

    where = " on process 1" if processes == 2 else ""
    for result in run_world(body, (), processes, timeout=60):
        assert re.match(rf"In step 2 the weight of the loss is negative, NaN or infinite{where} \(samples \d+", result)


def test_negative_weights_on_accelerators_become_nan() -> None:
    tensor = torch.tensor([-3.0, -math.inf, -0.0, 0.0, 3.0, math.inf])
    made = [float(nan_if_negative(number)) for number in tensor]
    assert [math.isnan(number) for number in made] == [True, True, False, False, False, False]
    assert made[2:] == [0.0, 0.0, 3.0, math.inf]
    share = Share(4.0)
    share.total = nan_if_negative(tensor[0]) + nan_if_negative(tensor[4])
    assert math.isnan(float(share.factor()))  # which makes the gradients NaN


@pytest.mark.parametrize("shards", [False, True])
def test_updates_in_double_are_exact_in_double(shards: bool) -> None:
    """Neither the weights of uneven ranks nor clipping round to single precision."""
    inputs, targets = samples(19)
    inputs = inputs.double()

    def body() -> dict[str, Tensor]:
        options = arguments(max_grad_norm=0.01, learning_rate=0.1, lr_scheduler="constant", fsdp=shards)
        trainer = Trainer(classifier().double(), options, train_dataset=(inputs, targets), loss_fn=cross_entropy)
        trainer.fit()
        return trainer.accelerator.get_state_dict(trainer.accelerator.prepared.models[0])

    model = classifier().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 19, 12):
        optimizer.zero_grad()
        cross_entropy(model(inputs[start : start + 12]), targets[start : start + 12]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    for weights in run_world(body, (), 3, timeout=60)[:1]:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-13, atol=1e-14)


class Contrastive(Trainer):
    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        first, second = model(batch["first"]), model(batch["second"])
        ranks = self.accelerator.num_processes
        others = torch.cat(all_gather(second)) if ranks > 1 else second
        start = self.accelerator.process_index * len(first)
        return cross_entropy(first @ others.T, torch.arange(start, start + len(first)))


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")
def test_negatives_of_all_ranks_give_the_update_of_one_rank_with_all_of_them() -> None:
    def body() -> list[list[Tensor]]:
        torch.manual_seed(1)
        rows = {"first": torch.randn(16, 6), "second": torch.randn(16, 6)}
        seen, size = Gradients(), 8 // PartialState().num_processes
        Contrastive(
            classifier(), arguments(per_device_train_batch_size=size), train_dataset=rows, callbacks=[seen]
        ).fit()
        return seen.steps

    whole = body()
    for steps in run_world(body, (), 2, timeout=60):
        torch.testing.assert_close(steps, whole, rtol=1e-5, atol=1e-7)


def test_a_step_computed_twice_is_not_counted_twice_where_its_optimizer_zeroes_the_first() -> None:
    class Twice(Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> LossResult:
            self.compute(model, batch)
            self.optimizers["default"].zero_grad()
            return LossResult(self.compute(model, batch), weight=len(batch[1]))

        def compute(self, model: nn.Module, batch: Any) -> Tensor:
            loss = cross_entropy(model(batch[0]), batch[1], reduction="sum")
            self.backward(loss, len(batch[1]))
            return loss.detach()

    torch.manual_seed(1)
    rows = torch.randn(8, 6), torch.randint(5, (8,))
    once, twice = Gradients(), Gradients()
    Trainer(classifier(), arguments(), train_dataset=rows, loss_fn=cross_entropy, callbacks=[once]).fit()
    Twice(classifier(), arguments(), train_dataset=rows, callbacks=[twice]).fit()
    torch.testing.assert_close(twice.steps, once.steps, rtol=1e-6, atol=1e-7)


class Graphs:
    """A batch that only its owner can count, as graphs of different sizes are collated."""

    def __init__(self, nodes: Tensor, sides: Tensor) -> None:
        self.nodes, self.sides = nodes, sides

    def to(self, device: torch.device, non_blocking: bool = False) -> "Graphs":
        del non_blocking
        return Graphs(self.nodes.to(device), self.sides.to(device))

    @staticmethod
    def of(pairs: list[Any]) -> "Graphs":
        return Graphs(torch.stack([node for node, _ in pairs]), torch.stack([side for _, side in pairs]))


class OfGraphs(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch.nodes), batch.sides)


@pytest.mark.parametrize("processes", [1, 2])
def test_batches_of_a_class_of_your_own_count_the_samples_that_were_read(processes: int) -> None:
    def body(rank: int = 0) -> tuple[Gradients, float]:
        del rank
        data = TensorDataset(*samples(21))
        options = arguments(global_batch_size=8, per_device_train_batch_size=2)
        trainer = OfGraphs(classifier(), options, train_dataset=data, eval_dataset=data, collate_fn=Graphs.of)
        return train(trainer), trainer.evaluate()["eval_loss"]

    results = [body()] if processes == 1 else run_world(body, num_processes=processes)
    inputs, targets = samples(21)
    expected = big_batches(classifier(), inputs, targets, 8)
    whole = cross_entropy(classifier()(inputs), targets).item()
    for gradients, loss in results:
        assert_equal(gradients, expected)
        assert loss == pytest.approx(whole, rel=1e-6)


def test_batches_that_nothing_counts_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    inputs, targets = samples(12)
    batches: Any = [Graphs(inputs[:8], targets[:8]), Graphs(inputs[8:], targets[8:])]

    class Counted(OfGraphs):
        def num_items(self, batch: Graphs) -> float:
            return float(len(batch.sides))

    for kind, warnings in ((Counted, 0), (OfGraphs, 1)):
        caplog.clear()
        kind(classifier(), arguments(), train_dataset=DataLoader(batches, batch_size=None)).fit()
        assert caplog.text.count("a batch of type Graphs cannot be counted") == warnings


class Prototypes(nn.Module):
    """A loss with weights of its own: the cross-entropy of the distances to one point for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(2)))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(-torch.cdist(outputs, self.points), targets)


class Measured(nn.Module):
    """A model with the weights of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.loss_fn = classifier(), Prototypes()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


@pytest.mark.parametrize("fsdp", [None, True])
def test_weights_of_a_loss_that_is_a_part_of_the_model_are_trained(fsdp: bool | None) -> None:
    def body(size: int, fsdp: bool | None) -> Tensor:
        model = Measured()
        args = arguments(per_device_train_batch_size=size, learning_rate=0.1, fsdp=fsdp)
        Trainer(model, args, train_dataset=samples(16), loss_fn=model.loss_fn).fit()
        points: Any = model.loss_fn.points
        return (points.full_tensor() if fsdp else points).detach()

    expected = body(8, None)
    assert not torch.equal(expected, Prototypes().points)
    for points in run_world(lambda: body(4, fsdp), num_processes=2):
        torch.testing.assert_close(points, expected, rtol=1e-6, atol=1e-6)
