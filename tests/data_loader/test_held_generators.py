"""Random generators inside transforms, collate functions and what they call: their states are in a checkpoint."""

import json
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler

from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.data_loader import prepare_data_loader
from trainer_lib.data_loader.order.held_generators import HeldGenerators

SIZE = 12


class Jitter:
    """A transform that draws from a generator of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, sample: Any) -> float:
        return float(sample + self.rng.random())


class JitterOfClass:
    rng = np.random.RandomState(4)

    def __call__(self, sample: Any) -> float:
        return float(sample + self.rng.random_sample())


class JitterInSlot:
    __slots__ = ("rng",)

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, sample: Any) -> float:
        return float(sample + self.rng.random())


class Compose:
    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class JitterOfBits:
    """A transform that draws from bits without a generator around them."""

    def __init__(self, bits: np.random.BitGenerator | None) -> None:
        self.bits = bits

    def __call__(self, sample: Any) -> float:
        if self.bits is None:
            self.bits = np.random.Philox(3)
        return float(sample + self.bits.random_raw() / 2**64)


class EachOf:
    """A transform that applies each one of a set or an array."""

    def __init__(self, transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Transformed(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


class Streamed(IterableDataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __iter__(self) -> Any:
        return map(self.transform, range(SIZE))


class LateMask:
    """A collate function that makes its generator when it is first called."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, samples: list[Any]) -> Any:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        return torch.tensor(samples) + torch.rand(len(samples), generator=self.generator)


shift = Jitter(5)
draws = random.Random(6)


class ByGlobals(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return shift(index)


def by_defaults(sample: Any, rng: Any = np.random.default_rng(7)) -> float:  # noqa: B008
    return float(sample + rng.random())


def collated_by_globals(samples: list[Any]) -> Any:
    return [sample + draws.random() for sample in samples]


def collated(samples: list[Any], rng: random.Random) -> Any:
    return [sample + rng.random() for sample in samples]


def around(rng: Any) -> Callable[[Any], float]:
    return lambda sample: float(sample + rng.random())


def reset() -> None:
    """Set the generators of this module and its classes to their first states, as in a new process."""
    JitterOfClass.rng.seed(4)
    shift.rng = np.random.default_rng(5)
    draws.seed(6)
    by_defaults.__defaults__ = (np.random.default_rng(7),)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "transform": lambda: DataLoader(Transformed(Jitter()), 3, collate_fn=list),
    "transforms in a list": lambda: DataLoader(Transformed(Compose(Jitter(1), Compose(Jitter(2)))), 3, collate_fn=list),
    "set": lambda: DataLoader(Transformed(EachOf({Jitter(9)})), 3, collate_fn=list),
    "object array": lambda: DataLoader(Transformed(EachOf(np.array([Jitter(9)], object))), 3, collate_fn=list),
    "bit generator": lambda: DataLoader(Transformed(JitterOfBits(np.random.PCG64(9))), 3, collate_fn=list),
    "late bit generator": lambda: DataLoader(Transformed(JitterOfBits(None)), 3, collate_fn=list),
    "slot": lambda: DataLoader(Transformed(Compose(JitterInSlot(3))), 3, collate_fn=list),
    "transform in a part": lambda: DataLoader(ConcatDataset([Transformed(Jitter()), Transformed(int)]), 3),
    "generator of a class": lambda: DataLoader(Transformed(JitterOfClass()), 3, collate_fn=list),
    "global transform": lambda: DataLoader(ByGlobals(), 3, collate_fn=list),
    "default": lambda: DataLoader(Transformed(by_defaults), 3, collate_fn=list),
    "closure": lambda: DataLoader(Transformed(around(np.random.default_rng(8))), 3, collate_fn=list),
    "method": lambda: DataLoader(Transformed(Jitter().__call__), 3, collate_fn=list),
    "collate function": lambda: DataLoader(Transformed(int), 3, collate_fn=partial(collated, rng=random.Random(0))),
    "collate function with globals": lambda: DataLoader(Transformed(int), 3, collate_fn=collated_by_globals),
    "collate function with a late generator": lambda: DataLoader(Transformed(int), 3, collate_fn=LateMask()),
    "stream": lambda: DataLoader(Streamed(Jitter()), 3, collate_fn=list),
    "stream and collate function": lambda: DataLoader(Streamed(Jitter()), 3, collate_fn=LateMask()),
}


def passes(loader: Any) -> Any:
    while True:
        for batch in loader:
            yield [float(sample) for sample in batch]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_loader_draws_the_same(kind: str, shuffle: bool) -> None:
    def prepared() -> Any:
        reset()
        loader = LOADERS[kind]()
        if shuffle and not isinstance(loader.dataset, IterableDataset):
            own = torch.Generator().manual_seed(2)
            loader = DataLoader(loader.dataset, 3, shuffle=True, generator=own, collate_fn=loader.collate_fn)
        return prepare_data_loader(loader, num_processes=1)

    for done in (0, 2, 4, 5):
        run = passes(prepared())
        plain = list(islice(run, 12))
        assert len({number for batch in plain for number in batch}) > SIZE  # the numbers are random
        saving = prepared()
        run = passes(saving)
        assert list(islice(run, done)) == plain[:done]
        state = json.loads(json.dumps(saving.state_dict()))
        resumed = prepared()
        resumed.load_state_dict(state)
        assert list(islice(passes(resumed), 12 - done)) == plain[done:]


