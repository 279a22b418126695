"""Parameter groups: weight decay, learning rates, freezing, and patterns that match nothing."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.optim.layerwise_lr import layerwise_learning_rates
from trainer_lib.trainer.optim.parameter_groups import ParameterGroup, group_parameters


class OwnRMSNorm(nn.Module):
    """A norm that torch does not know, with a weight of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))


class Model(nn.Module):
    """A model with each kind of parameter, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
        self.own = OwnRMSNorm()
        self.relative_position_bias = nn.Parameter(torch.zeros(3, 3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight


def _named(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    names = {id(value): name for name, value in model.named_parameters()}
    return {group["name"]: [names[id(value)] for value in group["params"]] for group in groups}


def test_norms_biases_and_vectors_have_no_weight_decay() -> None:
    model = Model()
    groups = group_parameters(model, 0.1)
    assert _named(model, groups) == {
        "rest": ["embedding.weight", "encoder.0.weight", "encoder.2.weight"],
        "rest, no decay": [
            "relative_position_bias",
            "scale",
            "encoder.0.bias",
            "encoder.1.weight",
            "encoder.1.bias",
            "encoder.2.bias",
            "encoder.3.weight",
            "encoder.3.bias",
            "own.weight",
            "head.bias",
        ],
    }
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all("lr" not in group for group in groups)


def test_without_weight_decay_there_is_one_group_with_tied_weights_once() -> None:
    model = Model()
    (group,) = group_parameters(model, 0.0)
    assert (group["name"], group["weight_decay"]) == ("rest", 0.0)
    assert sorted(map(id, group["params"])) == sorted(map(id, model.parameters()))


def test_a_parameter_belongs_to_the_first_group_that_matches() -> None:
    model = Model()
    groups = group_parameters(
        model,
        0.1,
        [
            ParameterGroup("encoder.2.*", learning_rate=0.5),
            ParameterGroup("encoder.*", learning_rate=0.25, weight_decay=0.2),
        ],
    )
    settings = [(group["name"], group.get("lr"), group["weight_decay"], len(group["params"])) for group in groups]
    assert settings == [
        ("rest", None, 0.1, 1),
        ("rest, no decay", None, 0.0, 4),
        ("encoder.2.*", 0.5, 0.1, 1),
        ("encoder.2.*, no decay", 0.5, 0.0, 1),
        ("encoder.*", 0.25, 0.2, 1),
        ("encoder.*, no decay", 0.25, 0.0, 5),
    ]


def test_tied_weights_are_found_by_any_of_their_names() -> None:
    model = Model()
    groups = group_parameters(model, 0.0, [ParameterGroup("head.weight", learning_rate=0.5)])
    assert _named(model, groups)["head.weight"] == ["embedding.weight"]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_a_group_of_biases_alone_can_have_weight_decay() -> None:
    model = Model()
    groups = group_parameters(model, 0.0, [ParameterGroup("*.bias", weight_decay=0.3)])
    assert [(group["name"], group["weight_decay"]) for group in groups] == [("rest", 0.0), ("*.bias", 0.3)]
    # The weight decay of the arguments does not apply to biases.
    groups = group_parameters(model, 0.1, [ParameterGroup("head.bias", learning_rate=0.3)])
    assert [(group["name"], group["weight_decay"]) for group in groups][2:] == [("head.bias, no decay", 0.0)]


def test_frozen_parameters_are_in_no_group_and_need_no_gradient() -> None:
    model = Model()
    groups = group_parameters(model, 0.0, [ParameterGroup("encoder.*", frozen=True)])
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("encoder.")}
    assert not frozen & set(_named(model, groups)["rest"])


def test_parameters_frozen_by_the_user_stay_frozen() -> None:
    model = Model()
    model.embedding.requires_grad_(False)
    (group,) = group_parameters(model, 0.0)
    assert all(value is not model.embedding.weight for value in group["params"])


def test_patterns_match_names_without_wrappers() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert next(iter(model.state_dict())) == "0.weight"
    assert next(name for name, _ in model[0].named_modules() if name) == "_checkpoint_wrapped_module"
    groups = group_parameters(model, 0.0, [ParameterGroup("0.weight", learning_rate=0.1)])
    assert groups[1]["params"] == [next(model.parameters())]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([ParameterGroup("encodr.0.weight", frozen=True)], r"matches none of the 14 names .*encoder\.0\.weight"),
        ([ParameterGroup("encoder", frozen=True)], r"use \* for any characters"),
        (
            [ParameterGroup("head.*", frozen=True), ParameterGroup("head.bias", learning_rate=0.1)],
            r"'head\.bias'\): all parameters that it matches belong to 'head\.\*', earlier in the list",
        ),
        ([ParameterGroup("head.*", frozen=True), ParameterGroup("head.*", frozen=True)], "earlier in the list"),
        ([ParameterGroup("*", frozen=True)], "All 13 parameters of Model are frozen"),
    ],
)
def test_invalid_groups_are_refused_and_change_nothing(groups: list[ParameterGroup], message: str) -> None:
    model = Model()
    with pytest.raises(ConfigurationError, match=message):
        group_parameters(model, 0.1, groups)
    assert all(value.requires_grad for value in model.parameters())


def test_a_learning_rate_for_frozen_parameters_is_an_error() -> None:
    model = Model()
    model.own.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"are frozen \(requires_grad=False\), such as own.weight"):
        group_parameters(model, 0.1, [ParameterGroup("own.*", learning_rate=0.1)])


def test_a_model_without_parameters_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="ReLU has no parameters"):
        group_parameters(nn.ReLU(), 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no effect"),
        ({"learning_rate": -1.0}, r"learning_rate must be .* \(got -1\.0\)"),
        ({"weight_decay": float("nan")}, r"weight_decay must be .* \(got nan\)"),
        ({"weight_decay": True}, r"weight_decay must be .* \(got True\)"),
        ({"learning_rate": 0.1, "frozen": True}, "learning_rate has no effect with frozen=True"),
    ],
)
def test_settings_are_checked_without_a_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParameterGroup("*", **options)


def test_a_pattern_is_a_text() -> None:
    with pytest.raises(ConfigurationError, match=r"pattern must be a text .* \(got ''\)"):
        ParameterGroup("", frozen=True)


def test_layerwise_rates_fall_from_the_last_layer_to_the_first() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=11, hidden_size=4, num_hidden_layers=3, num_attention_heads=1, intermediate_size=4)
    model = BertForSequenceClassification(config)
    rates: dict[str, float] = {}
    for group in group_parameters(model, 0.0, layerwise_learning_rates(model, 0.1, decay=0.5)):
        names = _named(model, [group])[group["name"]]
        rates |= dict.fromkeys((".".join(name.split(".")[:4]) for name in names), float(group.get("lr", 0.1)))
    assert {name: rate for name, rate in rates.items() if "layer" in name and "Norm" not in name} == {
        f"bert.encoder.layer.{number}": 0.1 * 0.5 ** (3 - number) for number in range(3)
    }
    others = {name: rate for name, rate in rates.items() if ".layer." not in name}
    assert {rate for name, rate in others.items() if name.startswith("bert.embeddings")} == {0.1 * 0.5**4}
    assert {rate for name, rate in others.items() if not name.startswith("bert.embeddings")} == {0.1}


def test_layerwise_errors_name_the_lists_of_layers() -> None:
    model = Model()
    assert [group.pattern for group in layerwise_learning_rates(model, 0.1)] == [
        *("encoder.3.*", "encoder.2.*", "encoder.1.*", "encoder.0.*", "relative_position_bias", "scale", "embedding.*")
    ]
    with pytest.raises(ConfigurationError, match="Known: encoder"):
        layerwise_learning_rates(model, 0.1, layers="encodr")
    with pytest.raises(ConfigurationError, match="no ModuleList or Sequential"):
        layerwise_learning_rates(nn.Linear(2, 2), 0.1)
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        layerwise_learning_rates(model, 0.1, decay=1.0)
    with pytest.raises(ConfigurationError, match="above 0"):
        layerwise_learning_rates(model, 0.0)
