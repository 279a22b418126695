"""The trainer with a model in shards: the same losses and metrics, resumed to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import multi_margin_loss

from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import FullyShardedDataParallelPlugin, ParallelismConfig


def layers() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 16), *blocks, nn.Linear(16, 2))


def plugin() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Sequential"]
    )


def run(folder: Path | None, dies_at: int | None = None, **options: Any) -> tuple[list[Any], dict[str, float]] | None:
    args = arguments(log_every=1, eval_every=3, save_every=2 if folder else None, output_dir=folder, **options)
    model_trainer = trainer(
        args,
        model=layers(),
        train_dataset=points(41),
        eval_dataset=points(21),
        metrics=["accuracy"],
        callbacks=[] if dies_at is None else [Dies(dies_at)],
    )
    try:
        result = model_trainer.fit()
    except InterruptedError:
        return None
    timeless = [
        {k: v for k, v in entry.items() if not k.endswith(("_per_second", "data_wait"))} for entry in result.history
    ]
    return timeless, model_trainer.evaluate()


def assert_same(actual: tuple[list[Any], dict[str, float]], expected: tuple[list[Any], dict[str, float]]) -> None:
    assert [set(entry) for entry in actual[0]] == [set(entry) for entry in expected[0]]
    for mine, theirs in zip(actual[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    assert actual[1] == pytest.approx(expected[1], rel=2e-5)


def test_shards_train_as_replicas_do() -> None:
    def replicated() -> Any:
        return run(None)

    def sharded() -> Any:
        return run(None, fsdp=plugin())

    expected = run_world(replicated, (), 2, timeout=60)
    for actual in run_world(sharded, (), 2, timeout=60):
        assert_same(actual, expected[0])


def test_shards_are_trained_again_as_replicas_are(tmp_path: Path) -> None:
    def metrics_of(**options: Any) -> list[dict[str, float]]:
        args = arguments(save_every=2, output_dir=tmp_path / options.pop("name"), num_train_epochs=1, **options)
        model_trainer = trainer(args, model=layers(), eval_dataset=points(21))
        model_trainer.fit()
        metrics = [model_trainer.evaluate()]
        model_trainer.train_dataset, model_trainer.loss_fn = points(16), multi_margin_loss
        model_trainer.fit()
        metrics.append(model_trainer.evaluate())
        model_trainer.model = layers()
        return [*metrics, model_trainer.evaluate()]

    def replicated() -> Any:
        return metrics_of(name="replicated")

    def sharded() -> Any:
        return metrics_of(name="sharded", fsdp=plugin())

    (expected, _), actual = (run_world(body, (), 2, timeout=60) for body in (replicated, sharded))
    for metrics in actual:
        assert metrics == [pytest.approx(values, rel=2e-5) for values in expected]


@pytest.mark.slow
def test_shards_of_two_replicas() -> None:
    def replicated() -> Any:
        return run(None, per_device_train_batch_size=4)

    def sharded() -> Any:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        return run(None, fsdp=plugin(), parallelism=config, per_device_train_batch_size=4)

    expected = run_world(replicated, (), 4, timeout=90)
    for actual in run_world(sharded, (), 4, timeout=90):
        assert_same(actual, expected[0])


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.slow)])
def test_resumed_shards(kind: str, tmp_path: Path) -> None:
    def both(folder: str, dies_at: int | None, resume: str) -> Any:
        return run(tmp_path / folder, dies_at, fsdp=FullyShardedDataParallelPlugin(state_dict_type=kind), resume=resume)

    whole = run_world(both, ("whole", None, "never"), 2, timeout=60)
    assert run_world(both, ("parts", 5, "never"), 2, timeout=60) == [None, None]
    assert run_world(both, ("parts", None, "auto"), 2, timeout=60) == whole


@pytest.mark.slow
def test_each_world_of_a_process_shards_on_its_own_groups() -> None:
    """The groups of the second mesh have other names than those of the first, which are gone."""

    def fits() -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = []
        for further_groups in (2, 0):
            mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
            args = arguments(max_steps=3, fsdp=True, parallelism=mesh, per_device_train_batch_size=2, shuffle=False)
            model_trainer = trainer(args)
            for _ in range(further_groups):
                dist.new_group(backend="gloo")
            model_trainer.fit()
            outcomes.append(
                {name: value.full_tensor() for name, value in model_trainer.unwrapped_model.state_dict().items()}
            )
            model_trainer.accelerator.end_training()
        return outcomes

    alone = trainer(arguments(max_steps=3, shuffle=False))
    alone.fit()
    for first, second in run_world(fits, (), 4):
        torch.testing.assert_close(first, dict(alone.unwrapped_model.state_dict()), rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(second, first, rtol=0, atol=0)
