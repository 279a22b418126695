"""All settings of a launch: the options of `trainer-lib launch` and the keys of configuration files come from here."""

from typing import Any

from trainer_lib.foundation.public_names.missing_features import (
    MEGATRON_LM,
    TPU_CASTS,
    TPU_FUNCTIONS,
    TPU_PODS,
    MissingFeature,
)
from trainer_lib.launchers.settings.setting import (
    COUNT,
    COUNT_OR_ZERO,
    FILLED,
    NUMBER,
    NUMBER_OR_AUTO,
    PER_MACHINE,
    PRECISION,
    SECONDS,
    SWITCH,
    TEXT,
    THREE_YES_OR_NO,
    YES_NO_OR_NAME,
    YES_OR_NO,
    Kind,
    Setting,
    choice,
    whole_choice,
)
from trainer_lib.options.accelerate_constants import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from trainer_lib.options.megatron_lm.fields import REFUSED, explanation

# The topics of help, in the order in which help lists them, and what each is about.
GROUPS = {
    "processes": "processes",
    "training": "training, if the script does not set it",
    "compile": "torch.compile, if the script does not set it",
    "fp8": "fp8, if the script does not set it",
    "fsdp": "FSDP, if the script does not set it",
    "deepspeed": "DeepSpeed, if the script does not set it",
    "megatron_lm": "Megatron-LM's options, if the script does not set them",
    "parallelism": "parallelism (ParallelismConfig), if the script does not set it",
    "machines": "several machines",
    "mpi": "launch with mpirun",
    "aws": "launch on Amazon SageMaker, which a configuration file selects",
    "failures": "failures and output",
    "script": "the script",
}
MISSING_GROUPS = {
    "tpu": "options for TPUs, which this version refuses",
}


def _processes() -> list[Setting]:
    group = "processes"
    return [
        Setting(
            name="num_processes",
            group=group,
            kind=COUNT,
            help="processes on all machines (default: one per accelerator, else 1)",
        ),
        Setting(
            name="cpu",
            group=group,
            kind=SWITCH,
            help="train on the CPU even if there are accelerators",
            default=False,
            key="use_cpu",
            variable="ACCELERATE_USE_CPU",
        ),
        Setting(
            name="multi_gpu",
            group=group,
            kind=SWITCH,
            help="fail unless there are at least two accelerators",
            default=False,
            key=None,
        ),
        Setting(
            name="tpu",
            group=group,
            kind=SWITCH,
            help="train on TPUs with torch_xla; --num_processes is the number of chips",
            default=False,
            key=None,
        ),
        Setting(
            name="gpu_ids",
            group=group,
            kind=FILLED,
            help="the accelerators to use, such as 0,1",
            default="all",
        ),
        Setting(
            name="num_cpu_threads_per_process",
            group=group,
            kind=COUNT,
            help="CPU threads (default: OMP_NUM_THREADS, else cores / processes)",
            key=None,
            variable="OMP_NUM_THREADS",
        ),
        Setting(
            name="enable_cpu_affinity",
            group=group,
            kind=SWITCH,
            help="bind each process to the cores near its GPU (NVIDIA)",
            default=False,
            variable="ACCELERATE_CPU_AFFINITY",
        ),
    ]


def _training() -> list[Setting]:
    return [
        Setting(
            name="mixed_precision",
            group="training",
            kind=PRECISION,
            help="no, fp16, bf16, bf16-true or fp8",
            default="no",
            variable="ACCELERATE_MIXED_PRECISION",
        ),
        Setting(
            name="gradient_accumulation_steps",
            group="training",
            kind=COUNT,
            help="micro-batches per optimizer step",
            section="deepspeed_config",
            variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        ),
    ]


