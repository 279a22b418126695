"""The names that Accelerate's users import from `accelerate.utils`."""

import pytest

import trainer_lib.utils
from trainer_lib import collectives, seeding
from trainer_lib.state import PartialState


def test_the_names_are_the_librarys_own_objects() -> None:
    from trainer_lib.utils import DistributedType, gather, set_seed, tqdm

    assert gather is collectives.gather
    assert set_seed is seeding.set_seed
    assert DistributedType is type(PartialState(cpu=True).distributed_type)
    assert callable(tqdm)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'gahter'. Did you mean 'gather'?"):
        trainer_lib.utils.gahter  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(trainer_lib.utils, "gahter")
