"""A dispatched model computes what the model in memory computes, to the last bit, wherever its weights are."""

import copy
import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.big_models.architectures import BLOCKS, architectures, made, output
from trainer_lib import (
    Accelerator,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, StateError, UnsupportedError
from trainer_lib.hooks import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from trainer_lib.hooks.weight_prefetch import WeightPrefetcher
from trainer_lib.modules.weights.tied_parameters import TiedTensors
from trainer_lib.utils.modeling import (
    align_module_device,
    compute_module_sizes,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    infer_auto_device_map,
)

NAMES = ["llama", "gpt2", "bert", "t5", "mixtral", "convolutions"]
pytestmark = pytest.mark.filterwarnings("ignore")


def mixed(model: nn.Module) -> dict[str, Any]:
    """Return a map with every second layer on the disk; tied weights are in both places."""
    layers = infer_auto_device_map(model, {"cpu": "1GB"}, BLOCKS, clean_result=False)
    return {name: "disk" if number % 2 else "cpu" for number, name in enumerate(layers)}


PLACEMENTS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "memory": lambda model, folder: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "disk": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
    "mixed": lambda model, folder: dispatch_model(model, mixed(model), offload_dir=folder),
    "mixed with buffers": lambda model, folder: dispatch_model(
        model, mixed(model), offload_dir=folder, offload_buffers=True
    ),
    "cpu_offload": lambda model, folder: cpu_offload(model),
    "disk_offload": disk_offload,
}


