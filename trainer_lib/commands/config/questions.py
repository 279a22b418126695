"""The questions of `trainer-lib config`, and the configuration that their answers make."""

import math
from collections.abc import Callable
from typing import Any

from trainer_lib.commands.config.engine_questions import ENGINE, ENGINES, NO_ENGINE, engine_questions, fp8_questions
from trainer_lib.commands.config.questionnaire import Answers, Question
from trainer_lib.commands.config.sagemaker_questions import (
    sagemaker_answers,
    sagemaker_configuration,
    sagemaker_questions,
)
from trainer_lib.commands.config.setting_question import PLACE, is_on, note_of, only_on, question
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.settings.config_file import BaseConfig, ClusterConfig, SageMakerConfig
from trainer_lib.launchers.settings.config_reader import SECTIONS
from trainer_lib.launchers.settings.launch_options import SETTINGS
from trainer_lib.launchers.settings.setting import COUNT_OR_ZERO, FILLED, PRECISION, TEXT, YES_OR_NO, choice
from trainer_lib.options.accelerate_constants import FSDP2_STATE_DICT_TYPE, FSDP_AUTO_WRAP_POLICY
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.enums import ComputeEnvironment, DistributedType

_BACKENDS = choice("no", "inductor", "eager", "aot_eager", "cudagraphs")
_MODES = choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def questions(accelerators: int, device_type: str) -> list[Question]:
    """Return all questions for a machine.

    Args:
        accelerators: How many it has.
        device_type: Their type, such as "cuda".
    """
    here = [
        *_machines(),
        *_world(accelerators, device_type),
        *_compile(),
        *_fsdp(),
        *engine_questions(),
        *_parallelism(),
        *_processes(accelerators),
    ]
    place = question(
        PLACE, "Where do you train?", ComputeEnvironment.LOCAL_MACHINE.value, "On machines of your own, or SageMaker.",
        choice(*(place.value for place in ComputeEnvironment)),
    )  # fmt: skip
    return [
        place,
        *only_on(ComputeEnvironment.LOCAL_MACHINE, here),
        *only_on(ComputeEnvironment.AMAZON_SAGEMAKER, [*sagemaker_questions(), *_compile()]),
    ]


def _machines() -> list[Question]:
    def several(answers: Answers) -> bool:
        return answers["num_machines"] > 1

    return [
        question("num_machines", "How many machines?", 1, "You run the launcher on each of them."),
        question(
            "machine_rank", "Which of them is this, from 0?", 0, "Machine 0 is where the processes meet.",
            when=several, check=_check_rank,
        ),
        question(
            "main_process_ip", "The address of machine 0?", None, "An IP address or a name that all machines reach.",
            when=several,
        ),
        question(
            "main_process_port", "A free port of machine 0?", 29500, "All machines give the same one.",
            when=several, check=_check_port,
        ),
    ]  # fmt: skip


def _world(accelerators: int, device_type: str) -> list[Question]:
    found = (
        f"{accelerators} {device_type} device{'s' if accelerators > 1 else ''}" if accelerators else "no accelerator"
    )
    return [
        question(
            "use_cpu", f"Train on the CPU only? ({found} found)", not accelerators,
            "Yes starts processes on the CPU even if there are accelerators.", YES_OR_NO,
        ),
        question(
            "debug", "Check the shapes of collectives?", False,
            "Ranks that call a collective with different shapes get an error instead of a hang; slower.", YES_OR_NO,
        ),
        question(
            "mpirun_hostfile", "A hostfile for mpirun?", "", "An empty line: you run the launcher on each machine.",
            TEXT, when=lambda answers: answers["use_cpu"] and answers["num_machines"] > 1,
            note=note_of("mpirun_hostfile"),
        ),
    ]  # fmt: skip


def _compile() -> list[Question]:
    def compiles(answers: Answers) -> bool:
        return answers["dynamo_backend"] != "no"

    def check_mode(mode: str, answers: Answers) -> None:
        TorchDynamoPlugin(answers["dynamo_backend"], mode).check_backend()

    return [
        question(
            "dynamo_backend", "Compile models with torch.compile?", "no",
            "inductor makes them faster; eager and aot_eager help to find faults.", _BACKENDS,
        ),
        question(
            "dynamo_mode", "Which mode?", "default", "max-autotune compiles longer for faster code.", _MODES,
            when=compiles, check=check_mode,
        ),
        question(
            "dynamo_use_fullgraph", "Fail where a model is not one graph?", False,
            "Otherwise the parts of such a model are compiled one by one.", YES_OR_NO, when=compiles,
        ),
        question(
            "dynamo_use_dynamic", "Compile for inputs of any size?", False,
            "Otherwise torch decides at the second size.", YES_OR_NO, when=compiles,
        ),
        question(
            "dynamo_use_regional_compilation", "Compile only the blocks that a model repeats?", False,
            "It compiles one block once, which is faster to start.", YES_OR_NO, when=compiles,
        ),
    ]  # fmt: skip


