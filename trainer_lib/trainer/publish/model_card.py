"""Model cards for the Hub: the model, its training and its metrics."""

import dataclasses
import math
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.imports import imported_versions
from trainer_lib.modules.unwrapping import without_adapter
from trainer_lib.tracking.secrets import masked
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.defaults import prepare_models
from trainer_lib.trainer.evaluation.eval_sets import named_sets
from trainer_lib.trainer.trainer_interface import TrainerInterface

_PACKAGES = ("torch", "transformers", "datasets", "peft", "accelerate", "safetensors")
# Arguments that describe the machine more than the model.
_OF_THE_MACHINE = frozenset(
    {
        *("output_dir", "run_name", "resume", "report_to", "progress_bar", "deadline", "stop_signals", "hang_timeout"),
        *("use_cpu", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers"),
    }
)

_EVALUATIONS = 20  # rows in the table; of more evaluations, it shows some spread over the run
# Tasks by the suffix of a transformers model's class.
_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "image-segmentation",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
}
# The names that the Hub allows for repositories and models.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_card(
    trainer: TrainerInterface,
    *,
    name: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    base_model: str | None = None,
    datasets: str | Sequence[str] | None = None,
    task: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """Return the model card of a trainer; see `Trainer.model_card`."""
    bare: dict[str, nn.Module] = {
        key: trainer.accelerator.unwrap_model(model) for key, model in prepare_models(trainer).named.items()
    }
    first = next(iter(bare.values()))
    known = [datasets] if isinstance(datasets, str) else list(datasets or _datasets_of(trainer))
    base_model = base_model or _base_of(first)
    task = task or next((task for end, task in _TASKS.items() if _inner_name(first).endswith(end)), None)
    name = name or (base_model.rpartition("/")[2] + "-trained" if base_model else type(first).__name__)
    metrics = _metrics(trainer)
    head: dict[str, Any] = {
        "library_name": _library_of(first),
        "license": license,
        "language": language if isinstance(language, str) or language is None else list(language),
        "base_model": base_model,
        "datasets": known or None,
        "pipeline_tag": task,
        "tags": list(dict.fromkeys(["trainer_lib", *tags])),
        "metrics": list(dict.fromkeys(metric for _, metric, _ in _results(trainer, metrics))) or None,
        "model-index": _index(trainer, name, task, known, metrics),
    }
    head = {key: value for key, value in head.items() if value is not None}
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n",
        f"# {name}\n",
        _summary(trainer, bare, base_model, known),
        _figures(trainer, metrics),
        _evaluations(trainer),
        _arguments(trainer),
        _versions(),
    ]
    return "\n".join(part for part in parts if part)


# -- the model and its data -------------------------------------------------------------------------------------------


def _library_of(model: nn.Module) -> str:
    for kind in type(model).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in ("peft", "transformers", "timm", "sentence_transformers"):
            return package.replace("_", "-")
    return "trainer_lib"


def _base_of(model: Any) -> str | None:
    """Return the name of the base model on the Hub, if the model records it."""
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        given = getattr(next(iter(adapters.values())), "base_model_name_or_path", None)
    else:
        given = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(given, str) or not _HUB_NAME.fullmatch(given):
        return None
    is_here = given.startswith(".") or Path(given).exists()  # a local path, which is meaningless elsewhere
    return None if is_here else given


def _inner_name(model: Any) -> str:
    return type(without_adapter(model)).__name__


def _datasets_of(trainer: TrainerInterface) -> list[str]:
    """Return the Hub names of the training data, if the dataset records them."""
    info = getattr(trainer.train_dataset, "info", None)
    given = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
    # Builders that read files have the names of formats.
    formats = ("arrow", "audiofolder", "csv", "generator", "imagefolder", "json", "pandas", "parquet", "sql", "text")
    return [given] if isinstance(given, str) and given not in formats else []


# -- figures ----------------------------------------------------------------------------------------------------------


def _metrics(trainer: TrainerInterface) -> dict[str, float]:
    """Return the metrics of the model's weights: the last ones, or those of the best checkpoint if it was loaded."""
    state = trainer.run.state
    if not (trainer.args.load_best_at_end and state.best is not None and state.has_ended):
        return dict(trainer.run.metrics)
    of_best = [entry for entry in state.history if entry["step"] == state.best.step and state.best.metric in entry]
    return {key: value for key, value in of_best[-1].items() if key.startswith("eval_")} if of_best else {}


