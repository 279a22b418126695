"""`MegatronEngine`: a prepared model whose call computes the gradients of all micro-batches of an update."""

import inspect
import weakref
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from trainer_lib.accelerator.megatron_lm.losses import avg_losses_across_data_parallel_group
from trainer_lib.accelerator.megatron_lm.model_calls import CALLS, ModelCall
from trainer_lib.accelerator.megatron_lm.train_steps import STEPS
from trainer_lib.accelerator.weighted_backward import WeightedLoss
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, StateError, UnsupportedError

if TYPE_CHECKING:
    from trainer_lib.accelerator.accelerator import Accelerator

_STATE = "megatron_windows"


class MegatronEngine(nn.Module):
    """A prepared model that is called with the batch of an update, by keywords.

    In training, the call computes the gradients of all micro-batches, and `accelerator.backward` of its loss has
    nothing more to do. In evaluation, it computes losses alone. Both return the mean over micro-batches and ranks. A
    call by position is that of the model. `prepare` makes it out of a model if the plugin has a train step: the object
    is the model, with its names and attributes.
    """

    megatron_windows: "Windows"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a batch, or call the model itself."""
        if args or self.megatron_windows.is_inside:
            return super().__call__(*args, **kwargs)
        return self.megatron_windows.outputs(kwargs)

    @property
    def train_step_handler(self) -> Any:
        """The train step."""
        return self.megatron_windows.step

    def get_batch_data_iterator(self, batch_data: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Return the micro-batches of a batch."""
        return iter(self.megatron_windows.micro_batches(batch_data))

    def train_step(self, **batch_data: Any) -> tuple[dict[str, Any], int, Any, None]:
        """Make an update: gradients, clipping, step, and schedule.

        Returns:
            The values that the step reports, whether the update was skipped (fp16), and the norm before clipping.
        """
        return self.megatron_windows.update(batch_data)

    def megatron_generate(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        length_penalty: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the tokens of the inputs and those that follow: sampled, unless `num_beams` or `top_k=1` is given.

        Args:
            inputs: The tokens to begin with, [batch, length].
            attention_mask: Which of them are no padding.
            max_length: The length of the result, at most.
            max_new_tokens: The same without the inputs.
            num_beams: Search with so many beams.
            temperature: What the scores are divided by (1).
            top_k: Sample among so many tokens; 0: among all.
            top_p: Sample among the tokens whose probabilities add up to this; 0: among all.
            length_penalty: The exponent of the length by which beams are divided.
            **kwargs: Further options of the model's `generate`.

        Raises:
            ConfigurationError: If the model cannot generate.
        """
        generate: Any = getattr(self, "generate", None)
        if generate is None:
            raise ConfigurationError(
                f"megatron_generate needs a model with generate(), such as those of transformers (got "
                f"{type(self).__name__}). Generate tokens in a loop over calls of the model by position."
            )
        samples = num_beams is None and top_k != 1
        options = {
            "attention_mask": attention_mask, "max_length": max_length, "max_new_tokens": max_new_tokens,
            "num_beams": num_beams, "temperature": temperature if samples else None,
            "top_k": (top_k or 0) if samples else None, "top_p": (top_p or 1.0) if samples else None,
            "length_penalty": length_penalty,
        }  # fmt: skip
        given = {name: value for name, value in options.items() if value is not None}
        with torch.no_grad():
            return generate(inputs, do_sample=samples, **given, **kwargs)

    def eval_step(self, **batch_data: Any) -> dict[str, Any]:
        """Return the values that the step reports for a batch, without gradients."""
        return self.megatron_windows.evaluated(batch_data)


class Windows:
    """Computes windows of micro-batches with a train step.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The prepared model.
    """

    def __init__(self, accelerator: "Accelerator", model: nn.Module) -> None:
        plugin = accelerator.state.megatron_lm_plugin
        assert plugin is not None
        self._to_accelerator = weakref.ref(accelerator)  # which ends with its last reference
        self._model, self._plugin = model, plugin
        self.is_inside = False
        self.holds_gradients = False
        bare = accelerator.strategy.bare(model)
        self.args: Namespace = step_arguments(accelerator, bare)
        self.step: Any = _train_step(accelerator, self.args)
        kind = getattr(self.step, "model_type", "") or self.args.model_type_name
        self._call: ModelCall = CALLS[kind](self._called, bare, self.args.return_logits)

    def outputs(self, batch: dict[str, Any]) -> Any:
        """Return what a call of the model returns: the loss, in the step's class of outputs if it has one."""
        report = self.gradients(batch) if self._model.training else self.evaluated(batch)
        scalars = [value for value in report.values() if value.ndim == 0]
        loss = sum(scalars, start=torch.zeros((), device=self._accelerator.device))
        kind = getattr(self.step, "model_output_class", None)
        return loss if kind is None else kind(loss=loss, logits=report.get("logits"))

    def gradients(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute the gradients of a window, and return what the step reports."""
        chunks = self.micro_batches(batch)
        with self._window_of(len(chunks)):
            losses = self._pipelined(chunks) if self._accelerator.takes_windows(self._model) else self._run(chunks)
        self.holds_gradients = True
        return self._mean(losses)

    def evaluated(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what the step reports, without gradients."""
        self.holds_gradients = False  # a backward of this loss is an error
        with torch.no_grad():
            return self._mean([self._loss(chunk) for chunk in self.micro_batches(batch)])

    def update(self, batch: dict[str, Any]) -> tuple[dict[str, Any], int, Any, None]:
        """Make an update."""
        report, prepared = self.gradients(batch), self._accelerator.prepared
        for optimizer in prepared.optimizers:
            optimizer.step()
        for scheduler in prepared.schedulers:
            scheduler.step()
        skipped = any(optimizer.step_was_skipped for optimizer in prepared.optimizers)
        for optimizer in prepared.optimizers:
            optimizer.zero_grad()
        self.holds_gradients: bool = False
        return report, int(skipped), self._plugin.grad_norm, None

    def micro_batches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the batch in `num_micro_batches` parts; the last batch of a loader may make fewer."""
        rows = {len(value) for value in batch.values() if isinstance(value, Tensor)}
        if len(rows) != 1:
            raise ConfigurationError(
                "A train step needs a batch of keywords whose tensors have the same number of rows (got "
                f"{shown({name: getattr(value, 'shape', value) for name, value in batch.items()})})."
            )
        size = max(-(-rows.pop() // (self._plugin.num_micro_batches or 1)), 1)
        parts = {name: torch.split(value, size) for name, value in batch.items() if isinstance(value, Tensor)}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]

    @contextmanager
    def _window_of(self, count: int) -> Generator[None]:
        """Let `accumulate` count so many micro-batches, whatever the loader says."""
        plugin = self._accelerator.gradient_state.plugin
        before = plugin.num_steps, plugin.sync_with_dataloader
        plugin.num_steps, plugin.sync_with_dataloader = count, False
        try:
            yield
        finally:
            plugin.num_steps, plugin.sync_with_dataloader = before

    def _run(self, chunks: Sequence[dict[str, Any]]) -> list[WeightedLoss]:
        accelerator, losses = self._accelerator, list[WeightedLoss]()
        for chunk in chunks:
            with accelerator.accumulate(self._model):
                loss = self._loss(chunk)
                accelerator.backward(loss.loss, weight=loss.weight)
                losses.append(loss._replace(loss=loss.loss.detach()))
        return losses

    def _pipelined(self, chunks: Sequence[dict[str, Any]]) -> list[WeightedLoss]:
        self._accelerator.gradient_state.plugin.num_steps = 1
        with self._accelerator.accumulate(self._model):
            return self._accelerator.backward_window(self._model, self._loss, chunks)

    def _loss(self, chunk: dict[str, Any]) -> WeightedLoss:
        outputs, function = self.step.forward_step(iter([chunk]), self._call)
        returned = function(outputs)
        if len(returned) == 3:
            loss, tokens, report = returned
            return WeightedLoss(loss, tokens, report)
        loss, report = returned
        rows = next(len(value) for value in chunk.values())
        return WeightedLoss(loss * rows, float(rows), report)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        with self.plain_calls():
            return self._model(*args, **kwargs)

    @contextmanager
    def plain_calls(self) -> Generator[None]:
        """Let calls be those of the model itself."""
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside: bool = before

    def _mean(self, losses: Sequence[WeightedLoss]) -> dict[str, Any]:
        """Return the mean of what each micro-batch reports, over all ranks; tensors are put together."""
        weights = torch.stack([torch.as_tensor(loss.weight, dtype=torch.float32).to(self._device) for loss in losses])
        names = list(losses[0].facts)
        scalars = [name for name in names if losses[0].facts[name].ndim == 0]
        values = [torch.stack([loss.facts[name].float() for loss in losses]) for name in scalars]
        *means, weight = avg_losses_across_data_parallel_group(
            [(value * weights).sum() for value in values] + [weights.sum()]
        )
        weight = weight.where(weight > 0, 1.0)  # without a token that counts, the mean is 0
        averaged = {name: mean / weight for name, mean in zip(scalars, means, strict=True)}
        return {
            name: averaged[name] if name in averaged else torch.cat([loss.facts[name] for loss in losses])
            for name in names
        }

    @property
    def _accelerator(self) -> "Accelerator":
        accelerator = self._to_accelerator()
        if accelerator is None:
            raise StateError("The Accelerator that prepared this model no longer exists. Keep a reference to it.")
        return accelerator

    @property
    def _device(self) -> torch.device:
        return self._accelerator.device


def let_models_compute_windows(accelerator: "Accelerator", prepared: Sequence[Any]) -> None:
    """Let the calls of prepared models compute the micro-batches of an update, each of which is one batch."""
    accelerator.gradient_state.plugin.num_steps = 1
    for value in prepared:
        if isinstance(value, nn.Module):
            as_engine(accelerator, value)


def as_engine(accelerator: "Accelerator", model: nn.Module) -> nn.Module:
    """Let the calls of a prepared model be those of a `MegatronEngine`."""
    if isinstance(model, MegatronEngine):
        return model
    kind = type(model)
    names: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    if hasattr(kind, "generate"):
        names["generate"] = _plain(cast(Any, kind).generate)  # it calls the model by keywords
    object.__setattr__(model, _STATE, Windows(accelerator, model))
    model.__class__ = type(kind.__name__, (MegatronEngine, kind), names)
    return model


def undo_engine(model: nn.Module) -> None:
    """Let the calls of a model be its own again."""
    if isinstance(model, MegatronEngine):
        object.__delattr__(model, _STATE)
        model.__class__ = type(model).__mro__[2]


def computes_gradients(model: nn.Module) -> bool:
    """Whether the last call of a model has computed gradients."""
    return isinstance(model, MegatronEngine) and model.megatron_windows.holds_gradients


def step_arguments(accelerator: "Accelerator", model: Any) -> Namespace:
    """Return the arguments that a train step reads, under Megatron-LM's names."""
    plugin, config = accelerator.state.megatron_lm_plugin, getattr(model, "config", None)
    assert plugin is not None
    kind = _model_type(config)
    vocabulary, ends = getattr(config, "vocab_size", None), _ends_of_documents(config)
    is_pretraining = kind != "bert" or any(part in type(model).__name__ for part in ("PreTraining", "MaskedLM"))
    labels = int(getattr(config, "num_labels", 2) or 2)
    return Namespace(
        model_type_name=kind,
        pretraining_flag=is_pretraining,
        num_labels=labels,
        bert_binary_head=kind == "bert" and is_pretraining and labels == 2,
        model_return_dict=config is not None,
        orig_vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        vocab_file=None,
        eod_token=next(iter(ends), None),
        eod_tokens=ends,
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
        pad_token_id=getattr(config, "pad_token_id", None),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=bool(plugin.eod_mask_loss),
        return_logits=plugin.return_logits,
        calculate_per_token_loss=bool(plugin.calculate_per_token_loss),
        megatron_dataset_flag=plugin.megatron_dataset_flag,
        micro_batch_size=plugin.micro_batch_size,
        num_micro_batches=plugin.num_micro_batches,
        global_batch_size=plugin.global_batch_size,
        seq_length=plugin.seq_length,
        encoder_seq_length=plugin.encoder_seq_length,
        decoder_seq_length=plugin.decoder_seq_length,
        tensor_model_parallel_size=plugin.tp_degree,
        pipeline_model_parallel_size=plugin.pp_degree,
        context_parallel_size=plugin.context_parallel_size,
        data_parallel_size=accelerator.data_group.size,
    )


def _train_step(accelerator: "Accelerator", args: Namespace) -> Any:
    """Return the plugin's train step, or the one for the model."""
    plugin = accelerator.state.megatron_lm_plugin
    assert plugin is not None
    if (plugin.context_parallel_size or 1) > 1:
        raise UnsupportedError(
            f"MegatronLMPlugin(context_parallel_size={plugin.context_parallel_size}) does not work with train steps, "
            "which need whole sequences. Leave the train step out, and call the model with its labels in your loop."
        )
    kind = plugin.custom_train_step_class or STEPS[args.model_type_name]
    given = plugin.custom_train_step_kwargs or {}
    first = next(iter(inspect.signature(kind).parameters), "")
    positional = {"accelerator": (accelerator, args), "name": ()}.get(first, (args,))
    step = kind(*positional, **given)
    if not hasattr(step, "forward_step"):
        step.forward_step = step.get_forward_step_func()
    if not callable(step.forward_step):
        raise ConfigurationError(
            f"{kind.__name__} has no forward_step: its get_forward_step_func returned {shown(step.forward_step)}. "
            "Return a function of (data_iterator, model) that returns the model's outputs and a function of them."
        )
    return step


def _model_type(config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "t5"
    return "bert" if "bert" in str(getattr(config, "model_type", "")) else "gpt"


def _ends_of_documents(config: Any) -> list[int]:
    tokens = getattr(config, "eos_token_id", None)
    return list(tokens) if isinstance(tokens, list | tuple) else [] if tokens is None else [tokens]


def _plain(generate: Callable[..., Any]) -> Callable[..., Any]:
    def plain_generate(self: MegatronEngine, *args: Any, **kwargs: Any) -> Any:
        with self.megatron_windows.plain_calls():
            return generate(self, *args, **kwargs)

    return plain_generate