def is_offloaded(model: nn.Module) -> list[bool]:
    return [parameter.device.type == "meta" for parameter in model.parameters()]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_model_in_memory(name: str, placement: str, tmp_path: Path) -> None:
    model = made(name)
    expected = output(model, name)
    model = PLACEMENTS[placement](model, tmp_path / "weights")
    assert any(is_offloaded(model)) is (placement != "memory")
    assert all(is_offloaded(model)) is (placement not in ("memory", "mixed", "mixed with buffers"))
    for _ in range(3):  # the second pass fetches ahead
        assert torch.equal(output(model, name), expected)
    assert torch.equal(output(copy.deepcopy(model), name), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device_map", ["auto", {"": "disk"}])
def test_a_checkpoint_is_loaded_into_an_empty_model(name: str, device_map: Any, tmp_path: Path) -> None:
    model = made(name)
    expected = output(model, name)
    Accelerator(cpu=True).save_model(model, str(tmp_path), max_shard_size="60KB")
    with init_empty_weights():
        empty = architectures()[name]().eval()
    if hasattr(empty, "tie_weights"):
        empty.tie_weights()  # type: ignore[operator]
    files = sorted(path.name for path in tmp_path.iterdir())
    limit: dict[int | str, int | str] = {"cpu": int(compute_module_sizes(model)[""] * 0.8)}
    loaded = load_checkpoint_and_dispatch(
        empty, tmp_path, device_map, limit, no_split_module_classes=BLOCKS, offload_folder=tmp_path / "unused"
    )
    assert torch.equal(output(loaded, name), expected)
    assert any(is_offloaded(loaded))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == files
    assert not list(tmp_path.glob("unused/*.dat"))  # the weights stay in their safetensors files


def test_weights_of_other_files_go_to_the_offload_folder(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    expected = model(torch.ones(1, 4))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    empty = nn.Sequential(nn.Linear(4, 3, device="meta"), nn.Linear(3, 2, device="meta"))
    with pytest.raises(ConfigurationError, match=r"1.weight on the disk.* Give offload_folder"):
        load_checkpoint_and_dispatch(copy.deepcopy(empty), tmp_path, {"0": "cpu", "1": "disk"})
    folder = tmp_path / "offloaded"
    loaded = load_checkpoint_and_dispatch(empty, tmp_path, {"0": "cpu", "1": "disk"}, offload_folder=folder)
    assert torch.equal(loaded(torch.ones(1, 4)), expected)
    assert sorted(path.name for path in folder.iterdir()) == ["1.bias.dat", "1.weight.dat", "index.json"]


def test_weights_are_converted_on_the_way(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    Accelerator(cpu=True).save_model(model, str(tmp_path))
    empty = nn.Sequential(nn.Linear(4, 3, device="meta"), nn.Linear(3, 2, device="meta"))
    loaded = load_checkpoint_and_dispatch(empty, tmp_path, {"0": "cpu", "1": "disk"}, dtype=torch.bfloat16)
    expected = model.to(torch.bfloat16)(torch.ones(1, 4, dtype=torch.bfloat16))
    assert torch.equal(loaded(torch.ones(1, 4, dtype=torch.bfloat16)), expected)


def test_converted_weights_keep_their_type_once_hooks_are_removed(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(nn.Linear(4, 4), tmp_path)
    with init_empty_weights():
        empty = nn.Linear(4, 4)
    model = load_checkpoint_and_dispatch(empty, tmp_path, {"": "disk"}, dtype="bfloat16")
    expected = model(torch.ones(1, 4, dtype=torch.bfloat16))
    remove_hook_from_submodules(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model(torch.ones(1, 4, dtype=torch.bfloat16)), expected)


def test_the_state_dict_of_an_offloaded_model_can_be_read(tmp_path: Path) -> None:
    model = made("gpt2")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = dispatch_model(model, mixed(model), offload_dir=tmp_path)
    state = get_state_dict_offloaded_model(model)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, str(tmp_path / "saved"))
    again = made("gpt2")
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    load_checkpoint_in_model(again, tmp_path / "saved")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_offloaded_weights_are_there_within_a_block(tmp_path: Path) -> None:
    layer = nn.Linear(4, 3)
    weight = layer.weight.clone()
    cpu_offload(layer)
    assert has_offloaded_params(layer)
    with align_module_device(layer):
        assert torch.equal(layer.weight, weight)
    assert layer.weight.device.type == "meta"


def test_removed_hooks_leave_the_model_in_memory(tmp_path: Path) -> None:
    model = made("llama")
    expected = output(model, "llama")
    offloaded = disk_offload(model, tmp_path)
    remove_hook_from_submodules(offloaded)
    assert not any(is_offloaded(offloaded))
    assert torch.equal(output(offloaded, "llama"), expected)


def test_two_layers_are_in_memory_at_most() -> None:
    alive = 0
    most = 0
    lock = threading.Lock()

    class Counted:
        def __init__(self, value: Tensor) -> None:
            nonlocal alive, most
            with lock:
                alive += 1
                most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= 1

    class Weights(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            value = super().__getitem__(name).clone()
            value.counted = Counted(value)  # type: ignore[attr-defined]
            return value

    prefetcher = WeightPrefetcher(torch.device("cpu"))
    weights = Weights({str(index): torch.ones(1) for index in range(6)})
    for index in range(6):
        prefetcher.add(str(index), weights, [str(index)])
    for run in range(3):
        for index in range(6):
            taken = prefetcher.take(str(index))
            deadline = time.monotonic() + 5
            while run and alive < 2 and time.monotonic() < deadline:  # while the layer computes
                time.sleep(0.001)
            del taken
    assert most == 2


def test_the_next_layer_is_fetched_while_one_computes() -> None:
    order: list[tuple[str, str]] = []

    class Weights(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            order.append((name, threading.current_thread().name.partition("_")[0]))
            return super().__getitem__(name)

    prefetcher = WeightPrefetcher(torch.device("cpu"))
    weights = Weights({name: torch.ones(1) for name in "ab"})
    for name in "ab":
        prefetcher.add(name, weights, [name])
    for name in "abab":
        assert torch.equal(prefetcher.take(name)[name], torch.ones(1))
    assert [thread for _, thread in order[:2]] == ["MainThread", "MainThread"]
    assert {thread for _, thread in order[3:]} == {"weight-prefetch"}


def test_weights_are_fetched_to_the_device_of_the_thread_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that fetches has another current device: that of a new thread is the first one."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert WeightPrefetcher(torch.device("cuda")).device == torch.device("cuda", 1)


def test_the_first_accelerator_by_its_index_is_not_taken_for_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="none is available"):  # of this machine
        attach_align_device_hook(nn.Sequential(), execution_device=0, offload=True)


def test_adapters_over_an_offloaded_base_train() -> None:
    base = nn.Linear(4, 4).requires_grad_(False)
    adapter = nn.Linear(4, 4)
    batch = torch.randn(3, 4)
    (base(adapter(batch))).sum().backward()
    assert adapter.weight.grad is not None
    expected = adapter.weight.grad.clone()
    adapter.zero_grad()
    cpu_offload(base)
    base(adapter(batch)).sum().backward()
    assert torch.equal(adapter.weight.grad, expected)


def test_training_an_offloaded_weight_is_refused() -> None:
    layer = cpu_offload(nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match=r"A gradient has reached an offloaded weight.*requires_grad_\(False\)"):
        layer(torch.ones(1, 4)).sum().backward()


def test_a_pipeline_moves_one_model_after_the_other() -> None:
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, other = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    moved: list[str] = []
    first.to = lambda *args: moved.append("first")  # type: ignore[method-assign,assignment]
    second(first(torch.ones(1, 2)))
    assert moved == ["first", "first"]  # to its device, and back before the second runs
    other.remove()
    assert not hasattr(second, "_hf_hook")


def test_a_dispatched_model_is_not_moved_or_dispatched_again(tmp_path: Path) -> None:
    model = dispatch_model(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"0": "cpu", "1": "disk"}, offload_dir=tmp_path
    )
    with pytest.raises(UnsupportedError, match="is spread over cpu, disk by its device map"):
        model.to("cpu")
    with pytest.raises(UnsupportedError, match="is spread over cpu, disk by its device map"):
        model.half()
    with pytest.raises(UnsupportedError, match="has a device map already"):
        dispatch_model(model, {"": "cpu"})
    assert model.hf_device_map == {"0": "cpu", "1": "disk"}


OFFLOADS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "dispatch": lambda model, folder: dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=folder),
    "cpu": lambda model, folder: cpu_offload(model),
    "disk": disk_offload,
}


@pytest.mark.parametrize("second", OFFLOADS.values(), ids=OFFLOADS)
@pytest.mark.parametrize("first", OFFLOADS.values(), ids=OFFLOADS)
def test_an_offloaded_model_is_not_offloaded_again(first: Any, second: Any, tmp_path: Path) -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    expected = model(inputs)
    model = first(model, tmp_path / "first")
    with pytest.raises(UnsupportedError, match=r"has a device map already|are offloaded already"):
        second(model, tmp_path / "second")
    assert not (tmp_path / "second").exists()
    assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_an_offloaded_model_moves_once_its_hooks_are_removed(offload: Any, tmp_path: Path) -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    expected = model(inputs)
    model = offload(model, tmp_path)
    for move in (model.half, model.cpu, lambda: model.to("cpu")):
        with pytest.raises(UnsupportedError, match="cannot be moved or converted as a whole"):
            move()
    assert torch.equal(model(inputs), expected)
    remove_hook_from_submodules(model)
    vars(model).pop("hf_device_map", None)
    assert model.to(torch.float64)(inputs.double()).dtype is torch.float64
    assert model.float() is model


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        ({"0": "cpu"}, "names no device for 1.weight, 1.bias"),
        ({"0": "cpu", "1": "gpu"}, "'gpu', which torch does not know"),
        ({"0": "cpu", "1": "disk"}, "puts 1 on the disk. Give offload_dir"),
        ({"": "disk"}, "puts the model on the disk. Give offload_dir"),
        ({"0": "cpu", "1": 99}, "99"),
    ],
)
def test_a_map_that_cannot_be_followed_moves_nothing(device_map: dict[str, Any], words: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=words):
        dispatch_model(model, device_map)
    assert not any(is_offloaded(model))
    assert not hasattr(model, "hf_device_map")
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_the_rest_of_a_model_goes_where_the_outer_entry_says(tmp_path: Path) -> None:
    model = made("llama")
    expected = output(model, "llama")
    model = dispatch_model(model, {"model.layers.1": "disk", "model": "cpu", "": "disk"}, offload_dir=tmp_path)
    assert torch.equal(output(model, "llama"), expected)
    offloaded = {name.rpartition("layers.")[2][:2] for name, value in model.named_parameters() if value.is_meta}
    assert offloaded == {"1.", "lm"}


