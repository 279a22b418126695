"""Which tensors are aliases, and which share storage."""

import safetensors.torch
import torch

from trainer_lib.tensor_files.tensor_storage import clean_state_dict_for_safetensors, id_tensor_storage, without_aliases


def test_the_first_of_equal_views_is_kept() -> None:
    weight = torch.ones(4, 4)
    state = {"a": weight, "b": weight, "c": weight[:2], "d": weight.clone(), "e": weight[:2]}
    kept, aliases = without_aliases(state)
    assert list(kept) == ["a", "c", "d"]
    assert aliases == {"b": "a", "e": "c"}


def test_what_has_no_memory_is_never_one() -> None:
    state = {
        "a": torch.empty(0),
        "b": torch.empty(0),
        "c": torch.empty(2, device="meta"),
        "d": torch.empty(2, device="meta"),
    }
    assert list(without_aliases(state)[0]) == ["a", "b", "c", "d"]


def test_a_cleaned_state_dict_can_be_saved_by_the_formats_own_library() -> None:
    weight = torch.arange(16.0).view(4, 4)
    state = {"a": weight, "b": weight, "half": weight[:2], "turned": weight.T}
    cleaned = clean_state_dict_for_safetensors(state)
    read = safetensors.torch.load(safetensors.torch.save(cleaned))
    assert list(cleaned) == ["a", "half", "turned"]
    assert all(torch.equal(read[name], state[name]) for name in cleaned)


def test_memory_has_an_identity() -> None:
    weight = torch.ones(4)
    assert id_tensor_storage(weight) == id_tensor_storage(weight[1:]) != id_tensor_storage(weight.clone())
    assert id_tensor_storage(weight)[2] == 16
    meta = torch.empty(4, device="meta")
    assert id_tensor_storage(meta) == (torch.device("meta"), 0, 16)