def _results(trainer: TrainerInterface, metrics: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """Return all metrics except losses: the set, the metric, the value."""
    sets = [] if trainer.eval_dataset is None else [name for name in named_sets(trainer, trainer.eval_dataset) if name]
    results: list[tuple[str, str, float]] = []
    for key, value in metrics.items():
        given = key.partition("_")[2]
        of_set = next((set_name for set_name in sets if given.startswith(f"{set_name}_")), "")
        metric = given.removeprefix(f"{of_set}_") if of_set else given
        if metric not in ("loss", "left_out") and math.isfinite(value):
            results.append((of_set, metric, float(value)))
    return results


def _index(
    trainer: TrainerInterface, name: str, task: str | None, datasets: Sequence[str], metrics: Mapping[str, float]
) -> list[dict[str, Any]] | None:
    """Return the results in the Hub's format, which needs the task and the dataset."""
    results = _results(trainer, metrics)
    if task is None or not datasets or not results:
        return None
    sets: dict[str, list[tuple[str, float]]] = {}
    for of_set, metric, value in results:
        sets.setdefault(of_set, []).append((metric, value))
    entries: list[dict[str, Any]] = [
        {
            "task": {"type": task},
            "dataset": {
                "name": datasets[0].rpartition("/")[2],
                "type": datasets[0],
                **({"split": of_set} if of_set else {}),
            },
            "metrics": [{"type": metric, "name": metric, "value": value} for metric, value in found],
        }
        for of_set, found in sets.items()
    ]
    return [{"name": name, "results": entries}]


# -- the text ---------------------------------------------------------------------------------------------------------


def _summary(
    trainer: TrainerInterface, models: Mapping[str, nn.Module], base_model: str | None, datasets: Sequence[str]
) -> str:
    kinds = " and ".join(
        f"`{type(model).__name__}` of {sum(parameter.numel() for parameter in model.parameters()):,} parameters"
        for model in models.values()
    )
    base = "" if base_model is None else f", from [{base_model}](https://huggingface.co/{base_model})"
    data = f" on {', '.join(datasets)}" if datasets else ""
    state = trainer.run.state
    if state.status == "new":
        return f"A {kinds}{base}.\n"
    end = "" if state.reason is None else f" It ended early: {state.reason}."
    return (
        f"A {kinds}{base}, trained{data} with trainer_lib: {state.step:,} updates of {state.samples:,} samples in "
        f"{state.epochs:.4g} epoch{'' if state.epochs == 1 else 's'}, {_duration(state.seconds)} "
        f"on {_devices(trainer)}.{end}\n"
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _devices(trainer: TrainerInterface) -> str:
    accelerator = trainer.accelerator
    plural = "process" if accelerator.num_processes == 1 else "processes"
    precision = {"no": "full precision"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    return f"{accelerator.num_processes} {plural} ({accelerator.device.type}, {precision})"


def _figures(trainer: TrainerInterface, metrics: Mapping[str, float]) -> str:
    losses = [entry["loss"] for entry in trainer.run.state.history if "loss" in entry]
    rows = {**({"training loss": losses[-1]} if losses else {}), **metrics}
    if not rows:
        return ""
    return "## Results\n\n" + _table(["metric", "value"], [[key, _number(value)] for key, value in rows.items()])


def _evaluations(trainer: TrainerInterface) -> str:
    found = [entry for entry in trainer.run.state.history if any(key.startswith("eval_") for key in entry)]
    if len(found) < 2:
        return ""
    if len(found) > _EVALUATIONS:
        found = [found[round(i * (len(found) - 1) / (_EVALUATIONS - 1))] for i in range(_EVALUATIONS)]
    names = list(dict.fromkeys(key for entry in found for key in entry if key.startswith("eval_")))
    rows = [
        [str(entry["step"]), f"{entry['epoch']:.4g}", *(_number(entry.get(name)) for name in names)] for entry in found
    ]
    return "## Evaluations\n\n" + _table(["step", "epoch", *names], rows)


def _arguments(trainer: TrainerInterface) -> str:
    args = trainer.args
    usual = TrainingArguments().to_dict()
    given = masked(args.to_dict(unwritable="leave out"))
    said = {
        key: value
        for key, value in given.items()
        if key not in _OF_THE_MACHINE and (key not in usual or value != usual[key])  # one of a subclass of the user's
    }
    # Arguments that most readers look for are always shown.
    always = ("per_device_train_batch_size", "learning_rate", "optimizer", "lr_scheduler", "seed")
    settings = {
        key: given[key] for key in (field.name for field in dataclasses.fields(args)) if key in said or key in always
    }
    return f"## Training\n\n```yaml\n{yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)}```\n"


def _versions() -> str:
    own = sys.modules["trainer_lib"].__version__  # above everything, so that no import from here may name it
    versions = {"Python": platform.python_version(), "trainer_lib": own}
    versions |= imported_versions(_PACKAGES)
    return "## Versions\n\n" + "\n".join(f"- {name} {version}" for name, version in versions.items()) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, (int, float)) else str(value)


def check_repository(name: str) -> None:
    """Check the name of a repository: `name`, or `owner/name`.

    Raises:
        ConfigurationError: If the name is not valid.
    """
    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f'repo_id={name!r} is not the name of a repository. Give "owner/name", or "name" of yours.'
        )
