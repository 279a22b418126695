"""The loader of an evaluation set, sharded across ranks."""

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from trainer_lib.data_loader import prepare_data_loader
from trainer_lib.data_loader.build_reader import has_indices
from trainer_lib.data_loader.prepared_loader import PreparedLoader
from trainer_lib.logging import get_logger
from trainer_lib.trainer.data.dataloaders import dropped_samples

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator

_logger = get_logger(__name__)


def prepared_for_evaluation(accelerator: "Accelerator", loader: DataLoader[Any]) -> PreparedLoader:
    """Return a loader that is sharded across ranks and not saved in checkpoints."""
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=accelerator.data_group.size,
        process_index=accelerator.data_group.rank,
        put_on_device=True,
        even_batches=True,
        non_blocking=accelerator.non_blocking,
        seed_each_sample=accelerator.dataloader_config.seed_each_sample and has_indices(loader),
    )
    prepared.trim_repeats()  # which are not counted
    prepared.keep_last()
    if left_out := dropped_samples(loader):
        _logger.warning_once(
            "A DataLoader given to evaluate or predict on has drop_last=True, which would leave out its last %d "
            "samples. They are evaluated too, so that numbers do not depend on the batch size and the number of "
            "processes. For fewer samples give limit_eval_batches or a smaller dataset.",
            left_out,
        )
    return prepared