def _uses_fsdp(answers: Answers) -> bool:
    return answers["use_fsdp"]


def _fsdp() -> list[Question]:
    def by_class(answers: Answers) -> bool:
        return answers["use_fsdp"] and answers["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"

    def by_size(answers: Answers) -> bool:
        return answers["use_fsdp"] and answers["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP"

    return [
        question(
            "use_fsdp", "Shard models with FSDP?", False,
            "Each process holds a part of each weight, its gradient and its optimizer state (FSDP2). No is DDP.",
            YES_OR_NO,
        ),
        question(
            "fsdp_reshard_after_forward", "Free the gathered weights of a block after its forward?", True,
            "Yes saves memory (FULL_SHARD); no saves communication (SHARD_GRAD_OP).", YES_OR_NO, when=_uses_fsdp,
        ),
        question(
            "fsdp_auto_wrap_policy", "Which modules are sharded separately?", "TRANSFORMER_BASED_WRAP",
            "Blocks by their class, modules by their size, or the model as one.", choice(*FSDP_AUTO_WRAP_POLICY),
            when=_uses_fsdp,
        ),
        question(
            "fsdp_transformer_layer_cls_to_wrap", "The classes of the blocks, with commas?", "",
            "Such as BertLayer; an empty line takes those that the model names (_no_split_modules), else its repeated "
            "blocks.", TEXT, when=by_class,
        ),
        question(
            "fsdp_min_num_params", "From how many parameters?", 100_000_000,
            "A module with as many is sharded separately.", COUNT_OR_ZERO, when=by_size,
        ),
        question(
            "fsdp_offload_params", "Keep shards and optimizer states in CPU memory?", False,
            "It saves device memory and is slow.", YES_OR_NO, when=_uses_fsdp,
        ),
        question(
            "fsdp_state_dict_type", "What does save_state write?", "SHARDED_STATE_DICT",
            "A file for each process, or all weights in one place.", choice(*FSDP2_STATE_DICT_TYPE), when=_uses_fsdp,
        ),
        question(
            "fsdp_cpu_ram_efficient_loading", "Read weights in the main process only?", True,
            "transformers then loads a model once a machine and not once a process.", YES_OR_NO, when=_uses_fsdp,
        ),
        question(
            "fsdp_activation_checkpointing", "Compute activations again instead of keeping them?", False,
            "It saves memory, and makes a step about a third slower.", YES_OR_NO, when=_uses_fsdp,
        ),
    ]  # fmt: skip


def _parallelism() -> list[Question]:
    def arranges(answers: Answers) -> bool:
        return answers.get("use_parallelism_config", False)

    def above_1(name: str) -> Callable[[Answers], bool]:
        return lambda answers: arranges(answers) and answers[name] > 1

    def size(kind: str, text: str, default: int = 1) -> Question:
        name = f"parallelism_config_{kind}_size"
        return question(
            name, text, default, "The product of the sizes is the number of processes.", when=arranges,
            note=note_of(name),
        )  # fmt: skip

    return [
        question(
            "use_parallelism_config", "Give the sizes of parallelism?", False,
            "For copies of a sharded model (HSDP), and tensor, context and sequence parallelism.", YES_OR_NO,
            when=_uses_fsdp,
        ),
        size("dp_replicate", "How many copies of the model?"),
        size("dp_shard", "How many processes share a copy?", 2),
        size("tp", "How many processes share a layer (tensor parallelism)?"),
        size("cp", "How many processes share a sequence (context parallelism)?"),
        question(
            "parallelism_config_cp_comm_strategy", "How do they exchange keys and values?", "allgather",
            "allgather: all at once; alltoall: in a ring.", choice("allgather", "alltoall"),
            when=above_1("parallelism_config_cp_size"),
        ),
        size("sp", "How many processes share a sequence by attention heads (Ulysses)?"),
        question(
            "parallelism_config_sp_seq_length", "How long are sequences?", "",
            "An empty line: it varies.", TEXT, when=above_1("parallelism_config_sp_size"),
        ),
        question(
            "parallelism_config_sp_attn_implementation", "Which attention?", "sdpa", "As transformers names it.",
            when=above_1("parallelism_config_sp_size"),
        ),
    ]  # fmt: skip


def _processes(accelerators: int) -> list[Question]:
    def number(answers: Answers) -> int:
        here = 1 if answers["use_cpu"] else max(1, accelerators)
        return _arranged(answers) or here * answers["num_machines"]

    def check_number(processes: int, answers: Answers) -> None:
        machines, arranged = answers["num_machines"], _arranged(answers)
        if processes % machines:
            raise ConfigurationError(f"  The answer must be a multiple of {machines}, the machines (got {processes}).")
        if arranged and processes != arranged:
            raise ConfigurationError(
                f"  The answer must be {arranged}, the product of the sizes (got {processes}). `back` changes them."
            )
        most = accelerators * machines
        if not answers["use_cpu"] and 0 < most < processes:
            raise ConfigurationError(
                f"  The answer must be at most {most}: each process needs a device (got {processes})."
            )

    def on_devices(answers: Answers) -> bool:
        return not answers["use_cpu"]

    return [
        question(
            "num_processes", "How many processes, on all machines?", number, "One a device, or any number on the CPU.",
            check=check_number,
        ),
        question(
            "gpu_ids", "Which devices of this machine, as 0,1?", "all", "all, or their numbers with commas.", FILLED,
            when=on_devices,
        ),
        question(
            "mixed_precision", "Which precision, if the script does not say it?", "no",
            "bf16 needs no loss scaling; no is fp32.", PRECISION,
        ),
        *fp8_questions(),
        question(
            "enable_cpu_affinity", "Bind each process to the cores near its GPU?", False,
            "For machines with several NUMA nodes, NVIDIA only.", YES_OR_NO, when=on_devices,
        ),
    ]  # fmt: skip


def configuration(answers: Answers, device_type: str) -> ClusterConfig | SageMakerConfig:
    """Return the configuration that the answers make.

    Args:
        answers: The answers by name.
        device_type: The type of the machine's accelerators, such as "cuda".
    """
    sections = _sections(answers)
    if is_on(ComputeEnvironment.AMAZON_SAGEMAKER, answers):
        return sagemaker_configuration(answers, sections["dynamo_config"])
    names = set(ClusterConfig.__dataclass_fields__) & set(answers) - set(sections) - {PLACE}
    parts = {section: part or None for section, part in sections.items()}
    values: dict[str, Any] = {name: answers[name] for name in names} | parts
    return ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=_kind_of_world(answers, device_type),
        **values,
    )


def _sections(answers: Answers) -> dict[str, dict[str, Any]]:
    """Return the answers that belong to a part of the file, by part; empty ones are left out."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, answer in answers.items():
        section = SETTINGS[name].section if name in SETTINGS else ""
        if section and answer != "":
            sections[section][name] = answer
    if answers.get("use_fsdp"):
        sections["fsdp_config"]["fsdp_version"] = 2
    if answers["dynamo_backend"] == "no":
        sections["dynamo_config"] = {}
    if not sections["deepspeed_config"].get("gradient_clipping", True):
        del sections["deepspeed_config"]["gradient_clipping"]
    if "parallelism_config_sp_seq_length" in sections["parallelism_config"]:
        sections["parallelism_config"]["parallelism_config_sp_seq_length_is_variable"] = False
    return sections


def answers_of(config: BaseConfig) -> dict[str, Any]:
    """Return the answers that lead to a configuration, to ask for them again."""
    if isinstance(config, SageMakerConfig):
        return sagemaker_answers(config)
    values = config.to_dict()
    answers = {name: value for name, value in values.items() if name not in SECTIONS}
    for section in SECTIONS:
        answers |= values.get(section, {})
    answers["use_fsdp"] = config.distributed_type == DistributedType.FSDP
    answers[ENGINE] = next((name for name, kind in ENGINES.items() if kind == config.distributed_type), NO_ENGINE)
    answers["use_parallelism_config"] = "parallelism_config" in values
    if not isinstance(answers.get("fsdp_reshard_after_forward", True), bool):
        del answers["fsdp_reshard_after_forward"]  # FSDP1's name of a strategy
    if "dynamo_backend" in answers:
        answers["dynamo_backend"] = answers["dynamo_backend"].lower()
    return answers


def _kind_of_world(answers: Answers, device_type: str) -> DistributedType:
    if answers["use_fsdp"]:
        return DistributedType.FSDP
    if answers.get(ENGINE, NO_ENGINE) != NO_ENGINE:
        return ENGINES[answers[ENGINE]]
    if answers["num_processes"] == 1:
        return DistributedType.NO
    return DistributedType.of_device("cpu" if answers["use_cpu"] else device_type)


def _arranged(answers: Answers) -> int:
    """Return the processes that the sizes of parallelism need; 0 if none were given."""
    if not answers.get("use_parallelism_config"):
        return 0
    return math.prod(
        answers[f"parallelism_config_{kind}_size"] for kind in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    )


def _check_rank(rank: int, answers: Answers) -> None:
    if rank >= answers["num_machines"]:
        raise ConfigurationError(f"  The answer must be less than {answers['num_machines']} (got {rank}).")


def _check_port(port: int, answers: Answers) -> None:
    del answers
    if not 0 < port < 65536:
        raise ConfigurationError(f"  The answer must be from 1 to 65535 (got {port}).")