def _compile() -> list[Setting]:
    def dynamo(name: str, kind: Kind, help_text: str, default: object) -> Setting:
        return Setting(
            name=f"dynamo_{name}",
            group="compile",
            kind=kind,
            help=help_text,
            default=default,
            section="dynamo_config",
            variable=f"ACCELERATE_DYNAMO_{name.upper()}",
        )

    return [
        dynamo("backend", FILLED, "inductor; eager and others for debugging", "no"),
        dynamo("mode", FILLED, "default, reduce-overhead, max-autotune, …", "default"),
        dynamo("use_fullgraph", SWITCH, "fail if the model does not compile to one graph", False),
        dynamo("use_dynamic", SWITCH, "compile for inputs of any size", False),
        dynamo("use_regional_compilation", SWITCH, "compile the blocks that a model repeats", False),
    ]


def _fsdp() -> list[Setting]:
    # The defaults are those of Accelerate's launcher, which scripts count on; but FSDP2 is the only version here.
    def fsdp(name: str, kind: Kind, default: object, help_text: str, **more: Any) -> Setting:
        return Setting(
            name=f"fsdp_{name}",
            group="fsdp",
            kind=kind,
            help=help_text,
            default=default,
            section="fsdp_config",
            variable=more.get("variable", f"FSDP_{name.upper()}"),
            aliases=more.get("aliases", ()),
            old_keys=more.get("old_keys", ()),
        )

    strategies, states = ", ".join(FSDP_SHARDING_STRATEGY[:2]), choice(*FSDP_STATE_DICT_TYPE)
    return [
        Setting(
            name="use_fsdp",
            group="fsdp",
            kind=SWITCH,
            help="shard weights, gradients and optimizer states (FSDP2)",
            default=False,
            key=None,
            variable="ACCELERATE_USE_FSDP",
        ),
        fsdp("version", whole_choice(1, 2), 2, "1 and 2 both mean FSDP2"),
        fsdp("reshard_after_forward", YES_NO_OR_NAME, True, "free a block's gathered weights after its forward"),
        fsdp("sharding_strategy", FILLED, "FULL_SHARD", f"FSDP1's name for reshard_after_forward: {strategies}, …"),
        fsdp("auto_wrap_policy", choice(*FSDP_AUTO_WRAP_POLICY), None, "which modules are sharded separately"),
        fsdp(
            "transformer_layer_cls_to_wrap",
            FILLED,
            None,
            "block classes for TRANSFORMER_BASED_WRAP (default: those that the model names)",
            variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        ),
        fsdp(
            "min_num_params",
            COUNT_OR_ZERO,
            100_000_000,
            "SIZE_BASED_WRAP shards modules with at least this many parameters",
        ),
        fsdp("offload_params", YES_OR_NO, False, "keep shards and optimizer states in CPU memory"),
        fsdp("state_dict_type", states, None, "the format that save_state writes"),
        fsdp("cpu_ram_efficient_loading", YES_OR_NO, True, "read weights in the main process only"),
        fsdp(
            "activation_checkpointing",
            YES_OR_NO,
            False,
            "recompute activations in the backward instead of keeping them",
        ),
        fsdp("activation_checkpointing_offload", YES_OR_NO, False, "keep the inputs of blocks in CPU memory"),
        fsdp("ignored_modules", FILLED, None, "a pattern of names of modules that are not sharded"),
        fsdp("forward_prefetch", YES_OR_NO, False, "gather the next block's weights during a forward"),
        fsdp(
            "backward_prefetch",
            choice(*FSDP_BACKWARD_PREFETCH),
            None,
            "BACKWARD_PRE (default) gathers the next block's weights during a backward",
            aliases=("fsdp_backward_prefetch_policy",),
            old_keys=("fsdp_backward_prefetch_policy",),
        ),
        fsdp("use_orig_params", YES_OR_NO, True, "always yes in FSDP2"),
        fsdp("sync_module_states", YES_OR_NO, True, "start from the weights of the main process"),
    ]


