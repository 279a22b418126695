"""Tests of logged values: copied at the time of the log, made plain and flat, with secrets masked."""

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.tracking.delivery.entries import Entry, from_line, to_line
from trainer_lib.tracking.delivery.images import plain_images
from trainer_lib.tracking.delivery.plain_values import plain_metrics, plain_settings, snapshot
from trainer_lib.tracking.secrets import is_secret, masked
from trainer_lib.tracking.table import table_of


def test_plain_metrics_are_numbers_by_flat_names() -> None:
    values = {
        "float": 0.5,
        "int": 3,
        "bool": True,
        "tensor": torch.tensor(2.5),
        "one": torch.tensor([[4]]),
        "numpy": np.float32(0.25),
        "array": np.array([7]),
        "nested": {"deep": {"loss": torch.tensor(True)}},
        "text": "warm-up",
    }
    good, refused = plain_metrics(values)
    assert good == {
        "float": 0.5,
        "int": 3,
        "bool": 1,
        "tensor": 2.5,
        "one": 4,
        "numpy": 0.25,
        "array": 7,
        "nested/deep/loss": 1,
        "text": "warm-up",
    }
    assert {type(value) for value in good.values()} == {int, float, str}
    assert refused == {}


def test_unsupported_values_are_refused_by_name() -> None:
    values: dict[str, Any] = {"logits": torch.ones(2, 3), "array": np.ones(4), "list": [1.0], "none": None, "text": "t"}
    good, refused = plain_metrics(values, takes_texts=False)
    assert good == {}
    assert refused == {
        "logits": "a Tensor of shape (2, 3)",
        "array": "a ndarray of shape (4,)",
        "list": "a list",
        "none": "None",
        "text": "a str",
    }


def test_a_value_that_cannot_be_read_leaves_the_others_alone() -> None:
    values = snapshot({"loss": 0.5, "empty": torch.zeros((), device="meta")})
    assert plain_metrics(values) == (
        {"loss": 0.5},
        {"empty": "a Tensor of shape () that cannot be read (RuntimeError)"},
    )


def test_tensors_of_devices_without_events_are_copied() -> None:
    with FakeTensorMode():
        loss = torch.ones((), device="xla")
        copied = snapshot({"loss": loss})["loss"]
    assert copied.device.type == "xla"
    assert copied is not loss


def test_kept_values_are_those_of_the_call() -> None:
    total, array, inside = torch.zeros(()), np.zeros(1), {"a": torch.zeros(())}
    values = snapshot({"total": total, "array": array, "inside": inside, "number": 1.5})
    total += 1
    array += 1
    inside["a"] += 1
    assert plain_metrics(values)[0] == {"total": 0.0, "array": 0.0, "inside/a": 0.0, "number": 1.5}


def test_tensors_of_other_devices_are_read_later() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        pytest.skip("there is no device besides the CPU")
    loss = torch.full((), 2.0, device=device)
    values = snapshot({"loss": loss})
    loss += 1
    assert plain_metrics(values)[0] == {"loss": 2.0}


@dataclasses.dataclass
class Settings:
    folder: Path
    kind: Enum
    hub_token: str
    inner: Any = None


class Kind(Enum):
    FIRST = "first"


def test_settings_are_plain_and_without_secrets() -> None:
    settings = Settings(Path("runs"), Kind.FIRST, "hf_abc", {"steps": {1}, "object": int, "array": np.int64(3)})
    assert masked(plain_settings(settings)) == {
        "folder": "runs",
        "kind": "first",
        "hub_token": "***",
        "inner": {"steps": [1], "object": "<class 'int'>", "array": 3},
    }


def test_integers_that_encoders_of_json_refuse_are_changed() -> None:
    assert plain_settings({"seed": 2**64 - 1, "large": [2**64], "low": -(2**63) - 1}) == {
        "seed": 2**64 - 1,
        "large": ["18446744073709551616"],
        "low": "-9223372036854775809",
    }
    large = plain_metrics({"fits": 2**64 - 1, "large": 2**64, "largest": 10**400, "lowest": -(10**400)})[0]
    assert large == {"fits": 2**64 - 1, "large": 2.0**64, "largest": float("inf"), "lowest": float("-inf")}
    assert [type(value) for value in large.values()] == [int, float, float, float]


@pytest.mark.parametrize(
    "name", ["api_key", "apiKey", "WANDB_API_KEY", "password", "hub_token", "token", "aws_secret_access_key", "secret"]
)
def test_secrets_are_recognized_by_name(name: str) -> None:
    assert is_secret(name)
    assert masked({name: "x", "list": [{name: "y"}]}) == {name: "***", "list": [{name: "***"}]}
    assert masked({name: 5, "steps": 3}) == {name: 5, "steps": 3}  # no number opens a door


