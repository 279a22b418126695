"""Compiled models in a fit: how often they are compiled."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.tasks import arguments, points, trainer
from trainer_lib import ConfigurationError
from trainer_lib.callbacks import EMA
from trainer_lib.events import Callback, Run
from trainer_lib.utils import TorchDynamoPlugin


class Graphs:
    """A backend that runs graphs as they are, and counts those with gradients and those without."""

    def __init__(self) -> None:
        self.training = self.evaluating = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        del inputs
        self.training += torch.is_grad_enabled()
        self.evaluating += not torch.is_grad_enabled()
        return graph.forward


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


class Ends(Callback):
    def on_fit_begin(self, run: Run) -> None:
        raise ConfigurationError("the banner is there")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of inductor's own modules
def test_the_banner_names_the_compiler_and_where_compiled_code_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ConfigurationError, match="the banner is there"):
        trainer(arguments(compile=True), callbacks=[Ends()]).fit()
    assert f"the whole model by inductor, compiled code is kept in {tmp_path / 'cache'} (T" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("has_short_batch", [False, True])
def test_a_model_is_compiled_once_to_train_and_once_to_evaluate(
    has_short_batch: bool, graphs: Graphs, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
    args = arguments(
        num_train_epochs=3,
        eval_every=4,
        log_every=2,
        save_every=5,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=2,
        output_dir=tmp_path,
        compile=TorchDynamoPlugin(backend=graphs),  # type: ignore[arg-type]  # torch takes functions too
    )
    rows = 84 if has_short_batch else 80
    fitted = trainer(args, model=model, train_dataset=points(rows), eval_dataset=points(36), callbacks=[EMA(0.9)])
    fitted.fit()
    fitted.evaluate()
    # A shorter last batch compiles once more, for batches of any size.
    assert graphs.training == 1 + has_short_batch
    assert graphs.evaluating == 1
