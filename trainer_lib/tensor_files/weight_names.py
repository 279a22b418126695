"""The names of files of model weights, as Hugging Face's libraries expect them."""

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"


def weights_stem(index: int = 0, safe: bool = True) -> str:
    """Return the stem of the files of a model's weights, by its index among the models of a training."""
    return (SAFE_MODEL_NAME if safe else MODEL_NAME) + (f"_{index}" if index else "")


def weights_ending(safe: bool = True) -> str:
    """Return the ending of files of weights."""
    return ".safetensors" if safe else ".bin"
