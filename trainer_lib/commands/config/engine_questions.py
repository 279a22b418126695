"""Questions about other engines and fp8: DeepSpeed, Megatron-LM, Transformer Engine, MS-AMP and torchao."""

from collections.abc import Callable

from trainer_lib.commands.config.questionnaire import Answers, Question
from trainer_lib.commands.config.setting_question import note_of, question
from trainer_lib.launchers.settings.setting import FILLED, NUMBER, TEXT, YES_OR_NO, choice
from trainer_lib.options.accelerate_constants import DEEPSPEED_MULTINODE_LAUNCHERS
from trainer_lib.options.enums import DistributedType

ENGINE = "engine"
NO_ENGINE = "none"
ENGINES = {"deepspeed": DistributedType.DEEPSPEED, "megatron_lm": DistributedType.MEGATRON_LM}


def engine_questions() -> list[Question]:
    """Return the questions about DeepSpeed and Megatron-LM."""
    names = (NO_ENGINE, *ENGINES)
    first = question(
        ENGINE, "Which other engine?", NO_ENGINE, "DeepSpeed's ZeRO, or options of Megatron-LM.",
        choice(*names), when=lambda answers: not answers["use_fsdp"],
    )  # fmt: skip
    return [first, *_deepspeed(), *_megatron_lm()]


def fp8_questions() -> list[Question]:
    """Return the questions about fp8."""

    def uses(answers: Answers) -> bool:
        return answers["mixed_precision"] == "fp8"

    def on(backend: str, name: str, text: str, default: object, help_text: str) -> Question:
        return question(
            name, text, default, help_text, when=lambda answers: uses(answers) and answers["fp8_backend"] == backend
        )

    return [
        question(
            "fp8_backend", "Which library computes in fp8?", "te", "Transformer Engine, torchao or MS-AMP.",
            when=uses, note=note_of("fp8_backend"),
        ),
        on("te", "fp8_use_autocast_during_eval", "Use fp8 in evaluation too?", False, "It is less exact."),
        on("te", "fp8_margin", "Which margin of the scaling factors?", 0, "Bits of head room."),
        on("te", "fp8_interval", "Compute scaling factors every how many steps?", 1, "1 is the most exact."),
        on("te", "fp8_format", "Which format?", "HYBRID", "HYBRID: E4M3 in the forward, E5M2 in the backward."),
        on("te", "fp8_amax_history_len", "From how many steps does the largest value count?", 1024, "Of each tensor."),
        on("te", "fp8_amax_compute_algo", "Which of them?", "most_recent", "The largest, or the last one."),
        on("te", "fp8_override_linear_precision", "Compute which products in higher precision?", [False, False, False],
           "Those of the forward, of the gradients of inputs, and of weights: three of yes or no, as no,no,yes."),
        on("msamp", "fp8_opt_level", "Which level of optimization?", "O2", "O2 keeps optimizer states in fp8 too."),
        on("ao", "fp8_enable_fsdp_float8_all_gather", "Gather weights in fp8 under FSDP?", True, "It sends half."),
        on("ao", "fp8_pad_inner_dim", "Pad matrices to a multiple of 16?", True, "fp8 needs such sizes."),
    ]  # fmt: skip


def _deepspeed() -> list[Question]:
    def uses(answers: Answers) -> bool:
        return answers.get(ENGINE) == "deepspeed"

    def has_stages(answers: Answers) -> bool:
        return uses(answers) and not answers["deepspeed_config_file"]

    def offloads(answers: Answers) -> bool:
        return has_stages(answers) and answers["zero_stage"] >= 2

    def is_third(answers: Answers) -> bool:
        return has_stages(answers) and answers["zero_stage"] == 3

    def on_nvme(kind: str) -> Question:
        device = f"offload_{kind}_device"
        return question(
            f"offload_{kind}_nvme_path", "In which folder of the NVMe disk?", None, "A local disk of each machine.",
            when=lambda answers: offloads(answers) and answers[device] == "nvme",
        )  # fmt: skip

    def on_machines(answers: Answers) -> bool:
        return uses(answers) and answers["num_machines"] > 1

    return [
        question(
            "deepspeed_config_file", "A JSON file of DeepSpeed's?", "", "An empty line: the questions that follow.",
            TEXT, when=uses, note=note_of("use_deepspeed"),
        ),
        question("zero_stage", "Which ZeRO stage?", 2, "1 shards optimizer states, 2 gradients, 3 weights too.",
                 when=has_stages),
        question("offload_optimizer_device", "Where to keep optimizer states?", "none", "none: on the device.",
                 when=offloads),
        on_nvme("optimizer"),
        question("offload_param_device", "Where to keep weights?", "none", "none: on the device.", when=offloads),
        on_nvme("param"),
        question(
            "gradient_accumulation_steps", "How many micro-batches has an optimizer step?", 1,
            "The script has to say the same.", when=has_stages,
        ),
        question(
            "gradient_clipping", "Clip gradients to which norm (0: none)?", 0.0, "The script has to say the same.",
            when=has_stages,
        ),
        question("zero3_init_flag", "Make models sharded at once (zero.Init)?", False, "For very large models.",
                 YES_OR_NO, when=is_third),
        question("zero3_save_16bit_model", "Save whole 16-bit weights?", False, "They are gathered at each save.",
                 YES_OR_NO, when=is_third),
        question("deepspeed_moe_layer_cls_names", "The classes of mixture-of-experts layers, with commas?", "",
                 "An empty line: the model has none.", TEXT, when=is_third),
        question("deepspeed_multinode_launcher", "Which launcher for several machines?", "standard",
                 "standard: run it on each machine; pdsh: start all from one. Only Accelerate runs slurm and mvapich.",
                 choice(*DEEPSPEED_MULTINODE_LAUNCHERS), when=on_machines),
        question("deepspeed_hostfile", "The hostfile?", None, "A line for each machine, as `host slots=8`.", FILLED,
                 when=lambda answers: on_machines(answers) and answers["deepspeed_multinode_launcher"] != "standard"),
    ]  # fmt: skip


def _megatron_lm() -> list[Question]:
    def uses(answers: Answers) -> bool:
        return answers.get(ENGINE) == "megatron_lm"

    def above_1(name: str) -> Callable[[Answers], bool]:
        return lambda answers: uses(answers) and answers[name] > 1

    return [
        question("megatron_lm_tp_degree", "How many processes share a layer (tensor parallelism)?", 1,
                 "At most the devices of a machine.", when=uses),
        question("megatron_lm_sequence_parallelism", "Split the sequence between them too?", True,
                 "It saves activations.", when=above_1("megatron_lm_tp_degree")),
        question("megatron_lm_pp_degree", "How many pipeline stages?", 1, "Each holds a part of the layers.",
                 when=uses),
        question("megatron_lm_num_micro_batches", "How many micro-batches pass through the pipeline?", 1,
                 "More of them keep stages busy.", when=above_1("megatron_lm_pp_degree")),
        question("megatron_lm_recompute_activations", "Compute activations again instead of keeping them?", True,
                 "Selectively: those that are large and quick to compute.", when=uses),
        question("megatron_lm_use_distributed_optimizer", "Shard optimizer states over data parallel ranks?", True,
                 "As ZeRO-1 does.", when=uses),
        question("megatron_lm_gradient_clipping", "Clip gradients to which norm (0: none)?", 1.0,
                 "By the norm of all gradients.", NUMBER, when=uses),
    ]  # fmt: skip
