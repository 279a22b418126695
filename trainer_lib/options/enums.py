"""Enums of world types, precisions and random generators."""

from enum import Enum

from trainer_lib.options.base import BaseEnum


class DistributedType(BaseEnum):
    """The kinds of worlds: one process, or several ranks on a type of device or with a strategy."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # its name in older scripts
    MEGATRON_LM = "MEGATRON_LM"

    @classmethod
    def of_device(cls, device_type: str) -> "DistributedType":
        """Return the kind of a world of several ranks on a type of device."""
        if device_type == "cuda":
            return cls.MULTI_GPU
        if device_type == "xla":
            return cls.XLA
        name = f"MULTI_{device_type.upper()}"
        # A device type that torch knows and this enum does not counts as a GPU.
        return cls[name] if name in cls.__members__ else cls.MULTI_GPU


class PrecisionType(BaseEnum):
    """The number formats to train in."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"
    BF16_TRUE = "bf16-true"


class RNGType(BaseEnum):
    """The random number generators that can be synchronized across ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class DDPCommunicationHookType(BaseEnum):
    """The ways to compress gradients sent between ranks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(BaseEnum):
    """The backends of `torch.compile` with the names that Accelerate uses; torch may have others."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(BaseEnum):
    """The trackers with the names that Accelerate uses; this library has others too."""

    ALL = "all"
    AIM = "aim"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    DVCLIVE = "dvclive"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


class ComputeEnvironment(BaseEnum):
    """Where Accelerate's launcher starts processes."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(BaseEnum):
    """The kinds of worlds on SageMaker."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(BaseEnum):
    """The packages that train in fp8; this version does not run MS-AMP."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class CustomDtype(Enum):
    """Types of fewer than 8 bits, or of 8 that torch does not have, for the sizes of quantized models."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
