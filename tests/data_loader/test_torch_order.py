"""The order of a prepared loader: the one that it has without being prepared, and that Accelerate gives it."""

import json
import math
import random
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data_loader.reference import Numbers, Stream, by_hand, flat, handed, read, read_all
from tests.worlds import run_world
from trainer_lib import PartialState, StateError
from trainer_lib.data_loader import SeedableRandomSampler, prepare_data_loader, skip_first_batches
from trainer_lib.data_loader.order.epoch_order import samplers_in
from trainer_lib.launchers import run_forked
from trainer_lib.trainer.data.dataloaders import train_loader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call

SIZE, EPOCHS = 21, 3


class Permuted(Sampler[int]):
    """A user's sampler that draws its order from all global generators when it is iterated."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SIZE


class Generators(Sampler[int]):
    """A user's sampler that holds generators of all kinds."""

    def __init__(self) -> None:
        self.python, self.numpy, self.old = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.inner = RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(1))

    def __iter__(self) -> Iterator[int]:
        order = list(self.inner)
        self.python.shuffle(order)
        self.old.shuffle(order)
        return iter(self.numpy.permutation(order).tolist())

    def __len__(self) -> int:
        return SIZE


class OnTheWay(Sampler[int]):
    """A user's sampler that draws each sample from generators of its own when it is asked for."""

    def __init__(self) -> None:
        self.generator, self.python = torch.Generator().manual_seed(1), random.Random(1)

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield (int(torch.randint(SIZE, (), generator=self.generator)) + self.python.randrange(SIZE)) % SIZE

    def __len__(self) -> int:
        return SIZE


class Pairs(Sampler[list[int]]):
    """A user's batch sampler that shuffles its batches, inside of which another sampler draws."""

    def __init__(self) -> None:
        self.sampler = RandomSampler(range(SIZE))

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        pairs = [order[start : start + 2] for start in range(0, SIZE - 1, 2)]
        random.shuffle(pairs)
        return iter(pairs)

    def __len__(self) -> int:
        return SIZE // 2


class Shuffled(IterableDataset[int]):
    """An iterable dataset that shuffles when it is iterated."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


class Seeded(IterableDataset[int]):
    """An iterable dataset that shuffles by a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=self.generator).tolist())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _random(**options: Any) -> RandomSampler:
    return RandomSampler(range(SIZE), generator=_generator(), **options)


def _with_sampler(sampler: Callable[[], Any], **options: Any) -> Callable[[int], DataLoader[int]]:
    return lambda size: DataLoader(Numbers(SIZE), size, sampler=sampler(), **options)


def _shuffled(kind: Any = DataLoader, has_generator: bool = False, **options: Any) -> Callable[[int], DataLoader[int]]:
    return lambda size: kind(
        Numbers(SIZE), size, shuffle=True, generator=_generator() if has_generator else None, **options
    )