def _parallelism() -> list[Setting]:
    def parallelism(
        name: str, kind: Kind, default: object, help_text: str, missing: MissingFeature | None = None
    ) -> Setting:
        return Setting(
            name=f"parallelism_config_{name}",
            group="parallelism",
            kind=kind,
            help=help_text,
            default=default,
            section="parallelism_config",
            variable=f"PARALLELISM_CONFIG_{name.upper()}",
            missing=missing,
        )

    return [
        Setting(
            name="use_parallelism_config",
            group="parallelism",
            kind=SWITCH,
            help="use the sizes below",
            default=False,
            key=None,
            variable="ACCELERATE_USE_PARALLELISM_CONFIG",
        ),
        parallelism("dp_replicate_size", COUNT, 1, "copies of the model"),
        parallelism("dp_shard_size", COUNT, 1, "processes that share a copy"),
        parallelism("tp_size", COUNT, 1, "processes that split each matrix"),
        parallelism("cp_size", COUNT, 1, "processes that hold parts of a sequence and exchange keys and values"),
        parallelism("cp_backend", choice("torch"), "torch", "the library of context parallelism"),
        parallelism(
            "cp_comm_strategy",
            choice("allgather", "alltoall", "ring"),
            "allgather",
            "gather keys and values, or pass them around a ring (which Accelerate calls alltoall)",
        ),
        parallelism("pp_size", COUNT, 1, "pipeline stages: processes that each hold some of the layers"),
        parallelism("sp_size", COUNT, 1, "processes that hold parts of a sequence and share out attention heads"),
        parallelism("sp_backend", choice("deepspeed"), "deepspeed", "Accelerate's name for it; it needs no DeepSpeed"),
        parallelism("sp_seq_length", FILLED, None, "the length of sequences; no effect here"),
        parallelism("sp_seq_length_is_variable", YES_OR_NO, True, "no effect: lengths may always vary"),
        parallelism(
            "sp_attn_implementation",
            choice("sdpa", "flash_attention_2", "flash_attention_3"),
            "sdpa",
            "no effect: attention is torch's",
        ),
    ]


def _machines() -> list[Setting]:
    group = "machines"
    return [
        Setting(
            name="num_machines",
            group=group,
            kind=COUNT,
            help="the number of machines; run the launcher on each",
            default=1,
            aliases=("nnodes", "num_nodes"),
        ),
        Setting(
            name="machine_rank",
            group=group,
            kind=COUNT_OR_ZERO,
            help="the rank of this machine, from 0",
            default=0,
            aliases=("node_rank",),
        ),
        Setting(
            name="main_process_ip",
            group=group,
            kind=FILLED,
            help="the address of machine 0",
            aliases=("master_addr",),
        ),
        Setting(
            name="main_process_port",
            group=group,
            kind=COUNT_OR_ZERO,
            help="a port of machine 0 (default: 29500; on one machine, a free one)",
            aliases=("master_port",),
        ),
        Setting(
            name="same_network",
            group=group,
            kind=SWITCH,
            help="no effect: machines meet at --main_process_ip on any network",
            default=False,
        ),
        Setting(
            name="rdzv_backend",
            group=group,
            kind=FILLED,
            help="static, c10d, etcd or etcd-v2",
            default="static",
        ),
        Setting(
            name="nproc_per_node",
            group=group,
            kind=PER_MACHINE,
            help="processes on each machine, or auto, gpu, cpu (torchrun's name)",
            key=None,
            aliases=("nproc", "num_gpus", "devices"),
        ),
        Setting(
            name="rdzv_endpoint",
            group=group,
            kind=FILLED,
            help="HOST:PORT, instead of the address and the port (torchrun's name)",
            key=None,
        ),
        Setting(
            name="rdzv_id",
            group=group,
            kind=FILLED,
            help="the name of the rendezvous (torchrun's name)",
            default="none",
            key=None,
        ),
        Setting(
            name="standalone",
            group=group,
            kind=SWITCH,
            help="launch on one machine, the default (torchrun's name)",
            default=False,
            key=None,
        ),
        Setting(
            name="rdzv_conf",
            group=group,
            kind=TEXT,
            help="options of the rendezvous backend, such as timeout=900,join_timeout=60",
            default="",
            key=None,
        ),
    ]


