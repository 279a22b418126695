"""Models of transformers that are sharded while they are built (`zero3_init_flag`)."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from trainer_lib.foundation.imports import is_transformers_available
from trainer_lib.options.deepspeed.deepspeed_config_file import AUTO, HfDeepSpeedConfig, values_of

_TRANSFORMERS = "transformers.integrations.deepspeed"


def construction_config(config: HfDeepSpeedConfig) -> HfDeepSpeedConfig:
    """Return what `deepspeed.zero.Init` needs of a config: how weights are sharded, without what a model decides."""
    zero: dict[str, Any] = {"zero_optimization": config.get_value("zero_optimization", {})}
    made = HfDeepSpeedConfig({**zero, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
    for key in [key for key, value in values_of(made.config) if value == AUTO]:
        made.del_config_sub_tree(key)
    return made


def shard_built_models(config: HfDeepSpeedConfig | None) -> None:
    """Have `from_pretrained` and `from_config` of transformers shard weights as they are created.

    Args:
        config: How weights are sharded, as long as this object lives; `None` builds whole models.
    """
    if not is_transformers_available():
        return
    transformers: Any = import_module(_TRANSFORMERS)
    if config is None:
        transformers.unset_hf_deepspeed_config()
    else:
        transformers.set_hf_deepspeed_config(config)


@contextmanager
def built_models(config: HfDeepSpeedConfig | None) -> Generator[None]:
    """Shard models that are built inside the block, or build whole ones (`None`); afterwards as before."""
    if not is_transformers_available():
        yield
        return
    transformers: Any = import_module(_TRANSFORMERS)
    before = transformers._hf_deepspeed_config_weak_ref
    shard_built_models(config)
    try:
        yield
    finally:
        transformers._hf_deepspeed_config_weak_ref = before
