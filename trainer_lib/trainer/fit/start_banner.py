"""The start banner: model, devices, batch, length, optimizer, loss, evaluation and output of a run."""

import contextlib
import shutil
import sys
import textwrap
from typing import Any

from torch import nn

from trainer_lib.events import Callback
from trainer_lib.foundation.duration import Every
from trainer_lib.options.enums import DynamoBackend
from trainer_lib.processes.exit_codes import is_interactive
from trainer_lib.state import PartialState
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.optim.schedules import moves_each_update, peak_first_last
from trainer_lib.trainer.safety.deadline import Deadline
from trainer_lib.trainer.safety.signals import Signals

_NARROWEST = 40


def banner(context: FitContext, signals: Signals, deadline: Deadline, columns: int | None = None) -> str:
    """Return what the run is going to do, one line per subject, wrapped to this many columns."""
    lines = {
        "model": _model(context),
        "devices": _devices(context),
        **_launcher(),
        **_mesh(context),
        **_compilation(context),
        "batch": _batch(context),
        **_workers(context),
        "length": _length(context),
        "optimizer": _optimizers(context),
        "loss": context.loss.describe(),
        "evaluation": _evaluation(context),
        "output": _output(context),
        **_resume(context),
        "saves and ends": _ends_early(signals, deadline),
    }
    width = max(map(len, lines))
    text = "\n".join(_wrapped(f"  {name:<{width}}  ", line, columns) for name, line in lines.items())
    return f"run {context.run.state.run_id or '(not saved)'}\n{text}\n"