def _failures() -> list[Setting]:
    group = "failures"
    return [
        Setting(
            name="max_restarts",
            group=group,
            kind=COUNT_OR_ZERO,
            help="how often to restart all processes after a failure",
            default=0,
            key=None,
        ),
        Setting(
            name="monitor_interval",
            group=group,
            kind=SECONDS,
            help="seconds between two checks of the processes",
            default=0.1,
            key=None,
        ),
        Setting(
            name="shutdown_timeout",
            group=group,
            kind=SECONDS,
            help="seconds that processes get to save when a signal ends the launch",
            default=30.0,
            key=None,
        ),
        Setting(name="log_dir", group=group, kind=FILLED, help="the folder in which --tee writes", key=None),
        Setting(
            name="tee",
            group=group,
            kind=FILLED,
            help="write to files too: 1 output, 2 errors, 3 both; or as in 0:3,1:2",
            default="0",
            key=None,
            short="t",
        ),
        Setting(
            name="role",
            group=group,
            kind=FILLED,
            help="the name of the processes in the lines of --tee",
            default="default",
            key=None,
        ),
        Setting(
            name="debug",
            group=group,
            kind=SWITCH,
            help="check the shapes of tensors in collectives, and show torch's own messages",
            default=False,
            variable="ACCELERATE_DEBUG_MODE",
        ),
        Setting(
            name="quiet",
            group=group,
            kind=SWITCH,
            help="print no report of a failure; the script's own errors still appear",
            default=False,
            key=None,
            short="q",
        ),
    ]


def _script() -> list[Setting]:
    group = "script"
    return [
        Setting(
            name="module",
            group=group,
            kind=SWITCH,
            help="SCRIPT is a module, as in python -m",
            default=False,
            key=None,
            short="m",
        ),
        Setting(
            name="no_python",
            group=group,
            kind=SWITCH,
            help="SCRIPT is a program to run without Python",
            default=False,
            key=None,
        ),
        Setting(
            name="config_file",
            group=group,
            kind=FILLED,
            help="the configuration file; options override it (default: the one `trainer-lib config` wrote)",
            key=None,
        ),
        Setting(
            name="print_config",
            group=group,
            kind=SWITCH,
            help="print each setting and its source, and start nothing",
            default=False,
            key=None,
        ),
        Setting(
            name="dry_run",
            group=group,
            kind=SWITCH,
            help="print the command and the variables of the processes, and start nothing",
            default=False,
            key=None,
        ),
    ]


