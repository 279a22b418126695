"""The options of torch.compile: what the launcher says, what contradicts itself, what is no longer there."""

import subprocess
import sys
from typing import Any

import pytest

from trainer_lib.foundation.environment import patch_environment
from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, UnsupportedError
from trainer_lib.options.compile_options import TorchDynamoPlugin, compilation_plugin
from trainer_lib.options.enums import DynamoBackend


def a_backend(graph: Any, inputs: Any) -> Any:
    return graph.forward


def test_nothing_is_compiled_unless_asked_for() -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend == DynamoBackend.NO == "NO"
    assert not plugin.is_active
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic, plugin.use_regional_compilation) == (
        "default",
        False,
        None,
        False,
    )


@pytest.mark.parametrize("backend", ["inductor", "INDUCTOR", DynamoBackend.INDUCTOR])
def test_a_backend_has_one_name_however_it_is_written(backend: Any) -> None:
    plugin = TorchDynamoPlugin(backend=backend)
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert plugin.is_active
    assert plugin.to_dict()["backend"] == "inductor"
    assert plugin.to_kwargs() == {"backend": "inductor"}


def test_torch_is_told_what_differs_from_its_defaults() -> None:
    plugin = TorchDynamoPlugin("inductor", mode="reduce-overhead", fullgraph=True, dynamic=False)
    assert plugin.to_kwargs() == {
        "backend": "inductor",
        "mode": "reduce-overhead",
        "fullgraph": True,
        "dynamic": False,
    }
    assert TorchDynamoPlugin(a_backend, options={"a": 1}, use_regional_compilation=True).to_kwargs() == {
        "backend": a_backend,
        "options": {"a": 1},
    }


def test_the_launcher_fills_what_the_script_leaves_open() -> None:
    with patch_environment(
        accelerate_dynamo_backend="INDUCTOR",
        accelerate_dynamo_mode="max-autotune",
        accelerate_dynamo_use_fullgraph="True",
        accelerate_dynamo_use_dynamic="False",
        accelerate_dynamo_use_regional_compilation="true",
    ):
        asked = TorchDynamoPlugin()
        assert asked.backend is DynamoBackend.INDUCTOR
        assert (asked.mode, asked.fullgraph, asked.dynamic, asked.use_regional_compilation) == (
            "max-autotune",
            True,
            False,
            True,
        )
        plugin = TorchDynamoPlugin(
            "no", fullgraph=False, dynamic=True, use_regional_compilation=False, options={"x": 1}
        )
        assert not plugin.is_active
        assert (plugin.mode, plugin.fullgraph, plugin.dynamic, plugin.use_regional_compilation) == (
            "default",
            False,
            True,
            False,
        )


def test_disabled_is_not_active() -> None:
    assert not TorchDynamoPlugin("inductor", disable=True).is_active


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backend": "nvprims_nvfuser"}, UnsupportedError, "torch removed nvFuser; use 'inductor'"),
        ({"backend": DynamoBackend.TORCHXLA_TRACE_ONCE}, UnsupportedError, "openxla"),
        ({"backend": 3}, ConfigurationError, "a name or a function, got 3"),
        ({"backend": "inductor", "mode": "max-autotone"}, ConfigurationError, "Did you mean 'max-autotune'"),
        ({"backend": "inductor", "mode": "max-autotune", "options": {}}, ConfigurationError, "contradict each other"),
        ({"backend": "eager", "mode": "max-autotune"}, ConfigurationError, "needs the backend 'inductor'"),
        ({"backend": "eager", "fullgraph": "yes"}, ConfigurationError, "fullgraph"),
        ({"backend": "eager", "dynamic": 2}, ConfigurationError, "dynamic"),
        ({"backend": "eager", "disable": None}, ConfigurationError, "disable must be True or False"),
        ({"mode": "max-autotune", "fullgraph": True}, ConfigurationError, r"\(mode, fullgraph\) names no backend"),
    ],
)
def test_what_cannot_be_meant_is_said(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TorchDynamoPlugin(**arguments)


def test_a_backend_that_torch_does_not_know_is_answered_with_those_it_knows() -> None:
    with pytest.raises(ConfigurationError, match=r"'inducter'. Known: .*cudagraphs.*Did you mean 'inductor'"):
        TorchDynamoPlugin("inducter").check_backend()
    TorchDynamoPlugin("aot_eager_decomp_partition").check_backend()
    TorchDynamoPlugin(a_backend).check_backend()
    with pytest.raises(MissingPackageError, match="'tvm' comes with the package tvm"):
        TorchDynamoPlugin("tvm").check_backend()


def test_backend_and_plugin_are_two_ways_to_say_one_thing() -> None:
    assert compilation_plugin(None, None) is None
    assert compilation_plugin("eager", None) == TorchDynamoPlugin("eager")
    with pytest.raises(ConfigurationError, match="cannot be given together"):
        compilation_plugin("eager", TorchDynamoPlugin("eager"))
    with pytest.raises(ConfigurationError, match="must be a TorchDynamoPlugin, got a str"):
        compilation_plugin(None, "eager")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.launch
def test_torchs_tracer_is_imported_only_by_those_who_compile() -> None:
    script = (
        "import sys, torch\n"
        "from trainer_lib import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "model = accelerator.prepare(torch.nn.Linear(2, 2))\n"
        "accelerator.unwrap_model(model, keep_torch_compile=False)\n"
        "accelerator.free_memory()\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
