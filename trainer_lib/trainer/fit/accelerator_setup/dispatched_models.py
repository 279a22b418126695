"""Models of a trainer that are spread over the devices of one process by a device map."""

from collections.abc import Iterable

from torch import nn

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.modules.device_placement import has_offloaded_params
from trainer_lib.modules.unwrapping import extract_model_from_parallel
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments


def dispatch(model: nn.Module, args: TrainingArguments) -> nn.Module:
    """Spread a model as the arguments say, in place, and return it."""
    if args.device_map is None:
        return model
    if hasattr(model, "hf_device_map"):
        raise ConfigurationError(
            f"device_map={args.device_map!r}: the {type(model).__name__} has a device map already. Leave one out."
        )
    from trainer_lib.big_modeling import dispatch_model
    from trainer_lib.device_map.by_name import infer_map

    device_map = args.device_map
    if isinstance(device_map, str):
        device_map = infer_map(model, device_map, args.max_memory, getattr(model, "_no_split_modules", None))
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if on_disk and args.offload_folder is None:
        raise ConfigurationError(
            f"device_map={args.device_map!r} keeps {on_disk[0] or 'all'} of the {type(model).__name__} on the disk, "
            "and there is no folder for it. Give offload_folder, or more max_memory."
        )
    return dispatch_model(model, device_map, offload_dir=args.offload_folder)


def refuse_offloaded_training(models: Iterable[nn.Module]) -> None:
    """Raise if an offloaded weight is to be trained: what is fetched for a forward is only a copy."""
    for model in map(extract_model_from_parallel, models):
        for name, module in model.named_modules():
            trained = [key for key, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
            if trained and has_offloaded_params(module):
                weight = canonical_name(f"{name}.{trained[0]}".lstrip("."))
                raise UnsupportedError(
                    f"{weight} of the {type(model).__name__} is offloaded by a device map and cannot be trained. "
                    "Freeze it (requires_grad_(False)); to train adapters over it, "
                    "dispatch the model first (load_checkpoint_and_dispatch), then add them."
                )