@pytest.mark.parametrize("kind", LOADERS)
def test_an_evaluation_leaves_them_as_they_were(kind: str) -> None:
    reset()
    loader: Any = prepare_data_loader(LOADERS[kind](), num_processes=1)
    for _ in range(2):
        with loader.generators_kept():
            first = list(islice(passes(loader), 4))
        assert list(islice(passes(loader), 4)) == first


@pytest.mark.parametrize("kind", ["transform", "transforms in a list", "global transform", "closure", "default"])
def test_they_are_seeded_before_each_sample(kind: str) -> None:
    def drawn(num_workers: int) -> Any:
        reset()
        loader: Any = DataLoader(LOADERS[kind]().dataset, 3, collate_fn=list, num_workers=num_workers)
        prepared = prepare_data_loader(loader, num_processes=1, data_seed=5, seed_each_sample=True)
        return list(islice(passes(prepared), 8))

    alone = drawn(0)
    assert alone[:4] != alone[4:]
    assert drawn(2) == alone


def test_a_state_of_another_kind_is_left_out() -> None:
    jitter = Jitter()
    held = HeldGenerators({"dataset": Transformed(jitter)})
    ((path, state),) = held.states().items()
    assert path == "dataset.transform.rng"
    before = jitter.rng.random()
    held.restore({path: HeldGenerators({"": random.Random(0)}).states()[""], "dataset.transform.other": state})
    assert jitter.rng.random() != before  # it went on
    held.restore({path: state})
    assert jitter.rng.random() == before
    jitter.rng = np.random.Generator(np.random.SFC64(0))
    held.restore({path: state})
    assert jitter.rng.random() == np.random.Generator(np.random.SFC64(0)).random()


class Awkward(dict[str, Any]):
    """A mapping that can be neither copied nor listed."""

    def items(self) -> Any:
        raise AssertionError

    copy = __len__ = __iter__ = items


class Proxy:
    """An object whose attributes and class are those of another one that is not there yet."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_no_code_of_other_objects_is_called() -> None:
    samples: Any = Transformed(Jitter())
    samples.awkward, samples.proxy = Awkward(inner=Jitter()), Proxy()
    samples.accelerator = Accelerator(cpu=True)
    vars(samples.accelerator)["rng"] = random.Random(0)
    paths = HeldGenerators({"dataset": samples}).by_path()
    assert [*paths] == ["dataset.transform.rng", "dataset.awkward['inner'].rng"]


def test_each_is_found_once_also_where_objects_hold_each_other() -> None:
    samples: Any = Transformed(Jitter())
    samples.other, samples.same, samples.itself = Compose(samples), samples.transform.rng, samples
    assert [*HeldGenerators({"dataset": samples}).by_path()] == ["dataset.same"]


def test_one_that_is_made_late_comes_back_in_a_dict_a_list_and_a_deque() -> None:
    def holders() -> Any:
        samples: Any = Transformed(None)
        samples.named, samples.listed, samples.queued = {"rng": None, "rest": None}, [None], deque([None])
        return samples

    used = holders()
    for holder, key in ((used.named, "rng"), (used.listed, 0), (used.queued, 0)):
        holder[key] = random.Random(3)
        holder[key].random()
    fresh = holders()
    held = HeldGenerators({"dataset": fresh})
    with held.kept():
        held.restore(HeldGenerators({"dataset": used}).states())
        fresh.named["rest"] = "a value that is kept"
        expected = [used.named["rng"].random()] * 3
        assert [fresh.named["rng"].random(), fresh.listed[0].random(), fresh.queued[0].random()] == expected
    assert (fresh.named, [*fresh.listed, *fresh.queued]) == ({"rng": None, "rest": "a value that is kept"}, [None] * 2)


def test_much_data_does_not_hide_them() -> None:
    samples: Any = Transformed(None)
    samples.rows = [[[number] for number in range(100)] for _ in range(100)]  # more than are looked into
    samples.augment = Compose(Compose(Jitter()))
    (path,) = HeldGenerators({"dataset": samples}).by_path()
    assert path == "dataset.augment.transforms[0].transforms[0].rng"


def test_global_generators_are_not_among_them() -> None:
    in_torch = partial(torch.rand, generator=torch.default_generator)
    drawing: list[Any] = [random.uniform, np.random.normal, in_torch]
    samples = Transformed(Compose(*drawing))
    assert HeldGenerators({"dataset": samples}).by_path() == {}


def _ranks(folder: str) -> tuple[list[Any], list[Any]]:
    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        loader = DataLoader(Transformed(Jitter(rank)), 2, collate_fn=LateMask())
        return accelerator, accelerator.prepare(loader)

    accelerator, loader = prepared()
    run = passes(loader)
    list(islice(run, 4))
    accelerator.save_state(folder)
    whole = list(islice(run, 5))
    accelerator.free_memory()
    accelerator, loader = prepared()
    accelerator.load_state(folder)
    return whole, list(islice(passes(loader), 5))


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    ranks = run_world(_ranks, (str(tmp_path / "state"),), 2, timeout=100)
    for whole, resumed in ranks:
        assert resumed == whole
    assert ranks[0] != ranks[1]


def test_the_generator_of_the_operating_system_has_no_state() -> None:
    sampler: Any = RandomSampler(range(SIZE))
    sampler.rng = random.SystemRandom()
    samples = Transformed(around(random.SystemRandom()))
    loader: Any = prepare_data_loader(DataLoader(samples, 3, sampler=sampler), num_processes=1)
    with loader.generators_kept():
        assert len(list(loader)) == 4
    assert loader.state_dict().get("sample_generators", {}) == {}
