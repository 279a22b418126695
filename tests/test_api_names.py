"""The public names of Accelerate can be imported from the modules that scripts import them from.

`api_names.txt` has a line for each module: `trainer_lib.X: Name …` for what scripts import from `accelerate.X`.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.foundation.public_names import missing_features
from trainer_lib.foundation.public_names.missing_features import MissingFeature, missing_class, missing_function

NAMES = {
    module: names.split()
    for module, names in (
        line.split(": ", 1) for line in Path(__file__).with_name("api_names.txt").read_text().splitlines()
    )
}
# Modules and names that are left out, and why.
LEFT_OUT = {
    "trainer_lib.commands.menu.": "the menus of Accelerate's dialog, which no script imports",
    "trainer_lib.commands.launch.CustomHelpFormatter": "how Accelerate's help looks",
    "trainer_lib.commands.launch.clean_option": "a part of CustomHelpFormatter",
    "trainer_lib.optimizer.patch_optimizer_step": "tells a loss scaler's skipped step, which step_was_skipped says",
}


def expected() -> Iterator[tuple[str, str]]:
    for module, names in NAMES.items():
        yield from ((module, name) for name in names if not any(f"{module}.{name}".startswith(out) for out in LEFT_OUT))


def test_every_name_can_be_imported_from_its_module() -> None:
    missing: list[str] = []
    for module, name in expected():
        try:
            found = hasattr(importlib.import_module(module), name)
        except ImportError:
            found = False
        if not found:
            missing.append(f"{module}.{name}")
    assert missing == []


def test_what_is_left_out_is_not_there_and_was_asked_for() -> None:
    names = [f"{module}.{name}" for module, names in NAMES.items() for name in names]
    for left_out in LEFT_OUT:
        assert any(name.startswith(left_out) for name in names), left_out
    module, _, name = "trainer_lib.optimizer.patch_optimizer_step".rpartition(".")
    assert not hasattr(importlib.import_module(module), name)


def test_a_name_is_one_object_wherever_it_is_imported_from() -> None:
    homes: dict[str, Any] = {}
    for module, name in expected():
        # Functions and classes only, and not those that have one name in several subjects.
        value = getattr(importlib.import_module(module), name)
        if callable(value) and "commands" not in module and "megatron" not in module and name != "tqdm":
            assert homes.setdefault(name, value) is value, f"{module}.{name}"


def test_tqdm_is_a_function_after_its_module_was_imported_too() -> None:
    from trainer_lib.utils import tqdm
    from trainer_lib.utils.tqdm import tqdm as of_module

    assert list(tqdm([1, 2], disable=True)) == list(of_module([1, 2], disable=True)) == [1, 2]
    again = importlib.import_module("trainer_lib.utils").tqdm
    assert list(again([3], disable=True)) == [3]


def test_a_missing_class_can_be_imported_derived_from_and_compared() -> None:
    from trainer_lib.utils.megatron_lm import MegatronLMOptimizerWrapper

    class Mine(MegatronLMOptimizerWrapper):  # as scripts do at import time
        pass

    assert not isinstance(torch.optim.SGD([torch.zeros(1)]), (MegatronLMOptimizerWrapper, Mine))
    assert MegatronLMOptimizerWrapper.__name__ == "MegatronLMOptimizerWrapper"
    assert "Megatron-LM" in (MegatronLMOptimizerWrapper.__doc__ or "")
    for kind in (MegatronLMOptimizerWrapper, Mine):
        with pytest.raises(UnsupportedError, match=r"MegatronLMOptimizerWrapper needs Megatron-LM's own code"):
            kind([torch.zeros(1)], lr=0.1)


def test_a_missing_function_says_what_is_missing_when_it_is_called() -> None:
    from trainer_lib.inference import build_pipeline

    assert build_pipeline.__name__ == "build_pipeline"
    with pytest.raises(UnsupportedError, match=r"build_pipeline needs Accelerate's separate steps.*prepare_pippy"):
        build_pipeline(torch.nn.Linear(1, 1))


FEATURES = [value for value in vars(missing_features).values() if isinstance(value, MissingFeature)]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_each_missing_feature_makes_a_sentence(feature: MissingFeature) -> None:
    assert feature.instead.endswith(".")
    for stand_in in (missing_class("Name", feature), missing_function("Name", feature)):
        with pytest.raises(UnsupportedError) as error:
            stand_in()
        assert str(error.value) == f"Name needs {feature.name}, which this version does not have. {feature.instead}"


LAZY = """
import json, sys
import torch
before = set(sys.modules)
import trainer_lib, trainer_lib.utils
imported = sorted(name for name in set(sys.modules) - before if name.startswith("trainer_lib"))
from trainer_lib.utils import str_to_bool, is_cuda_available
parts = sorted(name for name in sys.modules if name.startswith("trainer_lib.utils."))
print(json.dumps([imported, parts]))
"""


@pytest.mark.launch
def test_importing_utils_imports_no_module_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)
    imported, parts = json.loads(done.stdout)
    lazy = {"trainer_lib", "trainer_lib.utils", "trainer_lib.foundation"}
    names = "lazy_imports", "public_names", "public_names.stub_names"
    lazy |= {f"trainer_lib.foundation.{name}" for name in names}
    assert set(imported) == lazy
    assert parts == []  # a name comes from its home, not through the module that lists it
