"""Tied parameters are found, and tied again after they came apart."""

import torch
from torch import nn

from trainer_lib.modules.weights.tied_parameters import find_tied_parameters, retie_parameters


def _tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    return model


def test_ties_survive_a_trip_through_the_meta_device() -> None:
    model = _tied()
    tied = find_tied_parameters(model)
    model.to("meta")
    model.to_empty(device="cpu")
    assert not find_tied_parameters(model)
    retie_parameters(model, tied)
    assert find_tied_parameters(model) == tied == [["embedding.weight", "head.weight"]]


def test_the_name_that_has_values_wins() -> None:
    model = _tied()
    tied = find_tied_parameters(model)
    model["embedding"].weight = nn.Parameter(torch.empty(4, 2, device="meta"))
    kept = model["head"].weight
    retie_parameters(model, tied)
    assert model["embedding"].weight is model["head"].weight is kept


def test_a_model_without_ties() -> None:
    assert not find_tied_parameters(nn.Linear(2, 2))
