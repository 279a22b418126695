"""fp8 with torchao, emulated on the CPU: close to bf16, sharded too, the same names, and resumed bit by bit."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Trainer,
    TrainingArguments,
    UnsupportedError,
)
from trainer_lib.foundation.errors import MissingPackageError
from trainer_lib.options import fp8_options
from trainer_lib.options.enums import FP8BackendType
from trainer_lib.options.fp8_options import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from trainer_lib.state.accelerator_state import AcceleratorState
from trainer_lib.utils.ao import convert_model_to_fp8_ao, filter_linear_layers, has_ao_layers

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, as it is imported
needs_torchao = pytest.mark.skipif(not fp8_options.is_torchao_available(), reason="torchao is not installed")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (32, 64, 64, 20, 48, 48, 4)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers[:-1], layers[-1][0])


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(16, 32, generator=generator) for _ in range(number)]
    return [(batch, batch[:, :4].argmax(dim=1)) for batch in inputs]


def losses(
    precision: str,
    steps: int = 24,
    sharded: bool = False,
    folder: Path | None = None,
    recipe: AORecipeKwargs | None = None,
    **plugin_options: Any,
) -> list[float]:
    """Train, and save after half of the steps; with a saved half in `folder`, only train the other one."""
    plugin = FullyShardedDataParallelPlugin(min_num_params=4000, **plugin_options) if sharded else None
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        fsdp_plugin=plugin,
        kwargs_handlers=[] if recipe is None else [recipe],
    )
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    resumes = folder is not None and folder.exists()
    if resumes:
        accelerator.load_state(folder)
    seen: list[float] = []
    rank, rows = accelerator.process_index, 16 // accelerator.num_processes
    for step, (inputs, targets) in enumerate(batches(steps)):
        if folder is not None and step == steps // 2 and not resumes:
            accelerator.save_state(folder)
        if resumes and step < steps // 2:
            continue
        part = slice(rank * rows, (rank + 1) * rows)
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs[part]), targets[part])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.free_memory()
    return seen


@needs_torchao
def test_training_is_close_to_bf16_and_resumes_bit_by_bit(tmp_path: Path) -> None:
    in_bf16, in_fp8 = losses("bf16"), losses("fp8", folder=tmp_path / "state")
    assert in_fp8 == pytest.approx(in_bf16, abs=1e-2)
    assert in_fp8 != in_bf16
    assert in_fp8[-1] < in_fp8[0] - 0.1
    assert losses("fp8", folder=tmp_path / "state") == in_fp8[12:]


@pytest.mark.slow
@needs_torchao
def test_shards_train_as_one_process_and_resume_bit_by_bit(tmp_path: Path) -> None:
    def body(folder: Path) -> tuple[list[float], list[float], list[float], list[float]]:
        whole, resumed = (losses("fp8", sharded=True, folder=folder) for _ in range(2))
        return whole, resumed, losses("bf16", sharded=True), losses("fp8")

    expected = losses("fp8")
    for whole, resumed, in_bf16, replicated in run_world(body, [tmp_path / "state"]):
        assert whole == pytest.approx(in_bf16, abs=1e-2)
        assert whole != in_bf16
        assert resumed == whole[12:]
        # The scales are those of half a batch.
        assert whole == pytest.approx(expected, abs=1e-2)
        assert replicated == pytest.approx(expected, abs=1e-2)


@pytest.mark.slow
@needs_torchao
def test_weights_that_are_gathered_in_fp8_train_and_resume_as_those_that_are_not(tmp_path: Path) -> None:
    recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=True)

    def body() -> list[list[float]]:
        folder = tmp_path / "state"
        whole, resumed = (losses("fp8", sharded=True, folder=folder, recipe=recipe) for _ in range(2))
        assert resumed == whole[12:]
        others: list[dict[str, Any]] = [
            {"reshard_after_forward": False},
            {"cpu_offload": True},
            {"state_dict_type": "FULL_STATE_DICT"},
        ]
        for number, options in enumerate(others):
            where = tmp_path / str(number)
            again = losses("fp8", sharded=True, folder=where, recipe=recipe, **options)
            assert again == pytest.approx(whole, rel=1e-6)
        return [whole, losses("fp8", sharded=True), losses("fp8")]

    for whole, in_bf16, replicated in run_world(body, timeout=120):
        assert whole == pytest.approx(replicated, rel=1e-6), "the scales are those of whole weights in fp32"
        assert whole == pytest.approx(in_bf16, abs=1e-2)
        assert whole != in_bf16


@needs_torchao
@pytest.mark.parametrize("name", ["rowwise", "rowwise_with_gw_hp"])
def test_recipes_have_names(name: str) -> None:
    in_fp8, in_bf16 = losses("fp8", steps=6, recipe=AORecipeKwargs(config=name)), losses("bf16", steps=6)
    assert in_fp8 == pytest.approx(in_bf16, abs=1e-2)
    assert in_fp8 != in_bf16
    with pytest.raises(ConfigurationError, match=rf"works with config='tensorwise' \(got '{name}'\)"):
        AORecipeKwargs(config=name, enable_fsdp_float8_all_gather=True)


@needs_torchao
def test_a_trainer_takes_the_options(tmp_path: Path) -> None:
    model = network()
    recipe = AORecipeKwargs(module_filter_func=lambda module, name: name == "4.0")
    args = TrainingArguments(
        mixed_precision="fp8", fp8=recipe, max_steps=2, per_device_train_batch_size=8, use_cpu=True, progress_bar=False
    )
    inputs, targets = batches(1)[0]
    Trainer(model, args, train_dataset=(inputs, targets), loss_fn=cross_entropy).fit()
    assert converted(model) == ["4.0"]
    with pytest.raises(ConfigurationError, match=r"AORecipeKwargs has no effect with mixed_precision='bf16'\."):
        Trainer(network(), TrainingArguments(mixed_precision="bf16", fp8=recipe, use_cpu=True), train_dataset=[inputs])


@pytest.mark.slow
@needs_torchao
def test_split_matrices_and_pipelines_refuse_fp8() -> None:
    def body() -> list[str]:
        messages: list[str] = []
        for config in (ParallelismConfig(tp_size=2), ParallelismConfig(pp_size=2)):
            with pytest.raises(UnsupportedError) as refused:
                Accelerator(cpu=True, mixed_precision="fp8", parallelism_config=config)
            messages.append(str(refused.value))
            AcceleratorState._reset_state(reset_partial_state=False)
        return messages

    for split, pipeline in run_world(body):
        assert split.startswith("mixed_precision='fp8' does not work with tp_size=2")
        assert pipeline.startswith("mixed_precision='fp8' does not work with pp_size=2")


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


@needs_torchao
def test_without_fp8_the_backend_is_that_of_accelerate() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.fp8_backend == FP8BackendType.NO
    assert (accelerator.fp8_enabled, accelerator.fp8_recipe_handler, accelerator.has_fp8_handler) == (
        False,
        None,
        False,
    )


def test_the_first_and_last_layers_and_odd_sizes_stay_and_names_are_kept() -> None:
    model = network()
    model.add_module("frozen", nn.Linear(16, 16).requires_grad_(False))
    before, weights = list(model.state_dict()), dict(model.named_parameters())
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    prepared = accelerator.prepare(model[:6])
    assert converted(model) == ["1.0", "4.0"], "0.0 and 5 are the ends, 2.0 and 3.0 have 20 rows or columns"
    assert (accelerator.fp8_backend, accelerator.mixed_precision) == ("AO", "fp8")
    assert accelerator.fp8_enabled
    assert prepared(torch.ones(2, 32)).dtype is torch.float32
    assert list(model.state_dict()) == before
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    assert has_ao_layers(prepared)
    plain = network()
    plain.load_state_dict(accelerator.get_state_dict(prepared))
    assert torch.equal(plain.get_parameter("1.0.weight"), model.get_parameter("1.0.weight"))


@needs_torchao
def test_a_filter_chooses_layers_and_quantized_ones_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Quantized(nn.Linear):
        pass

    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), Quantized(16, 16), nn.Linear(16, 16))
    recipe = AORecipeKwargs(module_filter_func=lambda module, name: name in ("0", "3"))
    Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe]).prepare(model)
    assert converted(model) == ["0"]
    other = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    convert_model_to_fp8_ao(other)
    assert converted(other) == ["1"]
    assert not filter_linear_layers(nn.Linear(20, 16), "1")
    assert not caplog.records
    convert_model_to_fp8_ao(nn.Sequential(nn.Linear(16, 16)))
    assert "fp8 converts no layer of Sequential" in caplog.text


@needs_torchao
def test_a_configuration_of_torchao_is_used(caplog: pytest.LogCaptureFixture) -> None:
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig(emulate=False, enable_fsdp_float8_all_gather=True, round_scales_to_power_of_2=True)
    model = network()
    Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config)]).prepare(model)
    layer: Any = model.get_submodule("1.0")
    assert layer.config.round_scales_to_power_of_2
    assert not layer.config.emulate
    assert "enable_fsdp_float8_all_gather=True has no effect without FSDP" in caplog.text
    assert type(layer.weight) is nn.Parameter, "weights stay plain tensors"
    with pytest.raises(ConfigurationError, match=r"Put pad_inner_dim into the Float8LinearConfig\."):
        AORecipeKwargs(config=config, pad_inner_dim=True)


def test_the_launcher_sets_what_a_script_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PAD_INNER_DIM": "false", "MARGIN": "3", "FORMAT": "E4M3", "OVERRIDE_LINEAR_PRECISION": "false,false,true",
        "AMAX_COMPUTE_ALGO": "max", "USE_AUTOCAST_DURING_EVAL": "true", "OPT_LEVEL": "O1",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", value)
    assert not AORecipeKwargs().pad_inner_dim
    assert AORecipeKwargs(pad_inner_dim=True).pad_inner_dim
    recipe = TERecipeKwargs(interval=2)
    assert (recipe.margin, recipe.interval, recipe.fp8_format, recipe.amax_history_len) == (3, 2, "E4M3", 1024)
    assert (recipe.amax_compute_algo, recipe.use_autocast_during_eval) == ("max", True)
    assert recipe.override_linear_precision == (False, False, True)
    assert MSAMPRecipeKwargs().opt_level == "O1"
    assert FP8RecipeKwargs(backend="msamp").backend == "MSAMP"
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp")
    with pytest.raises(UnsupportedError, match=r"MS-AMP is no longer developed"):
        Accelerator(cpu=True, mixed_precision="fp8")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Accelerator(cpu=True, kwargs_handlers=[TERecipeKwargs()]), ConfigurationError, "Give mixed_precision"),
        (
            lambda: Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()]),
            MissingPackageError,
            "needs its package",
        ),
        (
            lambda: Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(), AORecipeKwargs()]),
            ConfigurationError,
            "several options of fp8: AORecipeKwargs, TERecipeKwargs",
        ),
        (
            lambda: AORecipeKwargs(config=3),
            ConfigurationError,
            r"must be a torchao.float8.Float8LinearConfig \(got int",
        ),
        (lambda: AORecipeKwargs(config="rowise"), ConfigurationError, "Did you mean 'rowwise'"),
        (lambda: TERecipeKwargs(fp8_format="E3"), ConfigurationError, "Known: E4M3, E5M2, HYBRID"),
        (lambda: TERecipeKwargs(override_linear_precision=(True,)), ConfigurationError, "three of True or False"),  # type: ignore[arg-type]
        (lambda: MSAMPRecipeKwargs(opt_level="O3"), ConfigurationError, "Known: O1, O2"),
    ],
)
def test_what_cannot_be_is_an_error(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_missing_torchao_and_a_device_without_fp8_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fp8_options, "is_torchao_available", lambda: False)
        with pytest.raises(MissingPackageError, match="pip install torchao"):
            Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    pytest.importorskip("torchao")
    from trainer_lib.precision import choose_precision

    with pytest.raises(UnsupportedError, match=r"this cuda device does not\. Use mixed_precision='bf16'"):
        choose_precision("fp8", "cuda")
