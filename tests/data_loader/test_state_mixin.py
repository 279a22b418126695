"""Loaders of users that end a window of gradients, and what prepared loaders say of themselves."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from tests.data_loader.reference import Numbers
from trainer_lib import Accelerator
from trainer_lib.data_loader import DataLoaderStateMixin, prepare_data_loader
from trainer_lib.state import GradientState
from trainer_lib.state.gradient_state import Rows


class Batches(DataLoaderStateMixin):
    """A loader of a user: three batches, of which the last repeats a sample."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begin()
        for number in range(3):
            if number == 2:
                self.end_of_dataloader, self.rows = True, Rows(total=2, real=1)
            yield torch.tensor([2.0 * number, 2.0 * number + 1])
        self.end()


def test_its_last_batch_ends_the_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    updates, kept = [], []
    for batch in Batches():
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
        updates.append(accelerator.sync_gradients)
        kept += accelerator.gather_for_metrics(batch).tolist()
    assert updates == [False, True, True]
    assert kept == [0, 1, 2, 3, 4]
    assert not GradientState().in_dataloader


def test_a_prepared_loader_has_the_attributes_of_accelerates() -> None:
    plain = DataLoader(Numbers(10), 4, drop_last=False)
    loader = prepare_data_loader(plain, "cpu", num_processes=1, process_index=0, put_on_device=True)
    assert isinstance(loader, DataLoaderStateMixin)
    assert isinstance(loader.base_dataloader, DataLoader)
    assert loader.gradient_state.active_dataloader is None
    assert (loader.device, loader.iteration) == ("cpu", 0)
    assert (loader.total_batch_size, loader.total_dataset_length) == (4, 10)
    ends = [(loader.end_of_dataloader, loader.remainder) for _ in loader]
    assert ends == [(False, 2), (False, 2), (True, 2)]
    assert (loader.end_of_dataloader, loader.iteration) == (False, 1)
    loader.set_epoch(5)
    assert loader.iteration == 5
