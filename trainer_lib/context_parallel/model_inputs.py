"""What a model takes: `position_ids`, and packed documents that its attention keeps apart."""

import inspect
from typing import Any

from torch import nn

from trainer_lib.foundation.tensors.batch_fields import as_mapping
from trainer_lib.modules.module_kinds import is_transformers_model
from trainer_lib.modules.unwrapping import without_adapter


def takes_positions(model: nn.Module) -> bool:
    """Whether the model takes `position_ids`, which a part of a sequence needs."""
    return "position_ids" in inspect.signature(without_adapter(model).forward).parameters


def separates_documents(model: nn.Module, batch: Any) -> bool:
    """Whether attention stays within documents: in models of transformers, unless they use a cache."""
    base = without_adapter(model)
    if not is_transformers_model(base):
        return False
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return True  # which uses none
    uses_cache = (as_mapping(batch) or {}).get("use_cache")
    return not (getattr(base.config, "use_cache", False) if uses_cache is None else uses_cache)
