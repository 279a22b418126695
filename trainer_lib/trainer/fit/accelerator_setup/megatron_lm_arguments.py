"""The launcher's options of Megatron-LM beside training arguments, which count the micro-batches and clip."""

import dataclasses

from trainer_lib.foundation.environment import megatron_lm_setting
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments


def megatron_lm_plugin(args: TrainingArguments) -> MegatronLMPlugin:
    """Return the plugin that the launcher asks for, without what the arguments say.

    Raises:
        ConfigurationError: If the launcher and an argument differ.
    """
    plugin = MegatronLMPlugin()
    for name, asked, argument, value in (
        (
            "num_micro_batches",
            plugin.num_micro_batches,
            "gradient_accumulation_steps",
            args.gradient_accumulation_steps or 1,
        ),
        ("gradient_clipping", plugin.gradient_clipping, "max_grad_norm", args.max_grad_norm or 0.0),
    ):
        if megatron_lm_setting(name) is not None and asked != value:
            raise ConfigurationError(
                f"The launcher says {name}={asked}, and TrainingArguments({argument}={value}). Both mean the same: "
                f"leave --megatron_lm_{name} out, or give {argument}={asked}."
            )
    if plugin.eod_mask_loss:
        raise ConfigurationError(
            "The launcher says eod_mask_loss=True, and a Trainer computes its own loss. Leave "
            "--megatron_lm_eod_mask_loss out, and set the labels after an end of text to -100."
        )
    # A Trainer weighs each loss by its tokens anyway.
    return dataclasses.replace(plugin, num_micro_batches=1, gradient_clipping=0.0, calculate_per_token_loss=None)