# Each makes a loader of batches of so many samples.
LOADERS: dict[str, Callable[[int], DataLoader[int]]] = {
    "sequential": lambda size: DataLoader(Numbers(SIZE), size),
    "shuffled": _shuffled(),
    "generator of the loader": _shuffled(has_generator=True),
    "generator of the sampler": _with_sampler(_random),
    "two generators": lambda size: DataLoader(Numbers(SIZE), size, sampler=_random(), generator=_generator()),
    "drop_last": _shuffled(drop_last=True),
    "drop_last, generator": _shuffled(has_generator=True, drop_last=True),
    "batch sampler": lambda size: DataLoader(
        Numbers(SIZE), batch_sampler=BatchSampler(RandomSampler(range(SIZE)), size, drop_last=False)
    ),
    "batch sampler, generator": lambda size: DataLoader(
        Numbers(SIZE), batch_sampler=BatchSampler(_random(), size, drop_last=False)
    ),
    "weighted": _with_sampler(lambda: WeightedRandomSampler(range(1, SIZE + 1), SIZE)),
    "weighted, generator": _with_sampler(
        lambda: WeightedRandomSampler(range(1, SIZE + 1), SIZE, generator=_generator())
    ),
    "subset": _with_sampler(lambda: SubsetRandomSampler(range(SIZE))),
    "replacement": _with_sampler(lambda: _random(replacement=True, num_samples=70)),
    "more than there are": _with_sampler(lambda: _random(num_samples=50)),
    "sampler of the user": _with_sampler(Permuted),
    "generators of the user": _with_sampler(Generators),
    "generators of the user, sample by sample": _with_sampler(OnTheWay),
    "stateful": _shuffled(StatefulDataLoader),
    "stateful, generator": _shuffled(StatefulDataLoader, has_generator=True),
}
READ_ALONE: dict[str, Callable[[int], DataLoader[int]]] = {  # without batches that several ranks could share by samples
    "no batches": lambda size: DataLoader(Numbers(SIZE), None, shuffle=True, collate_fn=torch.tensor),
    "batch sampler of the user": lambda size: DataLoader(Numbers(SIZE), batch_sampler=Pairs()),
    "iterable": lambda size: DataLoader(Shuffled(), size),
    "iterable, generator": lambda size: DataLoader(Seeded(), size),
}
WORKERS: dict[str, Callable[[int], DataLoader[int]]] = {
    "workers": _shuffled(num_workers=2),
    "workers, generator": _shuffled(has_generator=True, num_workers=2),
    "workers that persist": _shuffled(num_workers=2, persistent_workers=True),
    "workers that persist, generator": _shuffled(has_generator=True, num_workers=2, persistent_workers=True),
    "iterable, generator, workers that persist": lambda size: DataLoader(
        Seeded(), size, num_workers=2, persistent_workers=True
    ),
    "workers, generators of the user, sample by sample": _with_sampler(OnTheWay, num_workers=2),
    "workers, batch sampler of the user": lambda size: DataLoader(Numbers(SIZE), batch_sampler=Pairs(), num_workers=2),
    "workers, stateful": _shuffled(StatefulDataLoader, has_generator=True, num_workers=2),
}
DAILY_WORKERS = ("workers", "workers that persist, generator", "workers, stateful")  # of which `make test` starts some
ALL = {**LOADERS, **READ_ALONE, **WORKERS}
SHARED_BY_WORKERS = (
    "workers",
    "workers that persist, generator",
    "workers, stateful",
    "workers, generators of the user, sample by sample",
)


def _seed(seed: int) -> None:
    for seed_one in (torch.manual_seed, random.seed, np.random.seed):
        seed_one(seed)


def _drawn() -> list[float]:
    return [torch.rand(()).item(), random.random(), np.random.random()]


def _alone(loader: DataLoader[Any], **options: Any) -> Any:
    return prepare_data_loader(loader, num_processes=1, process_index=0, **options)


def _epochs(loader: Any, leaves_at: int | None = None, draws: bool = True) -> list[Any]:
    """Return the batches of some epochs, and what training draws from the global generators in the meantime."""
    seen: list[Any] = []
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader):
            seen.append((batch.tolist(), torch.rand(()).item() if draws else None))
            if (epoch, number) == (1, leaves_at):
                break
        seen.append(_drawn() if draws else None)
    return seen


@pytest.mark.parametrize(
    ("kind", "leaves_at"),
    [
        *((kind, leaves_at) for kind in {**LOADERS, **READ_ALONE} for leaves_at in (None, 1)),
        *((kind, 1) for kind in DAILY_WORKERS),
        *(pytest.param(kind, None, marks=pytest.mark.slow) for kind in WORKERS),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in WORKERS if kind not in DAILY_WORKERS),
    ],
)
def test_order_and_generators_are_those_of_the_plain_loader(kind: str, leaves_at: int | None) -> None:
    _seed(7)
    plain = ALL[kind](4)
    expected = [_epochs(plain, leaves_at), plain.generator and plain.generator.get_state().tolist()]
    _seed(7)
    prepared = _alone(ALL[kind](4))
    generator = prepared.generator
    assert [_epochs(prepared, leaves_at), generator and generator.get_state().tolist()] == expected


def _with_a_draw(rows: list[Any]) -> Any:
    return rows, torch.rand(()).item()


def test_workers_draw_what_those_of_the_plain_loader_draw() -> None:
    def epochs(prepare: Callable[[Any], Any]) -> list[Any]:
        _seed(7)
        given = DataLoader(range(6), 2, num_workers=2, collate_fn=_with_a_draw)  # type: ignore[arg-type]
        loader = prepare(given)
        return [list(loader) for _ in range(2)]

    assert epochs(_alone) == epochs(lambda loader: loader)