def _wrapped(label: str, line: str, columns: int | None) -> str:
    if columns is None:
        return label + line
    indent = " " * len(label)
    # A path in the middle of a line stays whole, so that it can be copied.
    return textwrap.fill(
        line,
        max(columns, _NARROWEST),
        initial_indent=label,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def show(context: FitContext, signals: Signals, deadline: Deadline) -> None:
    """Write the banner, on the main process; a rehearsal has none, and neither has a run that nothing shows."""
    shows = any(callback.is_display for callback in context.events)
    file = sys.stdout if is_interactive() else sys.stderr  # which notebooks show in red
    if context.run.is_main_process and shows and not context.in_sandbox and file is not None:
        columns = shutil.get_terminal_size().columns if file.isatty() else None
        with contextlib.suppress(OSError):  # of a full disk, or of a terminal that is gone
            file.write(banner(context, signals, deadline, columns))
            file.flush()


def _model(context: FitContext) -> str:
    given: Any = context.run.trainer.model
    named: Any = {"": given} if isinstance(given, nn.Module) else given
    parts: list[str] = []
    for name, whole in named.items():
        model = context.run.accelerator.strategy.whole_shapes(whole)
        count = sum(_count(parameter) for parameter in model.parameters())
        trained = sum(_count(parameter) for parameter in model.parameters() if parameter.requires_grad)
        of = "all trained" if trained == count else f"{_short(trained)} trained"
        parts.append(f"{name + ': ' if name else ''}{type(model).__name__}, {_short(count)} parameters, {of}")
    return "; ".join(parts)


def _devices(context: FitContext) -> str:
    accelerator = context.run.accelerator
    count = accelerator.num_processes
    how = "" if count == 1 else f" ({accelerator.distributed_type.value})"
    precision = {"no": "full precision"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    plural = "process" if count == 1 else "processes"
    return f"{count} {plural}{how} on {accelerator.device.type}, {precision}"


def _launcher() -> dict[str, str]:
    launcher = PartialState().launcher
    return {} if launcher is None else {"launcher": launcher}


def _mesh(context: FitContext) -> dict[str, str]:
    config = context.run.accelerator.parallelism_config
    return {} if config is None or not config.active_mesh_dims else {"mesh": config.describe()}


def _compilation(context: FitContext) -> dict[str, str]:
    plugin = context.run.accelerator.state.dynamo_plugin
    if not plugin.is_active:
        return {}
    backend = plugin.to_kwargs()["backend"]
    what = "repeated blocks" if plugin.use_regional_compilation else "the whole model"
    kept = ""
    if plugin.backend == DynamoBackend.INDUCTOR:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        kept = f", compiled code is kept in {cache_dir()} (TORCHINDUCTOR_CACHE_DIR)"
    return {"compilation": f"{what} by {getattr(backend, '__name__', backend)}{kept}"}


def _batch(context: FitContext) -> str:
    accelerator, of_round = context.run.accelerator, context.loader.total_batch_size
    steps, count = accelerator.gradient_accumulation_steps, accelerator.data_group.size
    if of_round is None:
        return f"batch size of the loader × {steps} accumulated"
    readers = "process" if accelerator.ranks_per_batch == 1 else "replica"
    plural = "" if count == 1 else {"process": "es", "replica": "s"}[readers]
    return (
        f"{of_round * steps} samples per update = {of_round // count} × {steps} accumulated × {count} {readers}{plural}"
    )


def _workers(context: FitContext) -> dict[str, str]:
    trainer, args = context.run.trainer, context.run.args
    size = args.train_batch_size_for(context.accelerator.data_group.size)
    chosen = trainer.parts.worker_counts.get((id(trainer.train_dataset), size))
    return {} if chosen is None else {"workers": f"{chosen.workers} by num_workers='auto': {chosen.reason}"}


def _length(context: FitContext) -> str:
    state, args = context.run.state, context.run.args
    parts = [f"{state.max_steps} steps" if state.max_steps is not None else "number of steps unknown"]
    if state.steps_per_epoch:
        parts.append(f"{state.steps_per_epoch} per epoch")
    if state.max_epochs is not None:
        parts.append(f"{state.max_epochs:g} epoch{'' if state.max_epochs == 1 else 's'}")
    if args.token_limit is not None:
        parts.append(f"at most {args.token_limit:,} tokens")
    if args.time_limit is not None:
        parts.append(f"at most {args.time_limit:g} s")
    if state.step:
        parts.append(f"resumed at step {state.step}")
    return ", ".join(parts)


def _optimizers(context: FitContext) -> str:
    parts: list[str] = []
    for name, optimizer in context.run.optimizers.items():
        rates = sorted({group["lr"] for group in optimizer.param_groups}, key=float)
        scheduler = context.run.schedulers.get(name)
        rate = "learning rate " + ", ".join(f"{float(value):g}" for value in rates)
        if scheduler is not None and moves_each_update(scheduler):
            first, peak, last = peak_first_last(scheduler, context.schedule_length)
            known = ((first, "first"), (None if peak in (first, last) else peak, "at most"), (last, "last"))
            rate = "learning rate " + ", ".join(f"{value:g} {word}" for value, word in known if value is not None)
        label = "" if name == "default" else f"{name}: "
        parts.append(f"{label}{optimizer.class_name}, {rate}")
    return "; ".join(parts) + _clipping(context)


def _clipping(context: FitContext) -> str:
    norm = context.run.args.max_grad_norm
    if norm is None:
        return ""
    unless = ", unless training_step steps the optimizer itself" if context.has_own_step else ""
    return f", gradients clipped to a norm of {norm:g}{unless}"


def _evaluation(context: FitContext) -> str:
    plan = context.evaluation
    if plan.interval is None:
        return "none"
    by_set = context.run.args.eval_intervals.items()
    sets = [f"{name} {'never' if every is None else f'every {_interval(every)}'}" for name, every in by_set]
    return f"{', '.join(sets) or f'every {_interval(plan.interval)}'}, best by {plan.best_metric}"


def _output(context: FitContext) -> str:
    if context.folder is None:
        return "none; set output_dir to save checkpoints"
    intervals = [context.run.args.save_interval]
    intervals += [callback.save_interval for callback in context.events]
    moments = list(dict.fromkeys(f"every {_interval(interval)}" for interval in intervals if interval is not None))
    if not moments and context.evaluation.interval is not None and any(map(_saves_the_best, context.events)):
        moments = ["at each best evaluation"]
    return f"{context.folder.path}, " + (f"a checkpoint {' and '.join(moments)}" if moments else "no checkpoints")


def _saves_the_best(callback: Callback) -> bool:
    return callback.saves_checkpoints and getattr(callback, "keep_best", 0) > 0


def _resume(context: FitContext) -> dict[str, str]:
    """Return what of a resumed run may differ from an uninterrupted one; workers start afresh with each epoch."""
    loader, state = context.loader, context.run.state
    is_within = state.steps_in_epoch or (state.step and loader.persistent_workers)
    if not is_within or not loader.may_draw_in_workers:
        return {}
    workers = f"num_workers={loader.num_workers}"
    return {
        "resume": f"exact, unless the dataset draws random numbers: in workers ({workers}) they differ from those "
        "without the interruption. seed_each_sample=True makes them equal"
    }


def _ends_early(signals: Signals, deadline: Deadline) -> str:
    parts = [f"on {', '.join(signals.caught)}"] if signals.caught else ["on no signal"]
    reasons = dict.fromkeys(signals.left.values())
    parts += [f"not on {_those(signals.left, reason)} ({reason})" for reason in reasons]
    if deadline.description is not None:
        parts.append(deadline.description)
    return ", ".join(parts)


def _those(left: dict[str, str], reason: str) -> str:
    return ", ".join(name for name, other in left.items() if other == reason)


def _interval(interval: Every) -> str:
    return str(interval).removeprefix("1 ")


def _count(parameter: Any) -> int:
    return parameter.numel()


def _short(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