@pytest.mark.parametrize("device_map", [["cpu"], "auto", None, {0: "cpu"}])
def test_a_device_map_that_is_no_map_is_refused(device_map: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    Accelerator(cpu=True).save_model(model, str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"device_map must be a dict .* infer_auto_device_map"):
        dispatch_model(model, device_map)
    if not isinstance(device_map, (str, type(None))):
        with pytest.raises(ConfigurationError, match="device_map must be a dict"):
            load_checkpoint_and_dispatch(model, tmp_path, device_map)


def test_names_of_a_map_that_the_model_does_not_have_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    dispatch_model(model, {"0": "cpu", "1.wieght": "cpu", "7": "cpu", "1": "disk"}, offload_dir=tmp_path)
    assert is_offloaded(model) == [False, False, True, True]
    assert "does not have, and is ignored there: 1.wieght, 7. Did you mean '1.weight'?" in caplog.text


class Embedding(nn.Module):
    """Parameters and buffers beside the modules, as vision models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.register_buffer("scale", torch.tensor(2.0))
        self.block = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.block(rows) * self.get_buffer("scale")


@pytest.mark.parametrize(
    "on_disk", [["position"], ["scale"], ["token", "scale"], ["position", "block"], ["block.bias"]]
)
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_tensors_of_one_module_may_be_in_several_places(
    on_disk: list[str], offload_buffers: bool, tmp_path: Path
) -> None:
    model, inputs = Embedding().eval(), torch.randn(2, 4, 8)
    expected = model(inputs)
    Accelerator(cpu=True).save_model(model, str(tmp_path / "weights"))
    with init_empty_weights():
        empty = Embedding().eval()
    names = ["token", "position", "scale", "block.weight", "block.bias"]
    if "block" in on_disk:
        names[-2:] = ["block"]
    device_map = {name: "disk" if name in on_disk else "cpu" for name in names}
    folder = tmp_path / "offloaded"
    for dispatched in (
        dispatch_model(model, device_map, offload_dir=folder, offload_buffers=offload_buffers),
        load_checkpoint_and_dispatch(empty, tmp_path / "weights", device_map, offload_buffers=offload_buffers),
    ):
        for _ in range(2):
            assert torch.equal(dispatched(inputs), expected)
        remove_hook_from_submodules(dispatched)
        assert not any(is_offloaded(dispatched))
        assert torch.equal(dispatched(inputs), expected)
    assert sorted(path.stem for path in folder.glob("*.dat")) == sorted(
        name for name in model.state_dict() if name in on_disk or name.partition(".")[0] in on_disk
    )


def test_empty_weights_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="have no values yet: they are on the meta device"):
        dispatch_model(nn.Linear(2, 2, device="meta"), {"": "disk"}, offload_dir=tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


DISK_OFFLOADS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "disk_offload": disk_offload,
    "dispatch_model": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
}


@pytest.mark.parametrize("offload", DISK_OFFLOADS)
def test_weights_of_an_earlier_call_are_used_only_if_they_are_the_same(offload: str, tmp_path: Path) -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.randn(4, 2)
    model[0].register_buffer("calls", torch.zeros(1))
    model[0].register_parameter("unused", nn.Parameter(torch.tensor([torch.nan])))  # is the same as itself
    model[0].register_parameter("gain", nn.Parameter(torch.ones(1, 2)[:, 1]))  # contiguous, with a stride of 2
    expected = model(inputs)
    again, empty, trained = copy.deepcopy(model), copy.deepcopy(model).to("meta"), copy.deepcopy(model)
    DISK_OFFLOADS[offload](model, tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again[0].get_buffer("calls").add_(1)  # which stays in memory
    empty[0].register_buffer("calls", torch.zeros(1))
    for same in (again, empty):
        assert torch.equal(DISK_OFFLOADS[offload](same, tmp_path)(inputs), expected)
    trained[0].get_parameter("weight").data[0, 0] += 1
    for other, names in ((trained, "0.weight"), (nn.Sequential(nn.Linear(2, 5)), "0.weight, 0.bias")):
        with pytest.raises(
            ConfigurationError, match=rf"another model, or of another time.*: {names}. Delete the folder"
        ):
            DISK_OFFLOADS[offload](other, tmp_path)
        assert not any(is_offloaded(other))
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


def test_weights_that_an_earlier_map_had_elsewhere_are_added_to_the_folder(tmp_path: Path) -> None:
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.randn(4, 2)
    again, expected = copy.deepcopy(model), model(inputs)
    dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    again = dispatch_model(again, {"0": "disk", "1": "disk"}, offload_dir=tmp_path)
    assert torch.equal(again(inputs), expected)
    assert torch.equal(model(inputs), expected)


def test_a_disk_that_fills_up_leaves_the_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    written: list[Any] = []

    def fill(array: Any, path: Any) -> None:
        written.append(path)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer_lib.tensor_files.offloaded_weights.write_array", fill)
    with pytest.raises(CheckpointError, match=r"could not be written.*No space left"):
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert not any(is_offloaded(model))
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let the system refuse files above 20 kB, as a disk does that fills up half-way."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def layers(device: str = "cpu") -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(20, width, device=device) for width in (20, 20, 400)))  # the last is too large


@pytest.mark.usefixtures("small_files")
def test_a_weight_that_the_disk_has_no_room_for_leaves_the_model_in_memory(tmp_path: Path) -> None:
    for offload in (OFFLOADS["disk"], lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder)):
        model = layers()
        with pytest.raises(CheckpointError, match=r"offloaded weights could not be written: .*File too large"):
            offload(model, tmp_path)
        assert not any(is_offloaded(model))
        assert not hasattr(model, "hf_device_map")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["full", "file"])
def test_a_checkpoint_that_the_disk_has_no_room_for_is_not_loaded(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    state, shards = layers().state_dict(), tmp_path / "shards"
    shards.mkdir()
    weight_map = {name: f"pytorch_model-{name[0]}.bin" for name in state}
    for file in set(weight_map.values()):
        torch.save({name: tensor for name, tensor in state.items() if weight_map[name] == file}, shards / file)
    (shards / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    folder = tmp_path / "offloaded"
    request.getfixturevalue("small_files") if place == "full" else folder.touch()
    for model in (layers("meta"), layers()):
        before = [(parameter, parameter.clone()) for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match="offloaded weights could not be written"):
            load_checkpoint_and_dispatch(model, shards, {"0": "cpu", "1": "disk", "2": "disk"}, offload_folder=folder)
        for parameter, (old, value) in zip(model.parameters(), before, strict=True):
            assert parameter is old
            assert parameter.is_meta or torch.equal(parameter, value)
        assert not hasattr(model, "hf_device_map")
    assert place == "file" or not list(folder.iterdir())


def test_an_offload_folder_that_is_a_file_leaves_the_model_in_memory(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), tmp_path / "file"
    path.touch()
    for offload in (OFFLOADS["dispatch"], disk_offload):
        with pytest.raises(CheckpointError, match="file: the offloaded weights could not be written"):
            offload(model, path)
        assert not any(is_offloaded(model))
        assert model(torch.ones(1, 2)).shape == (1, 2)


def leads_out(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))


def cut(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "leads out": (leads_out, "which leads out of .* It is not read"),
    "missing": (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "names files that are missing"),
    "cut": (cut, "model-00002-of-00002.safetensors cannot be read as safetensors"),
    "no index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": '),
        "is not an index of weights",
    ),
}


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, {"0": "cpu", "1": "disk"}, "auto"], ids=str)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_moves_nothing(damage: str, device_map: Any, tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(
        nn.Sequential(nn.Linear(50, 30), nn.Linear(30, 20)), str(tmp_path), max_shard_size="7KB"
    )
    break_it, words = DAMAGE[damage]
    break_it(tmp_path)
    empty = nn.Sequential(nn.Linear(50, 30, device="meta"), nn.Linear(30, 20, device="meta"))
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint_and_dispatch(empty, tmp_path, device_map)
    assert all(is_offloaded(empty))
    assert not hasattr(empty, "hf_device_map")
    assert not any("_hf_hook" in vars(module) for module in empty.modules())


def test_misshapen_and_missing_weights_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Accelerator(cpu=True).save_model(nn.Sequential(nn.Linear(4, 3)), str(tmp_path))
    with pytest.raises(StateError, match=r"0.weight is \(3, 4\) and the model has \(3, 5\)"):
        load_checkpoint_and_dispatch(nn.Sequential(nn.Linear(5, 3)), tmp_path, {"": "cpu"})
    load_checkpoint_and_dispatch(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), tmp_path, {"": "cpu"})
    assert "does not have are unchanged: 1.weight, 1.bias." in caplog.text
    with pytest.raises(StateError):
        load_checkpoint_and_dispatch(
            nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), tmp_path, {"": "cpu"}, strict=True
        )


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"": "disk"}, {"0": "cpu", "1": "disk"}, {"0": "disk", "1": "cpu"}]
)
def test_an_empty_model_needs_all_of_its_weights(device_map: dict[str, str], tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(nn.Sequential(nn.Linear(4, 3)), str(tmp_path))
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    with pytest.raises(StateError, match=r"Sequential have no values, since .*empty: 1.weight, 1.bias. Give a check"):
        load_checkpoint_and_dispatch(model, tmp_path, device_map)
    assert not hasattr(model, "hf_device_map")


def test_an_empty_model_of_transformers_is_told_of_renamed_weights(tmp_path: Path) -> None:
    made("mixtral").save_pretrained(tmp_path)  # type: ignore[operator]  # with the names of its first version
    with init_empty_weights():
        empty = architectures()["mixtral"]()
    with pytest.raises(StateError, match=r"have no values.*from_pretrained and write it once with save_model"):
        load_checkpoint_and_dispatch(empty, tmp_path, {"": "disk"})


class _Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        self[2].weight = self[0].weight


@pytest.mark.parametrize("left_out", ["0.weight", "2.weight", None])
@pytest.mark.parametrize("devices", ["disk disk disk", "disk cpu cpu", "cpu disk disk"])
@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_a_model_with_values_is_loaded_and_then_dispatched(
    ending: str, devices: str, left_out: str | None, tmp_path: Path
) -> None:
    whole, model = _Tied().eval(), _Tied().eval()
    nn.init.normal_(whole[1].running_mean)  # type: ignore[arg-type]
    weights = {name: tensor.clone() for name, tensor in whole.state_dict().items() if name != left_out}
    write = torch.save if ending == "bin" else save_file
    write(weights, tmp_path / f"model.{ending}")
    device_map = dict(zip("012", devices.split(), strict=True))
    load_checkpoint_in_model(model, tmp_path / f"model.{ending}", device_map, tmp_path / "offloaded")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter.is_meta is (device_map[name[0]] == "disk"), name
    model = dispatch_model(model, device_map, offload_dir=tmp_path / "offloaded")
    inputs = torch.randn(3, 4)
    assert torch.equal(model(inputs), whole(inputs))


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_buffers_that_no_checkpoint_has_are_named(device: str, tmp_path: Path) -> None:
    def layer() -> nn.Module:
        linear = nn.Linear(2, 2)
        linear.register_buffer("mask", torch.ones(2), persistent=False)
        return linear

    Accelerator(cpu=True).save_model(layer(), str(tmp_path))
    with init_empty_weights(include_buffers=True):
        model = layer()
    with pytest.raises(StateError, match=r"not persistent: mask. Leave include_buffers=True out"):
        load_checkpoint_and_dispatch(model, tmp_path, {"": device})


def test_weights_that_stay_empty_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Accelerator(cpu=True).save_model(nn.Sequential(nn.Linear(4, 3)), str(tmp_path))
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    load_checkpoint_in_model(model, tmp_path)
    assert "have no values yet: 1.bias, 1.weight." in caplog.text


def test_an_unknown_way_of_inferring_a_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"device_map.*'automatic'.*auto"):
        load_checkpoint_and_dispatch(nn.Linear(1, 1), tmp_path, device_map="automatic")
    with pytest.raises(ConfigurationError, match=r"'cpu'.*For one device, give a dict such as \{'': 'cpu'\}"):
        load_checkpoint_and_dispatch(nn.Linear(1, 1), tmp_path, device_map="cpu")


class _Ties(nn.Module):
    """Two weights and two buffers that are one each, in different modules, and a layer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.again = self.layer
        self.head.weight = self.embedding.weight
        scale = torch.full((4,), 2.0)
        for module in (self.embedding, self.head):
            module.register_buffer("scale", scale)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.again(self.layer(self.embedding(inputs)))) * self.head.get_buffer("scale")