# -- several ranks ---------------------------------------------------------------------------------------------------


def _of_rank(kind: str, **options: Any) -> tuple[list[list[Any]], list[Any], dict[str, Any]]:
    rank = PartialState(cpu=True).process_index
    _seed(7 + rank)  # only the generators of rank 0 count
    make = ALL[kind]
    loader = make(6 if options.get("split_batches") else 3)
    for generator in {loader.generator, getattr(loader.sampler, "generator", None)}:
        if generator is not None:
            generator.manual_seed(generator.initial_seed() + 5 * rank)
    prepared = prepare_data_loader(loader, **options)
    epochs, saved = [], {}
    for epoch in range(EPOCHS):
        batches = []
        for number, batch in enumerate(prepared):
            batches.append(handed(batch, prepared))
            if (epoch, number) == (1, 1):
                saved = json.loads(json.dumps(prepared.state_dict()))
        epochs.append(batches)
    _seed(70 + rank)
    resumed = prepare_data_loader(make(6 if options.get("split_batches") else 3), **options)
    resumed.load_state_dict(saved)
    return epochs, read_all(resumed), saved


OPTIONS: list[dict[str, Any]] = [{}, {"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}]


@pytest.mark.parametrize(
    "kind", [*LOADERS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SHARED_BY_WORKERS)]
)
def test_two_ranks_share_the_order_of_one(kind: str) -> None:
    _seed(7)
    orders = [flat(read(loader)) for loader in [ALL[kind](6)] for _ in range(EPOCHS)]
    drop = "drop_last" in kind
    of_ranks = run_world(lambda: [_of_rank(kind, **options) for options in OPTIONS], num_processes=2)
    for rank, of_options in enumerate(of_ranks):
        for options, (epochs, resumed, saved) in zip(OPTIONS, of_options, strict=True):
            split, even = "split_batches" in options, "even_batches" not in options
            shared = [
                by_hand(order, 6 if split else 3, 2, rank, split=split, drop_last=drop, even=even) for order in orders
            ]
            assert [[b.samples for b in epoch] for epoch in epochs] == [[b.samples for b in s] for s in shared], options
            assert [batch.samples for batch in resumed] == [batch.samples for batch in shared[1][2:]], options
            alone = _alone(ALL[kind](SIZE - 12))  # another world, and another batch size
            alone.load_state_dict(saved)
            assert flat(read(alone)) == orders[1][12:] or drop, options


class Drawn(Sampler[int]):
    """A user's sampler with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 8


UNLIKE: dict[str, Callable[..., DataLoader[Any]]] = {
    "sequential": lambda **options: DataLoader(Numbers(8), **options),
    "shuffled": lambda **options: DataLoader(Numbers(8), shuffle=True, **options),
    "generator": lambda **options: DataLoader(
        Numbers(8), shuffle=True, generator=torch.Generator().manual_seed(1), **options
    ),
    "weighted": lambda **options: DataLoader(Numbers(8), sampler=WeightedRandomSampler([0.5] * 8, 8), **options),
    "subset": lambda **options: DataLoader(Numbers(8), sampler=SubsetRandomSampler(range(8)), **options),
    "own": lambda **options: DataLoader(Numbers(8), sampler=Drawn(), **options),
    "batches": lambda **options: DataLoader(
        Numbers(8), batch_sampler=BatchSampler(Drawn(), 2, drop_last=False), **options
    ),
    "stream": lambda **options: DataLoader(Stream(8), **options),
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_generators_of_each_rank_move_as_with_the_plain_loader(workers: int) -> None:
    def body(kind: str, prepares: bool, dispatches: bool) -> list[list[float]]:
        rank = PartialState(cpu=True).process_index
        loader = UNLIKE[kind](num_workers=workers)
        if prepares:
            loader = prepare_data_loader(loader, dispatch_batches=dispatches, put_on_device=dispatches)
        _seed(7 + rank)
        draws, saved = [_drawn()], {}
        for _ in range(2):
            for number, _ in enumerate(islice(loader, 2)):
                draws.append(_drawn())
                if prepares and not number:
                    saved = loader.state_dict()  # type: ignore[attr-defined]
        if prepares and not dispatches:
            loader = prepare_data_loader(UNLIKE[kind](num_workers=workers))
            loader.load_state_dict(saved)
            _seed(7 + rank)
            next(iter(loader))
            assert _drawn() == draws[0], "a resume draws nothing"
        return draws

    for kind in UNLIKE:
        plain = run_world(body, (kind, False, False), num_processes=2)
        assert run_world(body, (kind, True, False), num_processes=2) == plain, kind
        if kind in ("sequential", "own", "stream"):
            assert run_world(body, (kind, True, True), num_processes=2) == plain, kind
        assert plain[0] != plain[1]


def test_a_rank_that_reads_alone_says_that_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trainer_lib.collectives import agreement

    monkeypatch.setattr(agreement, "PATIENCE", 0.05)

    def body() -> str:
        state = PartialState(cpu=True)
        loader = prepare_data_loader(LOADERS["shuffled"](3))
        if state.is_main_process:
            threading.Event().wait(0.5)
        next(iter(loader))
        return caplog.text

    _, text = run_forked(body, timeout=60)
    assert "Rank 1 has waited 0.05 seconds in a pass over a prepared loader for the other ranks." in text


# -- resuming --------------------------------------------------------------------------------------------------------


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    for restore, state in zip((torch.set_rng_state, random.setstate, np.random.set_state), states, strict=True):
        restore(state)


def _training(loader: Any) -> Generator[Any, None, None]:
    while True:
        for batch in loader:
            yield batch.tolist(), _drawn()


@pytest.mark.parametrize(
    "kind",
    [
        *LOADERS,
        *READ_ALONE,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("workers that persist", "workers, generator")),
    ],
)
def test_a_resumed_loader_continues_in_the_same_order(kind: str) -> None:
    _seed(7)
    whole = list(islice(_training(_alone(ALL[kind](4))), 16))
    for done in (0, 2, 5, 6, 9):
        _seed(7)
        saving = _alone(ALL[kind](4))
        training = _training(saving)
        assert list(islice(training, done)) == whole[:done]
        state, generators = json.loads(json.dumps(saving.state_dict())), _generators()
        training.close()
        _seed(99)
        resumed = _alone(ALL[kind](4))
        resumed.load_state_dict(state)
        _restore(generators)
        assert list(islice(_training(resumed), 16 - done)) == whole[done:]


@pytest.mark.parametrize("kind", ["shuffled", "workers that persist"])
def test_skipping_the_batches_of_a_resumed_pass_changes_no_random_numbers(kind: str) -> None:
    _seed(7)
    saving = _training(_alone(ALL[kind](4)))
    whole = list(islice(saving, 16))
    saving.close()
    _seed(7)
    saving = _alone(ALL[kind](4))
    training = _training(saving)
    assert list(islice(training, 2)) == whole[:2]
    state, generators = saving.state_dict(), _generators()
    training.close()
    resumed = _alone(ALL[kind](4))
    resumed.load_state_dict(state)
    _restore(generators)
    rest = [(batch.tolist(), _drawn()) for batch in skip_first_batches(resumed, 2)]
    assert [*rest, *islice(_training(resumed), 14 - len(rest))] == whole[2:]


@pytest.mark.parametrize("kind", LOADERS)
def test_skipping_batches_leaves_the_rest_of_the_order(kind: str) -> None:
    _seed(7)
    plain = LOADERS[kind](4)
    first, second = read(plain), read(plain)
    _seed(7)
    prepared = _alone(LOADERS[kind](4))
    assert read(skip_first_batches(prepared, 2)) == first[2:]
    assert read(prepared) == second


@pytest.mark.parametrize("kind", ["shuffled", "weighted", "generators of the user", "replacement", "stateful"])
def test_the_samples_of_a_batch_are_told_without_drawing(kind: str) -> None:
    _seed(7)
    expected = _epochs(LOADERS[kind](4))
    _seed(7)
    prepared = _alone(LOADERS[kind](4))
    told: list[Any] = []

    class Told:
        def __iter__(self) -> Iterator[Any]:
            for batch in prepared:
                told.append(prepared.sample_ids() == batch.tolist())
                yield batch

    assert _epochs(Told()) == expected
    assert all(told)


def test_a_sampler_that_draws_on_its_way_has_one_order_whatever_training_draws() -> None:
    class Drawing(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return (int(torch.randint(SIZE, ())) for _ in range(2000))

    def loader() -> Any:
        _seed(7)
        return _alone(DataLoader(Numbers(SIZE), 4, sampler=Drawing()))

    orders: list[Any] = []
    for draws in (False, True):
        training, whole, state = loader(), [], {}
        for batch in training:
            whole += batch.tolist()
            if draws:
                torch.rand(())
            if len(whole) == 1200:
                state = json.loads(json.dumps(training.state_dict()))
        orders.append(whole)
        if not draws:  # training draws on from the sampler's first draw
            after = torch.rand(())
            _seed(7)
            torch.empty((), dtype=torch.int64).random_()
            torch.randint(SIZE, ())
            assert after == torch.rand(())
        resumed = loader()
        resumed.load_state_dict(state)
        assert flat(read(resumed)) == whole[1200:]
    assert orders[0] == orders[1]


# A state of a loader from before its order was torch's, and the rest of that order: of this epoch, and of the next one.
_BEFORE = {"epoch": 1, "position": 8, "seed": 5, "style": "map", "unit": "samples", "length": SIZE, "bookmark": None}
_SHUFFLED = (
    [1, 3, 14, 12, 5, 11, 7, 15, 4, 6, 18, 16, 17],
    [12, 0, 20, 18, 8, 1, 4, 9, 14, 2, 16, 6, 3, 19, 7, 5, 11, 15, 10, 17, 13],
)


@pytest.mark.parametrize(
    ("sampler", "rest"),
    [
        (lambda: RandomSampler(range(SIZE)), _SHUFFLED),
        (lambda: SeedableRandomSampler(range(SIZE), data_seed=9), _SHUFFLED),
        (
            lambda: WeightedRandomSampler(range(1, SIZE + 1), SIZE),
            (
                [9, 9, 4, 12, 10, 13, 13, 17, 9, 19, 13, 18, 10],
                [11, 5, 11, 11, 17, 17, 9, 18, 6, 10, 20, 20, 20, 11, 20, 19, 11, 2, 11, 19, 20],
            ),
        ),
        (
            lambda: RandomSampler(range(SIZE), replacement=True, num_samples=SIZE),
            (
                [3, 12, 11, 3, 15, 10, 20, 0, 3, 1, 0, 17, 9],
                [8, 3, 16, 19, 19, 16, 9, 9, 11, 9, 18, 6, 5, 15, 11, 6, 2, 18, 17, 8, 15],
            ),
        ),
    ],
)
def test_a_checkpoint_from_before_continues_with_the_computed_order(
    sampler: Callable[[], Any], rest: tuple[list[int], list[int]]
) -> None:
    def loader() -> Any:
        return _alone(DataLoader(Numbers(SIZE), 4, sampler=sampler()))

    resumed, later = loader(), loader()
    resumed.load_state_dict(_BEFORE)
    generator = torch.get_rng_state()
    assert (flat(read(resumed)), flat(read(resumed))) == rest
    assert torch.equal(torch.get_rng_state(), generator)
    resumed.load_state_dict(_BEFORE)
    next(iter(resumed))
    later.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert (flat(read(later)), flat(read(later))) == (rest[0][4:], rest[1])


def test_a_checkpoint_continues_in_its_order_whatever_the_options_are() -> None:
    def loader(**options: Any) -> Any:
        _seed(7)
        return _alone(DataLoader(Numbers(SIZE), 4, shuffle=True), data_seed=5, **options)

    for saved, loaded in ((True, False), (False, True)):
        whole, saving = loader(low_memory_shuffle=saved), loader(low_memory_shuffle=saved)
        next(iter(saving))
        resumed = loader(low_memory_shuffle=loaded)
        resumed.load_state_dict(saving.state_dict())
        _seed(7)
        assert flat(read(whole))[4:] == flat(read(resumed))


def test_a_state_with_other_generators_is_refused() -> None:
    saving, loading = _alone(LOADERS["two generators"](4)), _alone(LOADERS["shuffled"](4))
    next(iter(saving))
    with pytest.raises(StateError, match=r"saved by a loader with 2 random generators.*this loader has 0"):
        loading.load_state_dict(saving.state_dict())


# -- Accelerate ------------------------------------------------------------------------------------------------------


def _accelerates(kind: str, processes: int, rank: int, options: dict[str, Any]) -> Any:
    from accelerate.data_loader import prepare_data_loader as prepare

    return prepare(LOADERS[kind](4), num_processes=processes, process_index=rank, use_seedable_sampler=True, **options)


@pytest.mark.parametrize(
    "kind",
    ["shuffled", "generator of the loader", "generator of the sampler", "drop_last", "batch sampler", "replacement",
     "more than there are", "sequential"],
)  # fmt: skip
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("options", [{}, {"data_seed": 5}, {"split_batches": True}, {"even_batches": False}])
def test_a_seedable_sampler_has_accelerates_order(kind: str, processes: int, options: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    for rank in range(processes):
        torch.manual_seed(11)
        theirs = _accelerates(kind, processes, rank, options)
        expected = [read(theirs) for _ in range(EPOCHS)]
        torch.manual_seed(11)
        ours = prepare_data_loader(
            LOADERS[kind](4), num_processes=processes, process_index=rank, use_seedable_sampler=True, **options
        )
        assert [read(ours) for _ in range(EPOCHS)] == expected


@pytest.mark.parametrize("kind", [*LOADERS, "workers", "workers that persist, generator"])
def test_one_process_has_the_order_that_accelerate_gives_it(kind: str) -> None:
    pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader as prepare

    _seed(7)
    expected = _epochs(prepare(ALL[kind](4)), draws=False)
    _seed(7)
    assert _epochs(_alone(ALL[kind](4)), draws=False) == expected


@pytest.mark.parametrize("kind", ["generator of the loader", "generator of the sampler", "drop_last, generator"])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_share_a_generators_order_as_with_accelerate(kind: str, rank: int) -> None:
    pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader as prepare

    expected = _epochs(prepare(LOADERS[kind](4), num_processes=2, process_index=rank), draws=False)
    ours = prepare_data_loader(LOADERS[kind](4), num_processes=2, process_index=rank)
    assert _epochs(ours, draws=False) == expected


class Rotated(Sampler[Any]):
    """A user's sampler of samples or batches whose order follows from the epoch, and is listed when it is iterated.

    Args:
        batch_size: The samples of a batch; `None`: samples.
        reseeds: Whether the epoch seeds a generator that the order is drawn from.
    """

    def __init__(self, batch_size: int | None, reseeds: bool = False) -> None:
        self.batch_size, self.drop_last, self.epoch = batch_size, False, 0
        self.generator = torch.Generator() if reseeds else None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if self.generator is not None:
            self.generator.manual_seed(epoch)

    def __iter__(self) -> Iterator[Any]:
        order = [(index + self.epoch) % SIZE for index in range(SIZE)]
        if self.generator is not None:
            order = torch.randperm(SIZE, generator=self.generator).tolist()
        size = self.batch_size
        return iter(order if size is None else [order[first : first + size] for first in range(0, SIZE, size)])

    def __len__(self) -> int:
        return math.ceil(SIZE / (self.batch_size or 1))


class Around:
    """A batch sampler around another one."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler, self.batch_size, self.drop_last = batch_sampler, 4, False

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


WITH_EPOCHS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "samples": lambda reseeds: {"sampler": Rotated(None, reseeds), "batch_size": 4},
    "single samples": lambda reseeds: {"sampler": Rotated(None, reseeds), "batch_size": None},
    "batches": lambda reseeds: {"batch_sampler": Rotated(4, reseeds)},
    "batches of samples": lambda reseeds: {"batch_sampler": BatchSampler(Rotated(None, reseeds), 4, drop_last=False)},
    "batches around batches": lambda reseeds: {"batch_sampler": Around(Rotated(4, reseeds))},
    "batches around samples": lambda reseeds: {
        "batch_sampler": Around(BatchSampler(Rotated(None, reseeds), 4, drop_last=False))
    },
}


