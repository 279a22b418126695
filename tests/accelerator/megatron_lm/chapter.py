"""Scripts of the kind that Accelerate's chapter on Megatron-LM has, with the import changed."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.strategies.split import LENGTH, VOCABULARY, gpt2, llama, model_of
from trainer_lib import Accelerator, DistributedType
from trainer_lib.utils import (
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    avg_losses_across_data_parallel_group,
)

MICRO_BATCH, UPDATES = 1, 4


class KeyTokens(GPTTrainStep):
    """A loss that weighs samples by the key tokens in them, as a script for early versions of Accelerate has it."""

    def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
        self.kwargs = kwargs
        super().__init__(megatron_args)

    def get_loss_func(self) -> Any:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        def loss_func(inputs: Tensor, loss_mask: Tensor, output_tensor: Tensor) -> Any:
            losses = (output_tensor.float() * loss_mask).sum(dim=1) / loss_mask.sum(dim=1)
            counts = torch.stack([(inputs == token).float() for token in self.kwargs["keytoken_ids"]]).sum(dim=[0, 2])
            loss = (losses * (1.0 + self.kwargs["alpha"] * counts)).mean()
            return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func

    def get_forward_step_func(self) -> Any:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            outputs = model(tokens, position_ids, attention_mask, labels=labels)
            return outputs, partial(self.loss_func, tokens, loss_mask)

        return forward_step


class SomeTokens(KeyTokens):
    """The same for the current version, whose steps get the Accelerator."""

    def __init__(self, accelerator: Any, args: Any, **kwargs: Any) -> None:
        self.kwargs = kwargs
        GPTTrainStep.__init__(self, accelerator, args)

    def get_loss_func(self, accelerator: Any) -> Any:  # type: ignore[override]
        assert accelerator is not None
        return super().get_loss_func()


def _rows(count: int) -> Any:
    tokens = torch.randint(0, VOCABULARY - 1, (count, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def own_step(micro_batches: int, options: dict[str, Any], layers: int = 2) -> tuple[list[float], list[float], float]:
    """Train with a step of the script's own, and evaluate: the losses, the rates, and the loss on other data."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=micro_batches, **options))
    assert accelerator.distributed_type == DistributedType.MEGATRON_LM
    plugin = accelerator.state.megatron_lm_plugin
    assert plugin is not None
    plugin.custom_train_step_class = KeyTokens
    plugin.custom_train_step_kwargs = {"keytoken_ids": [3, 5], "alpha": 0.25}
    model: Any = model_of(partial(llama, layers))
    replicas = accelerator.data_group.size
    rows = _rows(UPDATES * MICRO_BATCH * micro_batches * replicas)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = MegatronLMDummyScheduler(optimizer, total_num_steps=UPDATES, warmup_num_steps=1)
    train, validation = (DataLoader(part, batch_size=MICRO_BATCH) for part in (rows, rows[: len(rows) // 2]))
    model, optimizer, train, validation, scheduler = accelerator.prepare(model, optimizer, train, validation, scheduler)
    assert plugin.global_batch_size == MICRO_BATCH * micro_batches * replicas
    model.train()
    losses: list[float] = []
    rates: list[float] = []
    for batch in train:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    evaluated: list[Tensor] = []
    for batch in validation:
        with torch.no_grad():
            evaluated.append(model(**batch).loss)
    return losses, rates, torch.stack(evaluated).mean().item()


def datasets(micro_batches: int, options: dict[str, Any], prefix: str, state: Path) -> tuple[list[float], list[float]]:
    """Train on an indexed dataset, save, and continue in another Accelerator: the losses of both, and on other data."""
    losses: list[float] = []
    evaluated: list[float] = []
    for begin in (0, UPDATES // 2):
        accelerator = Accelerator(
            cpu=True, megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=micro_batches, **options)
        )
        dummy = MegatronLMDummyDataLoader(
            data_path=prefix, splits_string="80,20", seq_length=LENGTH, micro_batch_size=MICRO_BATCH
        )
        assert accelerator.state.megatron_lm_plugin is not None
        accelerator.state.megatron_lm_plugin.megatron_dataset_flag = True
        model: Any = model_of(gpt2)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, train, validation, _ = accelerator.prepare(model, optimizer, dummy, dummy, dummy)
        if begin:
            accelerator.load_state(state)
        for _ in range(UPDATES // 2):
            model.train()
            loss = model(**next(train)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                evaluated.append(model(**next(validation)).loss.item())
        if not begin:
            accelerator.save_state(state)
        accelerator.free_memory()
    return losses, evaluated
