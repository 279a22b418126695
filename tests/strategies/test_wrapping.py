"""Which modules are sharded on their own, and which are left whole."""

from typing import Any

import pytest
from torch import nn

from tests.strategies.sharded import Block, Stack, Tied
from trainer_lib import ConfigurationError, FullyShardedDataParallelPlugin
from trainer_lib.strategies.fsdp.wrap_policy import ignored_modules, modules_to_wrap


def _wrapped(model: nn.Module, ignored: Any = None, **plugin: Any) -> list[str]:
    return list(modules_to_wrap(model, FullyShardedDataParallelPlugin(**plugin), ignored_modules(model, ignored)))


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def test_repeated_blocks_by_default() -> None:
    assert _wrapped(Stack()) == BLOCKS
    assert _wrapped(Stack(), auto_wrap_policy="transformer_based_wrap") == BLOCKS
    assert _wrapped(nn.Linear(2, 2)) == [], "a model without blocks is sharded as one"
    assert _wrapped(Stack(), auto_wrap_policy="no_wrap") == []
    assert _wrapped(Stack(), ignored=r"blocks\.[01]") == ["blocks.2"]


def test_the_classes_that_a_model_names_come_first() -> None:
    model: Any = Stack()
    model._no_split_modules = ["LayerNorm", "NotHere"]
    assert _wrapped(model) == [f"{name}.norm" for name in BLOCKS]
    model._no_split_modules = ["NotHere"]
    assert _wrapped(model) == BLOCKS


def test_classes_and_their_names() -> None:
    for policy in ({"auto_wrap_policy": [Block]}, {"auto_wrap_policy": Block}, {"auto_wrap_policy": {"Block"}}):
        assert _wrapped(Stack(), **policy) == BLOCKS
    inside = [*BLOCKS[:1], "blocks.0.norm"]
    assert _wrapped(Stack(), transformer_cls_names_to_wrap=["Block", "LayerNorm"])[:2] == inside


def test_functions_are_asked_as_by_fsdp1() -> None:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    asked: list[tuple[str, bool, int]] = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or type(module) is nn.LayerNorm

    assert _wrapped(Stack(1), auto_wrap_policy=policy) == ["blocks.0.norm"]
    assert asked[0] == ("Stack", True, 301)
    assert ("LayerNorm", False, 20) in asked
    assert asked[-1] == ("Stack", False, 281), "what is inside of a wrapped module counts no more"
    assert _wrapped(Stack(), auto_wrap_policy=ModuleWrapPolicy({Block})) == BLOCKS
    assert _wrapped(Stack(), auto_wrap_policy=size_based_auto_wrap_policy) == []
    assert _wrapped(Stack(), auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True)[0] == "first"


def test_sizes() -> None:
    assert _wrapped(Stack(), min_num_params=100) == BLOCKS
    assert _wrapped(Stack(1), min_num_params=80) == ["first", "blocks.0", "blocks.0.outer"], "97 are left in the block"
    assert _wrapped(Stack(1), min_num_params=98) == ["blocks.0"]
    attention = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 100))
    # Its forward takes the weights of the layer inside, which would not be gathered for it.
    assert _wrapped(attention, min_num_params=50) == ["1"]


def test_what_shares_a_weight_is_gathered_together() -> None:
    assert _wrapped(Tied()) == ["blocks.2"]
    inside = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inside[1].weight = inside[0].weight
    model = nn.Sequential(inside, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert _wrapped(model) == ["0", "1"], "a tie inside of a block stays there"


def test_names_that_match_nothing_are_told_with_the_candidates() -> None:
    with pytest.raises(ConfigurationError) as caught:
        _wrapped(Stack(), transformer_cls_names_to_wrap=["Bolck"])
    assert str(caught.value) == (
        "This Stack has no module of the class 'Bolck' to shard separately. Did you mean 'Block'? "
        "Known: Block, LayerNorm, Linear, ModuleList, Stack."
    )
    with pytest.raises(ConfigurationError, match="no module of the class 'Conv2d' to shard"):
        _wrapped(Stack(), auto_wrap_policy=[nn.Conv2d])
    with pytest.raises(ConfigurationError, match=r"finds no repeated blocks in this Linear.* Known: Linear"):
        _wrapped(nn.Linear(2, 2), auto_wrap_policy="transformer_based_wrap")
    with pytest.raises(
        ConfigurationError, match=r"ignored_modules='lst' matches no module's name. Did you mean 'last'"
    ):
        _wrapped(Stack(), ignored="lst")
    with pytest.raises(ConfigurationError, match="ignored_modules holds a Linear that is not in this Stack"):
        _wrapped(Stack(), ignored=[nn.Linear(2, 2)])
    with pytest.raises(ConfigurationError, match=r"must return True or False .* got None"):
        _wrapped(Stack(), auto_wrap_policy=lambda **asked: None)


def test_what_is_ignored_is_so_with_all_inside() -> None:
    model = Stack()
    assert ignored_modules(model, None) == set()
    assert ignored_modules(model, [model.blocks[0]]) == set(model.blocks[0].modules())
    assert ignored_modules(model, r"blocks\.\d\.norm") == {block.norm for block in model.blocks}