@pytest.mark.parametrize("kind", WITH_EPOCHS)
@pytest.mark.parametrize("reseeds", [False, True])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_users_sampler_gets_the_epoch_before_it_is_iterated(kind: str, reseeds: bool, num_workers: int) -> None:
    def plain() -> DataLoader[int]:
        return DataLoader(Numbers(SIZE), num_workers=num_workers, **WITH_EPOCHS[kind](reseeds))

    def prepared() -> Any:
        return prepare_data_loader(plain(), num_processes=1)

    def rows_of(batches: Iterable[Any]) -> list[int]:
        return [row for batch in batches for row in torch.as_tensor(batch).reshape(-1).tolist()]

    alone, expected = plain(), list[list[int]]()
    samplers = samplers_in(alone.batch_sampler or alone.sampler)
    (sampler,) = (sampler for sampler in samplers if type(sampler) is Rotated)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected.append(rows_of(alone))
    assert expected[0] != expected[1] != expected[2]
    loader, size, state = prepared(), 1 if kind == "single samples" else 4, None
    for epoch in range(3):
        for number, batch in enumerate(loader):
            rows = expected[epoch][number * size : (number + 1) * size]
            assert rows_of([batch]) == rows
            if "around" not in kind:
                assert loader.sample_ids() == rows
            if (epoch, number) == (1, 1):
                state = loader.state_dict()
    resumed = prepared()
    resumed.load_state_dict(state)
    for epoch, first in ((1, 2 * size), (2, 0)):
        assert rows_of(resumed) == expected[epoch][first:]


