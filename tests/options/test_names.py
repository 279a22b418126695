"""Options by a name that their class does not have."""

import copy
import inspect
import pickle
from dataclasses import replace
from typing import Any

import pytest

from trainer_lib import FullyShardedDataParallelPlugin, ParallelismConfig
from trainer_lib.foundation.errors import SignatureError
from trainer_lib.utils import (
    BnbQuantizationConfig,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    MegatronLMPlugin,
    TorchPipelineParallelConfig,
    TorchTensorParallelConfig,
)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ParallelismConfig, {"tp": 2}, "Unknown option of ParallelismConfig 'tp'. Known: cp_backend, "),
        (FullyShardedDataParallelPlugin, {"reshard_after_foward": True}, "Did you mean 'reshard_after_forward'?"),
        (MegatronLMPlugin, {"tp_degre": 2}, "Did you mean 'tp_degree'?"),
        (DeepSpeedPlugin, {"zero_stge": 2}, "Did you mean 'zero_stage'?"),
        (BnbQuantizationConfig, {"load_in_8bits": True}, "Did you mean 'load_in_8bit'?"),
        (DataLoaderConfiguration, {"split_batch": True}, "Did you mean 'split_batches'?"),
        (DistributedDataParallelKwargs, {"find_unused_params": True}, "Did you mean 'find_unused_parameters'?"),
        (TorchTensorParallelConfig, {"enable_async": True}, "Did you mean 'enable_async_tp'?"),
        (TorchPipelineParallelConfig, {"microbatches": 4}, "Unknown option of TorchPipelineParallelConfig"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest_one(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SignatureError) as error:
        kind(**options)
    assert message in str(error.value)


def test_options_are_copied_replaced_and_described_as_any_dataclass() -> None:
    options = DataLoaderConfiguration(split_batches=True)
    for other in (copy.deepcopy(options), pickle.loads(pickle.dumps(options)), replace(options, even_batches=True)):
        assert other == options
    assert str(inspect.signature(DataLoaderConfiguration)).startswith("(split_batches: bool = False")
