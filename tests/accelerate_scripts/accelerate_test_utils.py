"""What Accelerate's scripts import from `accelerate.test_utils`, for scripts whose imports were swapped."""

import torch
from accelerate.test_utils import RegressionDataset as RegressionDataset
from accelerate.test_utils import RegressionModel as RegressionModel
from accelerate.test_utils import require_bnb as require_bnb
from accelerate.test_utils.testing import assert_exception as assert_exception

from trainer_lib.state import PartialState
from trainer_lib.utils import gather

torch_device = "cpu"


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Whether a tensor is equal on all ranks."""
    gathered = gather(tensor[None].clone().to(PartialState().device))
    return all(torch.equal(other, gathered[0]) for other in gathered)
