"""The tables of docs/sharding.md that say what becomes of fields of `DeepSpeedPlugin` and of sections of its file.

`python -m tests.options.deepspeed_table` writes them.
"""

import dataclasses
import re
from pathlib import Path

from trainer_lib import DeepSpeedPlugin
from trainer_lib.options.deepspeed.deepspeed_plugin import KEYS
from trainer_lib.strategies.deepspeed.engine_config import OURS, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"
_NOTE = "<!-- Written by python -m tests.options.deepspeed_table -->"
MAPPED = {
    "hf_ds_config": "the file, a dict, or an `HfDeepSpeedConfig`: all values; fields add to it",
    "gradient_accumulation_steps": "the window of the `Accelerator`; another number given to it is an error",
    "gradient_clipping": "the largest norm, which the prepared optimizer's `step()` clips to",
    "zero_stage": "what DeepSpeed shards; 0 is DDP",
    "is_train_batch_min": "which of several loaders fills `train_micro_batch_size_per_gpu`: smallest or largest batch",
    "offload_optimizer_device": '`"cpu"`, with any optimizer of torch; `"nvme"` is refused',
    "offload_param_device": '`"cpu"`; `"nvme"` is refused',
    "offload_optimizer_nvme_path": 'the folder for `"nvme"`',
    "offload_param_nvme_path": 'the folder for `"nvme"`',
    "zero3_init_flag": "`from_pretrained` and `from_config` of transformers shard weights as they create them, once "
    "there is an `Accelerator`; on by default with stage 3",
    "zero3_save_16bit_model": "no effect, and a warning: `save_model` and `get_state_dict` gather weights in any case",
    "transformer_moe_cls_names": "classes of modules whose weights stage 3 gathers at once",
}
UNSUPPORTED = {
    "enable_msamp": "MS-AMP; train with bf16",
    "msamp_opt_level": "MS-AMP; train with bf16",
}
OF_THE_ACCELERATOR = {
    "train_batch_size": "must match the loader, the window and the number of processes",
    "train_micro_batch_size_per_gpu": "must match the loader",
    "gradient_accumulation_steps": "see the field",
    "gradient_clipping": "see the field",
    "optimizer": "made from `DummyOptim`, with DeepSpeed's default values; a Trainer makes its own, and both must "
    "agree",
    "scheduler": "made from `DummyScheduler`; a Trainer makes its own, and both must agree",
    "fp16": "autocast over fp32 weights and a loss scaler with these values, as with DDP",
    "bf16": "autocast over fp32 weights, as with DDP",
    "amp": "ignored: the `Accelerator` sets the precision",
    "torch_autocast": "ignored: the `Accelerator` sets the precision",
    "steps_per_print": "ignored: trackers and the progress bar report",
    "wall_clock_breakdown": "ignored: the profiler measures",
}


def tables() -> str:
    """Return both tables."""
    lines = ["| field of `DeepSpeedPlugin` | in the file | here |", "|---|---|---|"]
    for field in dataclasses.fields(DeepSpeedPlugin):
        key = f"`{KEYS[field.name]}`" if field.name in KEYS else ""
        lines.append(f"| `{field.name}` | {key} | {_effect(field.name)} |")
    lines += ["", "| in the file | here |", "|---|---|"]
    lines += [f"| `{name}` | {OF_THE_ACCELERATOR[name]} |" for name in OURS]
    lines += [f"| `{key}` | refused: {what} |" for key, what in REFUSED.items()]
    lines.append("| other sections | DeepSpeed's engine gets them as they are |")
    return "\n".join(lines)


def _effect(name: str) -> str:
    return MAPPED.get(name) or f"refused: {UNSUPPORTED[name]}"


def with_tables(text: str) -> str:
    """Return the text of the page with its tables."""
    replaced, count = re.subn(
        rf"({re.escape(_NOTE)}\n\n).*?\n(?=\n<!-- end -->)",
        lambda match: f"{match[1]}{tables()}\n",
        text,
        flags=re.DOTALL,
    )
    assert count == 1, f"{PAGE} has {count} places for its tables"
    return replaced


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
