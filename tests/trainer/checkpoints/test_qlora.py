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


def test_adapters_over_a_4bit_base_with_layers_on_the_disk_train_as_in_memory(tmp_path: Path) -> None:
    import peft
    import transformers

    from tests.big_models.test_bitsandbytes import config
    from trainer_lib import Accelerator, init_empty_weights
    from trainer_lib.utils import load_and_quantize_model

    hf: Any = transformers
    torch.manual_seed(0)
    shape = hf.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    Accelerator(cpu=True).save_model(hf.LlamaForCausalLM(shape), str(tmp_path / "base"), max_shard_size="500KB")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 12))]
    in_memory = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]

    def trained(run: str, device_map: Any, steps: int = 4, **options: Any) -> dict[str, torch.Tensor]:
        with init_empty_weights(include_buffers=False):
            base = hf.LlamaForCausalLM(shape)
        base = load_and_quantize_model(
            base, config("nf4 twice"), tmp_path / "base", device_map, offload_folder=tmp_path / run
        )
        on_disk = [name for name, value in base.named_parameters() if value.is_meta]
        assert bool(on_disk) is ("disk" in device_map.values())
        assert all(name.startswith("model.layers.1.") for name in on_disk)
        torch.manual_seed(1)
        base.requires_grad_(False)
        targets: Any = {"r": 4, "target_modules": r".*layers\.0.*(q_proj|v_proj)", "task_type": "CAUSAL_LM"}
        model: Any = peft.get_peft_model(base, peft.LoraConfig(**targets))
        arguments = TrainingArguments(
            max_steps=steps,
            schedule_steps=4,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            use_cpu=True,
            **options,
        )
        Trainer(model, arguments, train_dataset=rows).fit()
        return adapters(model)

    expected = trained("unused", {"": "cpu"})
    assert len(expected) == 4
    assert any(value.abs().max() > 1e-3 for name, value in expected.items() if "lora_B" in name)
    spread = {**dict.fromkeys(in_memory, "cpu"), "model.layers.1": "disk"}
    runs: Any = {"output_dir": tmp_path / "runs", "save_every": "2 steps"}
    trained("disk", spread, steps=2, **runs)
    found = trained("disk", spread, resume="extend", **runs)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
