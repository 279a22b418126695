"""Train steps: how a micro-batch is read, what the model is called with, and what its loss is."""

import inspect
from abc import ABC
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer_lib.accelerator.megatron_lm.model_calls import IGNORED
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.state import AcceleratorState

Report = dict[str, Tensor]


class AbstractTrainStep(ABC):  # noqa: B024  (as in Accelerate, a step may set functions instead of methods)
    """The base of train steps.

    A step has `forward_step(data_iterator, model)`, which returns what the model returned and a function of it. That
    function returns the loss and a dict of values to report; or the summed losses, the number of tokens, and a dict.

    Args:
        name: The name of the step.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.model_output_class: Any = None

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Return the function that reads a micro-batch."""
        del accelerator, megatron_dataset_flag

    def get_forward_step_func(self) -> Any:
        """Return the function `forward_step`."""
        return

    def get_loss_func(self, accelerator: Any) -> Any:
        """Return the function of the model's outputs that computes the loss."""
        del accelerator


class _TrainStep(AbstractTrainStep):
    """A step whose functions a plugin or a subclass may replace.

    Args:
        accelerator: The Accelerator; scripts for earlier versions of Accelerate leave it out.
        args: The arguments that Megatron-LM would have.
    """

    model_type = ""

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        super().__init__(type(self).__name__)
        if args is None:
            accelerator, args = None, accelerator
        self._plugin: Any = AcceleratorState().megatron_lm_plugin
        self.args: Namespace = args
        self.get_batch: Any = _call_with_last(self.get_batch_func, accelerator, args.megatron_dataset_flag)
        self.loss_func: Any = self._get_loss_func(accelerator, args)
        self.forward_step: Any = self._get_forward_step_func(args)
        if args.model_return_dict:
            self.model_output_class: Any = _output_class(self.model_type)

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the mean of the losses of tokens whose mask is 1."""
        del accelerator
        if self._plugin.custom_loss_function is not None:
            return self._plugin.custom_loss_function

        def loss_func(loss_mask: Tensor, output_tensor: Any) -> Any:
            losses, logits = output_tensor if self.args.return_logits else (output_tensor, None)
            others = {} if logits is None else {"logits": logits.detach()}
            return self._reported((losses.float() * loss_mask).sum(), loss_mask.sum(), **others)

        return loss_func

    def _get_loss_func(self, accelerator: Any, args: Namespace) -> Any:
        del args
        return _call_with_last(self.get_loss_func, accelerator)

    def _get_forward_step_func(self, args: Namespace) -> Any:
        del args
        return self.get_forward_step_func()

    def _reported(self, total: Tensor, tokens: Tensor, name: str = "lm loss", **others: Tensor) -> Any:
        """Return the loss of a micro-batch: its mean, or its sum and the number of tokens."""
        mean = total / tokens.clamp(min=1)
        report = {name: mean.detach(), **others}
        return (total, tokens, report) if self.args.calculate_per_token_loss else (mean, report)


class GPTTrainStep(_TrainStep):
    """The step of causal language models.

    A micro-batch has `input_ids` and, where it has them, `labels` and `attention_mask` as transformers takes them; or
    `text` of Megatron-LM's datasets.

    Args:
        accelerator: The Accelerator.
        args: The arguments that Megatron-LM would have.
    """

    model_type = "gpt"

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that reads tokens, labels, loss mask, attention mask and positions."""
        del accelerator
        if self._plugin.custom_get_batch_function is not None:
            return self._plugin.custom_get_batch_function
        ends = torch.tensor(self.args.eod_tokens, dtype=torch.long)
        if self.args.eod_mask_loss and not len(ends):
            raise ConfigurationError(
                "MegatronLMPlugin(eod_mask_loss=True) needs the token that ends a text, and the model's configuration "
                "has none. Set model.config.eos_token_id."
            )

        def get_batch(data_iterator: Iterator[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
            data = next(data_iterator)
            if megatron_dataset_flag and "text" in data:
                text, mask = data["text"].long(), None
                tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            else:
                tokens, mask = data["input_ids"].long(), data.get("attention_mask")
                labels = functional.pad(data.get("labels", tokens).long()[:, 1:], (0, 1), value=IGNORED)
            loss_mask = (labels != IGNORED).float()
            if self.args.eod_mask_loss:
                loss_mask = loss_mask * ~torch.isin(tokens, ends.to(tokens.device))
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return tokens, labels, loss_mask, mask, positions

        return get_batch

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that computes the losses of the tokens of a micro-batch."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            return model(tokens, position_ids, attention_mask, labels=labels), partial(self.loss_func, loss_mask)

        return forward_step


class BertTrainStep(_TrainStep):
    """The step of models of BERT's kind: masked tokens, and the second task if the model has it; or fine-tuning.

    Args:
        accelerator: The Accelerator.
        args: The arguments that Megatron-LM would have.
    """

    model_type = "bert"

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that reads tokens, types, order of sentences, loss mask, labels and padding mask."""
        del accelerator
        if self._plugin.custom_get_batch_function is not None:
            return self._plugin.custom_get_batch_function
        _refuse_end_masks(self.args)

        def get_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
            data = next(data_iterator)
            if megatron_dataset_flag and "text" in data:
                names = ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")
                return tuple(data[name].float() if name == "loss_mask" else data[name].long() for name in names)
            labels = data.get("labels")
            loss_mask = None if labels is None else (labels != IGNORED).float()
            order = data.get("next_sentence_label")
            return data["input_ids"], data.get("token_type_ids"), order, loss_mask, labels, data.get("attention_mask")

        return get_batch

    def get_loss_func(self, accelerator: Any, pretraining_flag: bool = True, num_labels: int = 2) -> Callable[..., Any]:  # type: ignore[override]
        """Return the loss of masked tokens and of the second task; of labels, for fine-tuning."""
        del accelerator
        if self._plugin.custom_loss_function is not None:
            return self._plugin.custom_loss_function

        def loss_func_pretrain(loss_mask: Tensor, sentence_order: Tensor | None, output_tensor: Any) -> Any:
            losses, *logits, second = output_tensor
            others = {"logits": logits[0].detach()} if logits else {}
            total, tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
            if second is None or sentence_order is None:
                return self._reported(total, tokens, **others)
            if self.args.calculate_per_token_loss:
                raise UnsupportedError(
                    "MegatronLMPlugin(calculate_per_token_loss=True) does not work with BERT's second task, whose loss "
                    "is that of sentences. Leave it out, or leave next_sentence_label out of the batches."
                )
            order_loss = functional.cross_entropy(second.float().view(-1, 2), sentence_order.view(-1), ignore_index=-1)
            mean = total / tokens.clamp(min=1)
            return mean + order_loss, {"lm loss": mean.detach(), "sop loss": order_loss.detach(), **others}

        def loss_func_finetune(labels: Tensor, logits: Tensor) -> Any:
            if num_labels == 1:
                loss = functional.mse_loss(logits.view(-1), labels.view(-1).to(logits.dtype))
            elif labels.dtype in (torch.long, torch.int):
                loss = functional.cross_entropy(logits.view(-1, num_labels), labels.view(-1).long())
            else:
                loss = functional.binary_cross_entropy_with_logits(logits, labels)
            others = {"logits": logits.detach()} if self.args.return_logits else {}
            return loss, {"loss": loss.detach(), **others}

        return loss_func_pretrain if pretraining_flag else loss_func_finetune

    def get_forward_step_func(self, pretraining_flag: bool = True, bert_binary_head: bool = True) -> Callable[..., Any]:
        """Return the function that calls the model with a micro-batch."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            if not pretraining_flag:
                return model(tokens, padding_mask, tokentype_ids=types), partial(self.loss_func, labels)
            outputs = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return outputs, partial(self.loss_func, loss_mask, order if bert_binary_head else None)

        return forward_step

    def _get_loss_func(self, accelerator: Any, args: Namespace) -> Any:
        return _call_with_last(self.get_loss_func, accelerator, args.pretraining_flag, args.num_labels)

    def _get_forward_step_func(self, args: Namespace) -> Any:
        return _call_with_last(self.get_forward_step_func, args.pretraining_flag, args.bert_binary_head)


class T5TrainStep(_TrainStep):
    """The step of models with an encoder and a decoder.

    Args:
        accelerator: The Accelerator.
        args: The arguments that Megatron-LM would have.
    """

    model_type = "t5"

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that reads tokens of both, loss mask, labels, and the masks of attention."""
        del accelerator
        if self._plugin.custom_get_batch_function is not None:
            return self._plugin.custom_get_batch_function
        _refuse_end_masks(self.args)

        def get_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
            data = next(data_iterator)
            if megatron_dataset_flag and "text_enc" in data:
                hidden = tuple(data[name] < 0.5 for name in ("enc_mask", "dec_mask", "enc_dec_mask"))
                tokens = data["text_enc"].long(), data["text_dec"].long()
                return *tokens, data["loss_mask"].float(), data["labels"].long(), *hidden
            labels = data["labels"].long()
            before = data.get("decoder_input_ids")
            if before is None:
                before = _shifted(labels, self.args)
            loss_mask = (labels != IGNORED).float()
            return data["input_ids"].long(), before, loss_mask, labels, data.get("attention_mask"), None, None

        return get_batch

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that computes the losses of the tokens of a micro-batch."""

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
            encoder, decoder, loss_mask, labels, *masks = self.get_batch(data_iterator)
            return model(encoder, decoder, *masks, lm_labels=labels), partial(self.loss_func, loss_mask)

        return forward_step


STEPS: dict[str, type[_TrainStep]] = {"gpt": GPTTrainStep, "bert": BertTrainStep, "t5": T5TrainStep}


def _shifted(labels: Tensor, args: Namespace) -> Tensor:
    """Return the decoder's tokens for these labels: each is that of the token before, after a first one."""
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(args, name) is None:
            raise ConfigurationError(
                f"T5TrainStep needs {name}, and the model's configuration has none. Set model.config.{name} before "
                "prepare, or put decoder_input_ids into the batches."
            )
    before = functional.pad(labels[:, :-1], (1, 0), value=args.decoder_start_token_id)
    return before.masked_fill(before == IGNORED, args.pad_token_id)


def _refuse_end_masks(args: Namespace) -> None:
    if args.eod_mask_loss:
        raise ConfigurationError(
            "MegatronLMPlugin(eod_mask_loss=True) needs GPTTrainStep: models of BERT's and T5's kind have no texts "
            "that follow each other. Leave it out."
        )


def _call_with_last(function: Callable[..., Any], *args: Any) -> Any:
    """Call a method with the last of these arguments that it takes: earlier versions of Accelerate had fewer."""
    count = len(inspect.signature(function).parameters)
    return function(*args[max(len(args) - count, 0) :])


def _output_class(model_type: str) -> Any:
    from transformers import modeling_outputs

    names = {
        "gpt": "CausalLMOutputWithCrossAttentions",
        "bert": "SequenceClassifierOutput",
        "t5": "Seq2SeqLMOutput",
    }
    return getattr(modeling_outputs, names[model_type])
