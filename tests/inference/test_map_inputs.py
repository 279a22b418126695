"""`map_between_processes`: results in the order of the inputs, on all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pages import run_example
from tests.worlds import run_world
from trainer_lib import PartialState
from trainer_lib.foundation.errors import ConfigurationError, WorldError
from trainer_lib.inference import map_between_processes


def _lengths(count: int, options: dict[str, Any]) -> tuple[list[Any], list[list[str]]]:
    calls: list[list[str]] = []

    def lengths(words: list[str]) -> list[tuple[str, int]]:
        calls.append(words)
        return [(word, len(word)) for word in words]

    words = ["x" * (7 * number % 11) for number in range(count)]
    return map_between_processes(lengths, words, **options), calls


@pytest.mark.parametrize("processes", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_results_are_in_the_order_of_the_inputs(processes: int) -> None:
    for options in ({}, {"batch_size": 3}, {"batch_size": 4, "key": len}):
        for count in (0, 1, 11):
            results = run_world(_lengths, (count, options), processes)
            for result, _ in results:
                assert result == [("x" * (7 * number % 11), 7 * number % 11) for number in range(count)]
            assert sum(len(words) for _, calls in results for words in calls) == count  # each once
    for rank, (_, calls) in enumerate(run_world(_lengths, (11, {"batch_size": 2, "key": len}), processes)):
        ordered = sorted((7 * number % 11 for number in range(11)), reverse=True)
        batches = [ordered[start : start + 2] for start in range(0, 11, 2)]
        assert [[len(word) for word in words] for words in calls] == batches[rank::processes]


def _prompts_of_the_page(folder: Path) -> list[list[int]]:
    torch.seed()  # as processes that were not forked from one
    (own := folder / str(PartialState().process_index)).mkdir()
    return [prompt.tolist() for prompt in run_example("inference.md", "map_between_processes(", own)["prompts"]]


def test_the_example_of_the_page_on_two_processes(tmp_path: Path) -> None:
    """Both processes have the same prompts, and the assertion of the page holds."""
    pytest.importorskip("transformers")
    first, second = run_world(_prompts_of_the_page, (tmp_path,), timeout=300)
    assert first == second


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    def fails() -> str:
        def function(numbers: list[int]) -> list[int]:
            if 3 in numbers:
                raise ValueError("three")
            return numbers

        try:
            map_between_processes(function, range(4), title=None)
        except (ValueError, WorldError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = run_world(fails, (), 2)
    assert "map_between_processes" in first
    assert "three" in first
    assert second == "ValueError: three"


def test_one_result_for_each_input() -> None:
    with pytest.raises(ConfigurationError, match="returned 1 results for 2 inputs"):
        map_between_processes(lambda numbers: [sum(numbers)], [1, 2], batch_size=2, title=None)
    with pytest.raises(ConfigurationError, match="batch_size"):
        map_between_processes(lambda numbers: numbers, [1, 2], batch_size=0)


def test_only_rank_0_shows_progress(capfd: pytest.CaptureFixture[str]) -> None:
    map_between_processes(lambda numbers: numbers, range(4), title="prompts")
    lines = capfd.readouterr().err
    assert "prompts" in lines
    assert "4/4" in lines


@pytest.mark.filterwarnings("ignore")
def test_generated_texts_are_those_of_one_process() -> None:
    def generated() -> list[list[int]]:
        import transformers

        hf: Any = transformers
        torch.manual_seed(0)
        config = hf.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        model = hf.LlamaForCausalLM(config).eval()
        prompts = [torch.randint(3, 50, (length,)) for length in (3, 5, 4, 6, 2)]

        def generate(batch: list[torch.Tensor]) -> list[list[int]]:
            (prompt,) = batch
            return model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=6).tolist()

        assert PartialState().num_processes in (1, 2)
        return map_between_processes(generate, prompts, key=len, title=None)

    (alone,) = run_world(generated, (), 1)
    assert run_world(generated, (), 2) == [alone, alone]