@pytest.mark.parametrize(
    "name", ["max_tokens", "pad_token", "eos_token", "tokenizer", "key", "keep_last", "num_token_ids"]
)
def test_similar_names_are_not_masked(name: str) -> None:
    assert masked({name: "value"}) == {name: "value"}


def test_urls_are_shown_without_credentials() -> None:
    assert masked("postgresql://me:pw@host:5432/db") == "postgresql://***@host:5432/db"
    assert masked({"uri": "https://host/x?api_key=k&n=1"}) == {"uri": "https://host/x?api_key=***&n=1"}
    assert masked("https://host/a@b") == "https://host/a@b"


def test_lines_say_the_same_again() -> None:
    values: dict[str, Any] = {"loss": 0.5, "nan": float("nan"), "low": float("-inf"), "text": "t"}
    line = to_line(Entry("log", values, 3, 12.5, {"epoch": 1}))
    assert line is not None
    back = from_line(line)
    assert (back.kind, back.step, back.time, back.kwargs) == ("log", 3, 12.5, {"epoch": 1})
    assert repr(back.content) == repr(values)
    assert to_line(Entry("images", {}, 3, 12.5, {})) is None


def test_images_have_their_channels_where_the_tracker_expects_them() -> None:
    tensor = torch.arange(90, dtype=torch.uint8).reshape(3, 5, 6)
    first, last = tensor.numpy(), tensor.numpy().transpose(1, 2, 0)
    for image in (tensor, first, last, last.astype(np.int64)):
        assert plain_images({"a": image}, channels_last=True)["a"].tolist() == last.tolist()
        assert plain_images({"a": image}, channels_last=False)["a"].tolist() == first.tolist()
    assert plain_images({"a": [tensor, tensor]}, channels_last=True)["a"].shape == (2, 5, 6, 3)
    assert plain_images({"a": np.zeros((2, 5, 6, 3))}, channels_last=False)["a"].shape == (2, 3, 5, 6)
    assert plain_images({"gray": first[0]}, channels_last=False)["gray"].tolist() == [first[0].tolist()]
    sizes = plain_images({"a": [tensor, tensor[:, :2]]}, channels_last=True)["a"]
    assert [image.shape for image in sizes] == [(5, 6, 3), (2, 6, 3)]
    assert plain_images({"a": torch.zeros(3, 8, 3)}, channels_last=True)["a"].shape == (8, 3, 3)  # a tensor's are first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_images_of_floats_are_scaled_to_bytes(dtype: torch.dtype) -> None:
    def pixels(*values: float) -> list[int]:
        image = plain_images({"a": torch.tensor(values, dtype=dtype).reshape(1, 1, -1)}, channels_last=False)["a"]
        assert image.dtype == np.uint8
        return image.flatten().tolist()

    assert pixels(0.0, 0.25, 0.5, 1.0) == [0, 63, 127, 255]
    assert pixels(0.25, 0.5) == [63, 127]  # dark images stay dark
    assert pixels(-1.0, 0.0, 1.0) == [0, 127, 255]
    assert pixels(float("nan"), float("inf"), 0.5) == [0, 255, 127]


def test_images_of_pillow_and_of_booleans_are_read() -> None:
    from PIL import Image

    red = Image.new("RGB", (6, 4), "red")
    for image in (red, red.convert("P")):
        read = plain_images({"a": image}, channels_last=False)["a"]
        assert (read.shape, read[:, 0, 0].tolist()) == ((3, 4, 6), [255, 0, 0])
    assert plain_images({"mask": np.eye(2, dtype=bool)}, channels_last=False)["mask"].tolist() == [[[255, 0], [0, 255]]]
    with pytest.raises(TypeError, match=r"figure of matplotlib, or a list of these \(got a str\)"):
        plain_images({"a": "image.png"}, channels_last=True)


def test_lists_of_tensors_are_copied() -> None:
    image = torch.zeros(1, 2, 2)
    copied = snapshot({"images": [image, (image, "text")]})
    image += 1
    assert [float(copied["images"][0].sum()), float(copied["images"][1][0].sum())] == [0.0, 0.0]


def test_a_table_comes_as_rows_or_as_a_data_frame() -> None:
    frame = pytest.importorskip("pandas").DataFrame({"a": [1, 2], "b": ["x", "y"]})
    assert table_of(None, None, frame) == table_of(["a", "b"], [[1, "x"], [2, "y"]], None)
    with pytest.raises(ConfigurationError, match="columns and data, or a dataframe"):
        table_of(["a"], None, None)