def _tied_names(model: nn.Module) -> list[list[str]]:
    return TiedTensors(model).groups


def _load_mixed(model: nn.Module, folder: Path) -> nn.Module:
    torch.save(model.state_dict(), folder / "weights.bin")
    with init_empty_weights():
        empty = type(model)()
    places = {"": "disk", "embedding": "cpu"}
    return load_checkpoint_and_dispatch(
        empty, folder / "weights.bin", places, offload_folder=folder, offload_buffers=True
    )


@pytest.mark.parametrize(
    "offload",
    [
        lambda model, folder: cpu_offload(model, offload_buffers=True),
        lambda model, folder: disk_offload(model, folder, offload_buffers=True),
        lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder, offload_buffers=True),
        lambda model, folder: dispatch_model(
            model, {"embedding": "cpu", "": "disk"}, offload_dir=folder, offload_buffers=True
        ),
        _load_mixed,
        lambda model, folder: copy.deepcopy(cpu_offload(model, offload_buffers=True)),
    ],
    ids=["cpu_offload", "disk_offload", "disk", "mixed", "loaded", "copy"],
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_tied_weights_and_buffers_are_tied_again_once_hooks_are_removed(
    offload: Callable[[nn.Module, Path], nn.Module], one_by_one: bool, tmp_path: Path
) -> None:
    model, inputs = _Ties(), torch.rand(2, 4)
    names, expected = _tied_names(model), model(inputs).detach()
    offloaded = offload(model, tmp_path)
    if one_by_one:
        for module in offloaded.modules():
            remove_hook_from_module(module)
    else:
        remove_hook_from_submodules(offloaded)
    assert _tied_names(offloaded) == names
    assert torch.equal(offloaded(inputs), expected)