def _deepspeed() -> list[Setting]:
    group, section = "deepspeed", "deepspeed_config"

    def zero(name: str, kind: Kind, help_text: str, variable: str = "") -> Setting:
        variable = variable or f"ACCELERATE_DEEPSPEED_{name.upper()}"
        return Setting(name=name, group=group, kind=kind, help=help_text, section=section, variable=variable)

    def of_machines(name: str, help_text: str) -> Setting:
        return Setting(name=name, group=group, kind=FILLED, help=help_text, section=section)

    device = choice("none", "cpu", "nvme")
    return [
        Setting(
            name="use_deepspeed",
            group=group,
            kind=SWITCH,
            help="train with DeepSpeed's ZeRO",
            default=False,
            key=None,
            variable="ACCELERATE_USE_DEEPSPEED",
        ),
        zero(
            "deepspeed_config_file", FILLED, "DeepSpeed's JSON file; the options below fill its \"auto\" values",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        ),
        zero("zero_stage", whole_choice(0, 1, 2, 3), "shard optimizer states (1), gradients (2), weights (3); 0: DDP"),
        zero("offload_optimizer_device", device, "where optimizer states are kept"),
        zero("offload_param_device", device, "where weights are kept"),
        zero("offload_optimizer_nvme_path", FILLED, "the folder for nvme"),
        zero("offload_param_nvme_path", FILLED, "the folder for nvme"),
        zero("gradient_clipping", NUMBER_OR_AUTO, "the largest norm of the gradients", "ACCELERATE_GRADIENT_CLIPPING"),
        zero("zero3_init_flag", YES_OR_NO, "shard models of transformers while they are built",
             "ACCELERATE_DEEPSPEED_ZERO3_INIT"),
        zero("zero3_save_16bit_model", YES_OR_NO, "no effect: save_model() always gathers weights"),
        zero("deepspeed_moe_layer_cls_names", FILLED, "classes of mixture-of-experts layers, separated by commas",
             "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
        Setting(
            name="deepspeed_multinode_launcher",
            group=group,
            kind=choice(*DEEPSPEED_MULTINODE_LAUNCHERS),
            help="pdsh (default): start the machines of the hostfile from here; standard: run the launcher on each",
            section=section,
        ),
        of_machines("deepspeed_hostfile", "a file with a line for each machine: NAME slots=N"),
        of_machines("deepspeed_exclusion_filter", "machines and devices to leave out: NAME@NAME:0,2"),
        of_machines("deepspeed_inclusion_filter", "the only machines and devices to use, in the same form"),
    ]  # fmt: skip


def _megatron_lm() -> list[Setting]:
    counts = (
        "tp_degree", "pp_degree", "num_micro_batches", "decoder_last_pipeline_num_layers", "recompute_num_layers",
        "expert_model_parallel_size", "context_parallel_size", "expert_tensor_parallel_size",
    )  # fmt: skip
    flags = (
        "use_custom_fsdp", "no_load_optim", "eod_mask_loss", "overlap_cpu_optimizer_d2h_h2d", "no_save_optim",
        "optimizer_cpu_offload", "use_precision_aware_optimizer", "sequence_parallelism", "recompute_activations",
        "use_distributed_optimizer", "attention_softmax_in_fp32", "calculate_per_token_loss",
        "use_rotary_position_embeddings",
    )  # fmt: skip
    numbers = ("gradient_clipping", "attention_dropout", "hidden_dropout")
    texts = ("recompute_granularity", "recompute_method", "attention_backend")
    kinds = {
        **dict.fromkeys(counts, COUNT),
        **dict.fromkeys(flags, YES_OR_NO),
        **dict.fromkeys(numbers, NUMBER),
        **dict.fromkeys(texts, FILLED),
    }
    use = Setting(
        name="use_megatron_lm",
        group="megatron_lm",
        kind=SWITCH,
        help="train with Megatron-LM's options, which become those of this library",
        default=False,
        key=None,
        variable="ACCELERATE_USE_MEGATRON_LM",
    )
    return [
        use,
        *(
            Setting(
                name=f"megatron_lm_{name}",
                group="megatron_lm",
                kind=kind,
                help=explanation(name),
                section="megatron_lm_config",
                variable=f"MEGATRON_LM_{name.upper()}",
                default=False if kind is YES_OR_NO and name in REFUSED else None,  # what files of Accelerate hold
                missing=MEGATRON_LM if name in REFUSED else None,
            )
            for name, kind in kinds.items()
        ),
    ]


def _fp8() -> list[Setting]:
    old_keys = {
        "amax_history_len": ("fp8_amax_history_length",),
        "amax_compute_algo": ("fp8_amax_compute_algorithm",),
        "opt_level": ("fp8_optimization_level",),
    }
    kinds: dict[str, tuple[Kind, Any, str]] = {
        "backend": (
            choice("ao", "te", "msamp"),
            None,
            "ao: torchao, te: Transformer Engine (default: the one that is installed)",
        ),
        "use_autocast_during_eval": (SWITCH, False, "te: compute in fp8 in evaluation too"),
        "margin": (COUNT_OR_ZERO, 0, "te: the margin of the scaling factors"),
        "interval": (COUNT, 1, "te: steps between two computations of the scaling factors"),
        "format": (choice("HYBRID", "E4M3", "E5M2"), "HYBRID", "te: the format"),
        "amax_history_len": (COUNT, 1024, "te: over how many steps the largest values of a tensor are kept"),
        "amax_compute_algo": (
            choice("max", "most_recent"),
            "most_recent",
            "te: which of these values sets the scaling factor",
        ),
        "override_linear_precision": (
            THREE_YES_OR_NO,
            None,
            "te: three flags: forward, gradients of inputs, gradients of weights in higher precision",
        ),
        "opt_level": (choice("O1", "O2"), None, "for msamp, which is not supported"),
        "enable_fsdp_float8_all_gather": (YES_OR_NO, None, "ao: FSDP gathers weights in fp8"),
        "pad_inner_dim": (YES_OR_NO, True, "ao: pad matrices to sizes that fp8 needs"),
    }
    return [
        Setting(
            name=f"fp8_{name}",
            group="fp8",
            kind=kind,
            help=text,
            default=default,
            section="fp8_config",
            old_keys=old_keys.get(name, ()),
            variable=f"ACCELERATE_FP8_{name.upper()}",
        )
        for name, (kind, default, text) in kinds.items()
    ]


def _elsewhere() -> list[Setting]:
    pods: dict[str, Kind] = {
        "tpu_cluster": SWITCH,
        "no_tpu_cluster": SWITCH,
        "vm": FILLED,
        "env": FILLED,
    }
    return [
        *[
            Setting(
                name=name,
                group="tpu",
                kind=kind,
                help="",
                default=name == "no_tpu_cluster",
                key=None,
                missing=TPU_PODS,
            )
            for name, kind in pods.items()
        ],
        Setting(name="tpu_use_sudo", group="tpu", kind=SWITCH, help="", default=False, missing=TPU_PODS),
        Setting(name="downcast_bf16", group="tpu", kind=SWITCH, help="", default=False, missing=TPU_CASTS),
        Setting(
            name="main_training_function",
            group="tpu",
            kind=FILLED,
            help="",
            default="main",
            missing=TPU_FUNCTIONS,
        ),
    ]


def _sagemaker() -> list[Setting]:
    texts = {
        "aws_access_key_id": "the access key of an account (default: the file's profile, else what boto3 finds)",
        "aws_secret_access_key": "its secret key; the variable AWS_SECRET_ACCESS_KEY keeps it out of process lists",
    }
    return [Setting(name=name, group="aws", kind=FILLED, help=text, key=None) for name, text in texts.items()]


def _mpi() -> list[Setting]:
    group, section = "mpi", "mpirun_config"
    return [
        Setting(
            name="mpirun_hostfile",
            group=group,
            kind=FILLED,
            help="start the processes with mpirun, on the machines in this file",
            section=section,
        ),
        Setting(
            name="mpirun_ccl",
            group=group,
            kind=FILLED,  # files hold it as text
            help="with mpirun: the worker threads of oneCCL in each process",
            section=section,
        ),
    ]


# Options of older versions of Accelerate, which nothing replaces.
NOT_NEEDED = {
    "ipex": "This version does not use IPEX: leave it out.",
    "mps": "MPS is used where it is available: leave it out.",
    "use_mps_device": "MPS is used where it is available: leave it out.",
    "use_xpu": "XPUs are used where they are available: leave it out.",
}

SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for settings in (
        _processes(), _training(), _compile(), _fsdp(), _parallelism(), _machines(), _failures(), _script(),
        _deepspeed(), _megatron_lm(), _fp8(), _elsewhere(), _mpi(),
        _sagemaker(),
    )
    for setting in settings
}  # fmt: skip
