"""A `checkpoint-N` of Hugging Face's Trainer resumes here, and training continues with the losses of its writer."""

from pathlib import Path

import pytest
import torch

from tests.checkpointing.test_foreign import language_trainer, texts, the_model
from tests.checkpointing.third_party.trainers import SAVED_AT, logged, their_state, their_trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError

pytest.importorskip("transformers")


@pytest.mark.parametrize("saved_at", [5, SAVED_AT], ids=["at the end of an epoch", "in the middle of an epoch"])
def test_a_checkpoint_resumes(tmp_path: Path, saved_at: int) -> None:
    with their_state():
        theirs = their_trainer(tmp_path, save_steps=saved_at)
        theirs.train()
        expected = logged(theirs, saved_at)
    trainer = language_trainer(output_dir=tmp_path / "runs")
    result = trainer.fit(resume=tmp_path / f"checkpoint-{saved_at}")
    assert logged(trainer, saved_at) == pytest.approx(expected, rel=1e-6)
    assert list(expected) == list(range(saved_at + 1, 11))
    assert result.state.step == 10


def test_a_search_for_a_run_names_the_newest_checkpoint_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (10, SAVED_AT):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    newest = tmp_path / "checkpoint-10"
    trainer = language_trainer(output_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=f"the folder of a run: the newest one here is {newest}\\."):
        trainer.fit(resume=tmp_path)
    with caplog.at_level("WARNING"):
        trainer.fit(resume="auto")
    assert f"a new run begins. To resume from it, give resume='{newest}'." in caplog.text


@pytest.mark.slow
def test_two_ranks_resume(tmp_path: Path) -> None:
    """With dropout, whose masks each rank draws from its own generator."""

    def write() -> dict[int, float]:
        with their_state():
            theirs = their_trainer(tmp_path, ranks=2)
            theirs.train()
            return logged(theirs, SAVED_AT)

    def read() -> dict[int, float]:
        trainer = language_trainer(gradient_accumulation_steps=1)
        trainer.fit(resume=tmp_path / f"checkpoint-{SAVED_AT}")
        return logged(trainer, SAVED_AT)

    expected = run_world(write, OMP_NUM_THREADS="1")[0]
    assert (tmp_path / f"checkpoint-{SAVED_AT}" / "rng_state_1.pth").is_file()
    assert list(expected) == [8, 9, 10]
    assert run_world(read) == [pytest.approx(expected, rel=1e-6)] * 2


def test_a_loop_of_yours_loads_model_optimizer_and_schedule(tmp_path: Path) -> None:
    with their_state():
        their_trainer(tmp_path, max_steps=SAVED_AT).train()
    saved = tmp_path / f"checkpoint-{SAVED_AT}"
    accelerator = Accelerator(cpu=True)
    trainer = language_trainer()
    model = the_model(trainer)
    decayed = [value for value in model.parameters() if value.ndim > 1]
    others = [value for value in model.parameters() if value.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(texts(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.load_state(saved)
    weights = torch.load(saved / "optimizer.pt", weights_only=True)["state"]
    loaded = optimizer.state_dict()["state"]
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[key]["exp_avg_sq"], value["exp_avg_sq"]) for key, value in weights.items())
    assert scheduler.state_dict()["last_epoch"] == SAVED_AT
    assert len(list(loader)) == 10 - 4