def test_a_tied_layer_of_several_names_is_tied_again_to_the_others(tmp_path: Path) -> None:
    model = _Ties()
    model.embedding = model.layer = nn.Linear(4, 4)  # and `again` is the first layer
    model.head.weight = model.layer.weight
    names = _tied_names(model)
    offloaded = dispatch_model(model, {"embedding": "disk", "layer": "disk", "": "cpu"}, offload_dir=tmp_path)
    remove_hook_from_submodules(offloaded)
    assert _tied_names(offloaded) == names


def test_a_weight_that_has_other_values_by_now_is_not_tied_again(tmp_path: Path) -> None:
    model = dispatch_model(_Ties(), {"embedding": "cpu", "": "disk"}, offload_dir=tmp_path)
    model.get_submodule("embedding").weight = nn.Parameter(torch.zeros(4, 4))
    remove_hook_from_submodules(model)
    assert _tied_names(model) == [name for name in _tied_names(_Ties()) if "head.weight" not in name]
    assert model.get_parameter("head.weight").any()


class _OwnTies(nn.Module):
    """Layers that have tied weights and buffers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_parameter("again", self.layer.get_parameter("weight"))
        self.inner = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.inner[1].weight = self.inner[0].weight
        scale = torch.full((4,), 2.0)
        for name in ("scale", "same"):
            self.layer.register_buffer(name, scale)
        self.head = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.linear(self.layer(inputs), self.layer.get_parameter("again"))
        for inner in self.inner:
            hidden = nn.functional.linear(hidden, inner.get_parameter("weight"))
        return self.head(hidden)


@pytest.mark.parametrize("preload", [None, ["_OwnTies"]])
def test_all_names_of_a_weight_are_offloaded_together(preload: list[str] | None, tmp_path: Path) -> None:
    model = _OwnTies()
    names, tensors = _tied_names(model), dict(model.named_parameters(remove_duplicate=False))
    cpu_offload(model, offload_buffers=True, preload_module_classes=preload)
    offloaded = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert all(tensor.is_meta for tensor in offloaded.values())
    with align_module_device(model if preload else model.layer):
        assert torch.equal(model.layer.get_parameter("again"), tensors["layer.weight"])
        assert torch.equal(model.layer.get_buffer("same"), torch.full((4,), 2.0))
    remove_hook_from_submodules(model)
    assert _tied_names(model) == names


def test_names_of_a_tensor_are_placed_together() -> None:
    model = _OwnTies()
    names = _tied_names(model)
    attach_align_device_hook_on_blocks(model, {"layer": "meta", "inner": "meta", "head": "cpu"})
    placed = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert {name for name, tensor in placed.items() if not tensor.is_meta} == {"head.weight", "head.bias"}
    assert _tied_names(model) == names