TEN: Any = torch.arange(10)


class StartsOver:
    """Counts to ten in steps of `by`; each `iter` starts over, and `next` continues."""

    by, position = 1, 0

    def __iter__(self) -> Self:
        self.position = 0
        return self

    def __next__(self) -> Any:
        if self.position >= 10:
            raise StopIteration
        first, self.position = self.position, self.position + self.by
        return first if self.by == 1 else list(range(first, self.position))

    def __len__(self) -> int:
        return 10 // self.by


class StartsOverInBatches(StartsOver):
    by = 2


class StreamThatStartsOver(StartsOver, IterableDataset[int]):
    pass


class LoaderThatStartsOver(DataLoader[int]):
    def __iter__(self) -> Any:
        self.__dict__["batches"] = super().__iter__()
        return self

    def __next__(self) -> Any:
        return next(self.__dict__["batches"])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda **workers: DataLoader(StreamThatStartsOver(), batch_size=3, **workers),
        lambda **workers: DataLoader(StreamThatStartsOver(), batch_size=None, **workers),
        lambda **workers: DataLoader(TEN, batch_size=3, sampler=StartsOver(), **workers),
        lambda **workers: DataLoader(TEN, batch_sampler=StartsOverInBatches(), **workers),
        lambda **workers: DataLoader(TEN, batch_size=None, sampler=StartsOverInBatches(), **workers),
        lambda **workers: LoaderThatStartsOver(TEN, batch_size=3, **workers),
        lambda **workers: LoaderThatStartsOver(StreamThatStartsOver(), batch_size=3, **workers),
    ],
)
def test_what_starts_over_in_each_iter_is_read_once_a_pass(make: Callable[..., Any], num_workers: int) -> None:
    def samples(loader: Any) -> list[int]:
        # A limit, since a pass that starts over may have no end.
        return [int(sample) for batch in islice(loader, 12) for sample in torch.atleast_1d(torch.as_tensor(batch))]

    prepared = prepare_data_loader(make(num_workers=num_workers), num_processes=1, process_index=0)
    assert [samples(prepared) for _ in range(2)] == [[*range(10)]] * 2

    first = torch.atleast_1d(torch.as_tensor(next(iter(prepared)))).tolist()
    resumed = prepare_data_loader(make(num_workers=num_workers), num_processes=1, process_index=0)
    resumed.load_state_dict(prepared.state_dict())
    assert first + samples(resumed) == [*range(10)]


@pytest.mark.parametrize("limit", [{"limit_batches": 2}, {"overfit_batches": 2}])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_starts_over_is_limited(limit: dict[str, Any], num_workers: int) -> None:
    loader = train_loader(StreamThatStartsOver(), batch_size=3, num_workers=num_workers, shuffle=False, **limit)
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0)
    assert [batch.tolist() for batch in islice(prepared, 12)] == [[0, 1, 2], [3, 4, 5]]


class Unsized(StartsOverInBatches):
    def __len__(self) -> int:
        raise ValueError("The number of batches follows from the sizes of graphs.")


def test_batches_of_a_sampler_whose_length_raises_are_resumed() -> None:
    def prepared() -> Any:
        return prepare_data_loader(DataLoader(TEN, batch_sampler=Unsized()), num_processes=1, process_index=0)

    saving, resumed = prepared(), prepared()
    first = next(iter(saving))
    resumed.load_state_dict(saving.state_dict())
    assert [batch.tolist() for batch in (first, *resumed)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
