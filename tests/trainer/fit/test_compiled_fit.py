"""Compiled models in a fit: how often they are compiled."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.tasks import arguments, points, trainer
from trainer_lib import ConfigurationError, Trainer
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
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        output_dir=tmp_path,
        compile=TorchDynamoPlugin(backend=graphs),  # type: ignore[arg-type]  # torch takes functions too
    )
    rows = 84 if has_short_batch else 80
    fitted = trainer(args, model=model, train_dataset=points(rows), eval_dataset=points(36), callbacks=[EMA(0.9)])
    fitted.fit()
    fitted.evaluate()
    assert graphs.training == 1  # a shorter last batch runs without torch.compile
    assert graphs.evaluating == 1


class Tokens(nn.Module):
    """Predicts each token from itself, in batches of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids) * attention_mask.unsqueeze(-1))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def padded_to_the_longest(samples: list[Tensor]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.where(ids > 0, -100)}


@pytest.mark.slow
def test_texts_of_all_lengths_take_one_compilation(graphs: Graphs) -> None:
    texts = [torch.randint(1, 10, (3 + 5 * number % 11,)) for number in range(22)]
    args = arguments(
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        eval_every=3,
        compile=TorchDynamoPlugin(backend=graphs),  # type: ignore[arg-type]  # torch takes functions too
    )
    Trainer(Tokens(), args, train_dataset=texts, eval_dataset=texts[:10], collate_fn=padded_to_the_longest).fit()
    assert (graphs.training, graphs.evaluating) == (1, 1)
