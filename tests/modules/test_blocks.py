"""Repeated blocks are found as a reader of the model would name them."""

from torch import nn

from trainer_lib.modules.blocks import repeated_blocks


class _Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(experts))


def test_blocks_of_a_list() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "layers": nn.ModuleList(_Block() for _ in range(3))})
    assert list(repeated_blocks(model)) == ["layers.0", "layers.1", "layers.2"]


def test_the_outermost_blocks_count() -> None:
    assert list(repeated_blocks(nn.ModuleList(_Block(experts=2) for _ in range(2)))) == ["0", "1"]


def test_stages_are_taken_apart() -> None:
    stages = nn.Sequential(*(nn.Sequential(_Block(), _Block()) for _ in range(2)))
    assert list(repeated_blocks(stages)) == ["0.0", "0.1", "1.0", "1.1"]


def test_stacks_of_leaves_are_blocks_themselves() -> None:
    rows = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    assert list(repeated_blocks(rows)) == ["0", "1"]


def test_leaves_and_single_modules_are_no_blocks() -> None:
    assert not repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert not repeated_blocks(nn.ModuleList([_Block(), nn.Sequential(nn.ReLU())]))
