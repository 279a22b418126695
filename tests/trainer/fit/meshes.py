"""The meshes that runs are tested on, and the table of docs/parallelism.md that follows from them.

`python -m tests.trainer.fit.meshes` writes the table.
"""

import re
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

from tests.worlds import run_world
from trainer_lib import Accelerator, ParallelismConfig
from trainer_lib.foundation.errors import TrainerLibError

# Processes, and sizes of the mesh.
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp_size": 2}),
    "dp2": (2, {"dp_replicate_size": 2}),
    "tp4": (4, {"tp_size": 4}),
    "tp2_dp2": (4, {"dp_replicate_size": 2, "tp_size": 2}),
    "tp2_fsdp2": (4, {"dp_shard_size": 2, "tp_size": 2}),
    "pp2": (2, {"pp_size": 2}),
    "pp2_traced": (2, {"pp_size": 2}),  # stages are cut by tracing
    "pp2_dp2": (4, {"dp_replicate_size": 2, "pp_size": 2}),
    "pp2_dp2_traced": (4, {"dp_replicate_size": 2, "pp_size": 2}),
    "pp2_fsdp2": (4, {"dp_shard_size": 2, "pp_size": 2}),
    "pp2_tp2": (4, {"tp_size": 2, "pp_size": 2}),
    "cp2": (2, {"cp_size": 2}),
    "sp2": (2, {"sp_size": 2}),
    "pp2_cp2": (4, {"pp_size": 2, "cp_size": 2}),
    "pp2_sp2": (4, {"pp_size": 2, "sp_size": 2}),
    "tp2_cp2": (4, {"tp_size": 2, "cp_size": 2}),
    "tp2_sp2": (4, {"tp_size": 2, "sp_size": 2}),
    "tp2_cp2_dp2": (8, {"dp_replicate_size": 2, "tp_size": 2, "cp_size": 2}),
    "tp2_cp2_fsdp2": (8, {"dp_shard_size": 2, "tp_size": 2, "cp_size": 2}),
    "tp2_sp2_fsdp2": (8, {"dp_shard_size": 2, "tp_size": 2, "sp_size": 2}),
    "pp2_tp2_cp2": (8, {"pp_size": 2, "tp_size": 2, "cp_size": 2}),
    "pp2_sp2_fsdp2": (8, {"dp_shard_size": 2, "pp_size": 2, "sp_size": 2}),
    "tp2_hsdp4": (8, {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}),
}
# Meshes with cut sequences and whole matrices.
OF_SEQUENCES: dict[str, dict[str, Any]] = {
    "cp2_dp2": {"cp_size": 2, "dp_replicate_size": 2},
    "cp2_fsdp2": {"cp_size": 2, "dp_shard_size": 2},
    "sp2_fsdp2": {"sp_size": 2, "dp_shard_size": 2},
    "sp2_dp2": {"sp_size": 2, "dp_replicate_size": 2},
}
# Meshes over whose ranks of tp_size experts are spread.
OF_EXPERTS = ("tp2_fsdp2", "tp2_cp2", "tp2_sp2", "pp2_tp2", "tp2_dp2")

_SHARING = ("tp_size", "pp_size", "cp_size", "sp_size")  # ranks that differ in these read the same batches

PAGE = Path(__file__).parents[3] / "docs" / "parallelism.md"
_NOTE = "<!-- Written by python -m tests.trainer.fit.meshes -->"
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "pp_size")
_EXPERTS = "experts (`tp_size`)"


def replicas_of(mesh: str) -> int:
    """Return how many ranks of a mesh read different batches."""
    ranks, sizes = MESHES[mesh]
    return ranks // prod(sizes.get(name, 1) for name in _SHARING)


def table() -> str:
    """Return which dimensions of a mesh combine: those of a tested mesh do, others are refused."""
    tested = {pair for _, sizes in MESHES.values() for pair in combinations(sorted(sizes), 2)}
    tested |= {pair for sizes in OF_SEQUENCES.values() for pair in combinations(sorted(sizes), 2)}
    with_experts = {name for mesh in OF_EXPERTS for name in MESHES[mesh][1]}
    notes: list[str] = []

    def cell(row: str, column: str) -> str:
        if row == column:
            return ""
        if tuple(sorted((row, column))) in tested:
            return "yes"
        error = _refusal({row: 2, column: 2})
        if error not in notes:
            notes.append(error)
        return f"no ({notes.index(error) + 1})"

    lines = [f"| | {' | '.join(f'`{name}`' for name in _SIZES)} |", f"|---|{'---|' * len(_SIZES)}"]
    lines += [f"| `{row}` | {' | '.join(cell(row, column) for column in _SIZES)} |" for row in _SIZES]
    experts = ["yes" if name in with_experts else "not tested" for name in _SIZES]
    lines.append(f"| {_EXPERTS} | {' | '.join(experts)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def _refusal(sizes: dict[str, Any]) -> str:
    """Return the error of a mesh that is refused."""

    def error() -> str | None:
        try:
            Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
        except TrainerLibError as refused:
            return str(refused)
        return None

    found: Any = run_world(error, (), 4)[0]
    assert found is not None, f"{sizes} is neither tested nor refused"
    return found


def with_table(text: str) -> str:
    """Return the text of the page with its table."""
    replaced, count = re.subn(
        rf"({_NOTE}\n\n).*?\n(?=\n<!-- end -->)", lambda match: f"{match[1]}{table()}\n", text, flags=re.DOTALL
    )
    assert count == 1, f"{PAGE} has {count} places for its table"
    return replaced


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
