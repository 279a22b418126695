"""Each error is also the built-in error that callers expect."""

import pytest

from trainer_lib.foundation import errors
from trainer_lib.foundation.errors import did_you_mean, unknown


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.PreparationError, ValueError),
        (errors.WorldError, RuntimeError),
        (errors.DistributedOperationException, RuntimeError),
        (errors.StateError, RuntimeError),
        (errors.MissingPackageError, ImportError),
    ],
)
def test_kinds(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, errors.TrainerLibError)


def test_the_nearest_name_is_offered_if_there_is_one() -> None:
    assert did_you_mean("wandbb", ["mlflow", "wandb"]) == " Did you mean 'wandb'?"
    assert did_you_mean("zzz", ["mlflow", "wandb"]) == ""
    assert unknown("tracker", 3, ["b", "a"]) == "Unknown tracker 3. Known: a, b."
