"""Adapters over a base in 4 bits train, and go on after an interruption as if there had been none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.pages import run_example
from trainer_lib import ConfigurationError, Trainer, TrainingArguments
from trainer_lib.foundation.imports import is_bnb_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not is_bnb_available(), reason="bitsandbytes is not installed"),
]


def adapters(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def test_the_recipe_of_the_page_trains_and_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = run_example("big_models.md", "prepare_model_for_kbit_training", tmp_path)
    trainer: Any = page["trainer"]
    expected = adapters(trainer.model)
    assert len(expected) == 8
    assert {type(m).__name__ for m in trainer.model.modules()} >= {"Linear4bit"}
    assert page["again"].generate(input_ids=page["tokens"][:1], max_new_tokens=2).shape == (1, 14)

    # Adapters alone are saved, and PEFT loads them.
    (run,) = (tmp_path / "runs").iterdir()
    saved = load_file(run / "checkpoints" / "checkpoint-00000006" / "model.safetensors")
    assert saved.keys() == expected.keys()
    with torch.no_grad():
        logits = trainer.model.eval()(page["tokens"]).logits
        again = page["again"]
        assert all(torch.equal(value, adapters(trainer.model)[name]) for name, value in expected.items())
        torch.testing.assert_close(again(page["tokens"]).logits, logits, rtol=0, atol=0.05)  # it may have been packed

    def resumed(base: Any, checkpoint: Path) -> Trainer:
        base = page["prepare_model_for_kbit_training"](base, use_gradient_checkpointing=False)
        arguments = page["arguments"]
        other = Trainer(
            page["get_peft_model"](base, page["adapter"]),
            arguments,
            train_dataset=page["data"],
            eval_dataset=page["data"],
        )
        other.fit(resume=str(checkpoint))
        return other

    for step in (2, 4):
        found = adapters(resumed(page["quantized_base"](), run / "checkpoints" / f"checkpoint-{step:08d}").model)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_quantized_model_without_adapters_is_refused() -> None:
    from tests.big_models.test_bitsandbytes import config, made
    from trainer_lib.utils import load_and_quantize_model

    model = load_and_quantize_model(made(), config("nf4"))
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=1),
        train_dataset=[(torch.tensor([1, 2]), torch.tensor([1, 2]))],
        loss_fn=torch.nn.functional.cross_entropy,
    )
    with pytest.raises(ConfigurationError, match=r"blocks\.0\.0\.weight of Model is quantized and cannot be trained"):
        trainer.fit()
