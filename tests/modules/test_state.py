"""A module's tensors under its author's names, and what is told when they do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer_lib import load_checkpoint_in_model
from trainer_lib.foundation.errors import StateError
from trainer_lib.modules.weights.state_dicts import check_fits, load_module_state, module_state


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_inside() -> nn.Module:
    first, second, third = network()
    return nn.Sequential(compiled(first), second, nn.Sequential(compiled(next(third.children()))))


def compiled_outside() -> nn.Module:
    return compiled(network())


@pytest.mark.slow
@pytest.mark.parametrize("build", [network, compiled_inside, compiled_outside])
@pytest.mark.parametrize("other", [network, compiled_inside, compiled_outside])
def test_names_are_those_of_the_author_however_a_model_is_compiled(build: Any, other: Any) -> None:
    state = module_state(build())
    assert list(state) == list(network().state_dict())
    loaded = other()
    load_module_state(loaded, state)
    assert all(torch.equal(value, state[name]) for name, value in module_state(loaded).items())


def test_a_module_that_answers_for_the_one_inside_is_not_skipped() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = compiled(nn.Linear(2, 2))

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inside"), name)

    assert list(module_state(Wrapper())) == ["inside.weight", "inside.bias"]


def test_another_model_is_named_and_leaves_this_one_as_it_was() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {**{name: value + 1 for name, value in before.items()}, "more": torch.ones(1)}
    del state["2.0.bias"]
    state["0.weight"] = torch.ones(5, 3)
    with pytest.raises(StateError) as error:
        load_module_state(model, state)
    assert str(error.value) == (
        "These weights are of another model than this Sequential: missing: 2.0.bias; not in this model: more; "
        "other shapes: 0.weight has the shape (5, 3) and here (4, 3)."
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_only_the_first_few_names_are_told() -> None:
    with pytest.raises(StateError, match=r"missing: 0.bias, 0.weight, 1.bias, 1.num_batches_tracked and 5 more\."):
        check_fits(network(), {})


def test_without_strict_what_both_have_is_loaded_and_shapes_still_count() -> None:
    model = network()
    load_module_state(model, {"0.bias": torch.full((4,), 7.0), "more": torch.ones(1)}, strict=False)
    assert model.get_parameter("0.bias").tolist() == [7.0] * 4
    with pytest.raises(StateError, match=r"other shapes: 0.bias has the shape \(5,\) and here \(4,\)"):
        load_module_state(model, {"0.bias": torch.ones(5)}, strict=False)


def test_one_name_of_a_tied_tensor_is_enough() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    load_module_state(model, {"embedding.weight": torch.full((4, 2), 3.0)})
    assert model.get_parameter("head.weight").tolist() == [[3.0, 3.0]] * 4


def test_extra_state_goes_along() -> None:
    class Counter(nn.Module):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    first, second = Counter(), Counter()
    first.seen = 5
    load_module_state(second, module_state(first))
    assert second.seen == 5


def observed(features: int = 4) -> Any:
    """Return a model for quantization-aware training, whose observers resize their buffers in the first forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, features), nn.BatchNorm1d(features))
    model.train().qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return torch.ao.quantization.prepare_qat(model)  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min")
def test_a_buffer_that_its_module_resizes_is_loaded(tmp_path: Path) -> None:
    trained = observed()
    trained(torch.randn(5, 3))
    state = module_state(trained)
    name = "0.weight_fake_quant.activation_post_process.max_val"
    assert (state[name].shape, observed().state_dict()[name].shape) == ((4,), (0,))
    torch.save(state, tmp_path / "pytorch_model.bin")
    for load in (load_module_state, lambda model, _: load_checkpoint_in_model(model, tmp_path, strict=True)):
        fresh = observed()
        load(fresh, state)
        assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
    with pytest.raises(StateError, match=r"0.bias has .*4,. and here .6,.*1.running_mean has .* and 2 more"):
        load_module_state(observed(6), state)
