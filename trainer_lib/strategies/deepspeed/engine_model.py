"""A prepared model whose forwards go through DeepSpeed's engine."""

from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import PreparationError, UnsupportedError

# Of the methods of DeepSpeed's engine: what does the same here.
_INSTEAD = {
    "backward": "accelerator.backward(loss)",
    "step": "the prepared optimizer's step()",
    "load_checkpoint": "accelerator.load_state(folder), or load_state_dict_from_zero_checkpoint of "
    "trainer_lib.utils.deepspeed for files of DeepSpeed",
    "save_16bit_model": "accelerator.save_model(model, folder), or save_pretrained with "
    "state_dict=accelerator.get_state_dict(model), whose weights are fp32",
    "get_global_grad_norm": "the norm that accelerator.clip_grad_norm_ returns",
    "is_gradient_accumulation_boundary": "accelerator.sync_gradients",
    "gradient_accumulation_steps": "accelerator.gradient_accumulation_steps",
    "zero_optimization_stage": "accelerator.deepspeed_plugin.zero_stage",
    "get_lr": "the groups of the prepared optimizer, or get_last_lr() of the schedule",
}


class EngineModel(nn.Module):
    """A model, and DeepSpeed's engine around it once its optimizer is prepared too.

    Args:
        module: The user's model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training: bool = module.training
        self.__dict__["engine"] = None  # the engine is a module with the same model inside

    def attach(self, engine: Any) -> None:
        """Run forwards that train through an engine from now on."""
        self.__dict__["engine"] = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, through the engine if gradients are recorded and there is one."""
        engine = self.__dict__["engine"]
        if not torch.is_grad_enabled() or (engine is None and not self.training):
            return self.module(*args, **kwargs)
        if engine is None:
            raise PreparationError(
                f"This {type(self.module).__name__} was prepared, and its optimizer was not: DeepSpeed needs both to "
                "train. Give prepare() the optimizer too, or call model.eval() before inference."
            )
        outputs = engine(*args, **kwargs)
        if not isinstance(outputs, (Tensor, tuple, list, dict)):
            raise UnsupportedError(
                f"{type(self.module).__name__} returns a {type(outputs).__name__}, in which DeepSpeed finds no tensors "
                "to begin a backward at. Return a tensor, a tuple, a list or a dict (such as transformers' "
                "ModelOutput)."
            )
        return outputs

    def save_checkpoint(self, save_dir: Any, tag: Any = None, client_state: Any = None, **kwargs: Any) -> bool:
        """Save in DeepSpeed's format: the shards of all ranks, which `trainer-lib checkpoint zero-to-fp32` joins.

        All ranks call it. `accelerator.save_state` saves what a run needs to resume.

        Args:
            save_dir: The folder for all checkpoints.
            tag: The name of this one; by default the number of steps.
            client_state: Further values to save.
            **kwargs: Options of DeepSpeed's method.
        """
        engine = self.__dict__["engine"]
        if engine is None:
            raise PreparationError("save_checkpoint needs DeepSpeed's engine: give prepare() the optimizer too.")
        return engine.save_checkpoint(str(save_dir), tag=tag, client_state=client_state or {}, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the model, such as its `config`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
            if name in _INSTEAD and not hasattr(module, name):
                raise AttributeError(
                    f"A prepared model has no {name!r} of DeepSpeed's engine. Use {_INSTEAD[name]}."
                ) from None
            return getattr(module, name)
