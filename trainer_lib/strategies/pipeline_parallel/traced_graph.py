"""`TracedGraph`: the operations of a forward that torch.export traced, cut into stages."""

import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from trainer_lib.foundation.errors import PreparationError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

_PIPE_SPLIT = "pippy::_pipe_split"  # what torch.distributed.pipelining.pipe_split() calls


@frozen_dataclass
class StageGraph:
    """The operations of a stage. Its arguments are what it received, inputs of the model, and weights.

    Args:
        module: Runs the operations, and returns a flat list.
        inputs: The numbers of the inputs of the model that it takes.
        weights: The names of the parameters and buffers that it takes.
    """

    module: fx.GraphModule
    inputs: Sequence[int]
    weights: Sequence[str]


class TracedGraph:
    """The operations of a forward in the order they run, without values.

    Operations that depend on no parameter and draw no random numbers, such as those of masks, run on each stage that
    needs them. Values of all others are computed on one stage, and passed on to those that need them.

    Args:
        module: The forward of an exported model.
        parameters: The names of the model's parameters.
        buffers: The names of its buffers.
    """

    def __init__(self, module: fx.GraphModule, parameters: Iterable[str], buffers: Iterable[str]) -> None:
        self._module = module
        self._parameters, self._buffers = set(parameters), set(buffers)
        self._nodes = list(module.graph.nodes)
        self._positions = {node: position for position, node in enumerate(self._nodes)}
        self._inputs = [node for node in self._nodes if node.op == "placeholder"]
        (self._output,) = [node for node in self._nodes if node.op == "output"]
        self._bound = self._find_bound()

    @property
    def length(self) -> int:
        """How many operations and values there are."""
        return len(self._nodes)

    def first_runs(self) -> dict[str, int]:
        """Return where each module begins to run, by name."""
        first: dict[str, int] = {}
        for node in self._operations():
            for name, _ in node.meta.get("nn_module_stack", {}).values():
                first.setdefault(name, self._positions[node])
        return first

    def pipe_splits(self) -> list[int]:
        """Return where the forward calls `pipe_split()`."""
        return [self._positions[node] for node in self._operations() if _is_pipe_split(node)]

    def first_uses(self) -> dict[str, int]:
        """Return where each parameter and buffer is used first, by the name that the graph has for it."""
        return {str(node.target): min(map(self._position, node.users)) for node in self._weights() if node.users}

    def stages(self, starts: Sequence[int]) -> list[StageGraph]:
        """Return the stages that begin at these operations, after the first one.

        Raises:
            PreparationError: If what a stage passes on is no tensor of a fixed shape.
        """
        return [self._stage(stage, starts) for stage in range(len(starts) + 1)]

    def _operations(self) -> Iterator[fx.Node]:
        return (node for node in self._nodes if node.op == "call_function")

    def _weights(self) -> Iterator[fx.Node]:
        names = self._parameters | self._buffers
        return (node for node in self._nodes if node.op == "get_attr" and node.target in names)

    def _position(self, node: fx.Node) -> int:
        """Return where a node runs; parts of a result belong to the operation that returned it."""
        while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return self._positions[node]

    def _find_bound(self) -> set[fx.Node]:
        """Return the operations that run on one stage only."""
        bound: set[fx.Node] = set()
        state = {_storage(node) for node in self._weights()}
        changed: set[int | None] = set()  # by operations that are bound, so whatever has that storage is bound too
        while True:
            before = len(bound)
            for node in self._operations():
                depends = any(source in bound or source.target in self._parameters for source in node.all_input_nodes)
                keeps_state = _changes_inputs(node) and _storage(node) in state
                if depends or keeps_state or _storage(node) in changed or _draws(node, self._module):
                    bound.add(node)
                if node in bound and _changes_inputs(node):
                    changed.add(_storage(node))
            if len(bound) == before:
                return bound

    def _stage_of(self, node: fx.Node, starts: Sequence[int]) -> int:
        return bisect_right(starts, self._position(node))

    def _live(self, stage: int, starts: Sequence[int]) -> list[fx.Node]:
        """Return the values that a stage receives, for itself or for later ones."""
        return [
            node
            for node in self._nodes
            if node in self._bound
            and self._stage_of(node, starts) < stage
            and any(user is self._output or self._stage_of(user, starts) >= stage for user in node.users)
        ]

    def _stage(self, stage: int, starts: Sequence[int]) -> StageGraph:
        received = self._live(stage, starts)
        last = stage == len(starts)
        results: Any = self._output.args[0] if last else self._live(stage + 1, starts)
        if not last:
            _check_passed_on(stage, results)
        kept = [
            node
            for node in self._operations()
            if _changes_inputs(node) and (node not in self._bound or self._stage_of(node, starts) == stage)
        ]
        self._check_mutations(stage, received, kept)
        needed = _needed([*_nodes_in(results), *kept], received)
        inputs = [number for number, node in enumerate(self._inputs) if node in needed]
        weights = [node for node in self._weights() if node in needed]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*received, *(self._inputs[number] for number in inputs), *weights):
            copies[node] = graph.placeholder(node.name)
        changed = {_storage(node) for node in kept}
        for node in received:
            if _storage(node) in changed:  # torch changes no leaf in place
                copies[node] = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
        for node in self._nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(fx.map_arg(list(results), copies.__getitem__))
        return StageGraph(fx.GraphModule(self._module, graph), inputs, [str(node.target) for node in weights])

    def _check_mutations(self, stage: int, received: Sequence[fx.Node], kept: Sequence[fx.Node]) -> None:
        """Raise if a stage changes a value in place of which it also received a view."""
        storages = [_storage(node) for node in received]
        for node in kept:
            if storages.count(_storage(node)) > 1:
                raise PreparationError(
                    f"The model changes a value in place on stage {stage} ({_where(node)}), and passes views of it "
                    "from stage to stage, which are tensors of their own there. Use the operation that returns a new "
                    "tensor, or name other blocks (blocks= of TorchPipelineParallelConfig)."
                )


def _is_pipe_split(node: fx.Node) -> bool:
    return getattr(getattr(node.target, "_schema", None), "name", "") == _PIPE_SPLIT


def _changes_inputs(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and bool(node.all_input_nodes)


def _draws(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether an operation draws random numbers, or one inside it does."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    targets = [source.target for source in node.all_input_nodes if source.op == "get_attr"]
    graphs = [part for name, part in module.named_children() if name in targets and isinstance(part, fx.GraphModule)]
    return any(_draws(other, graph) for graph in graphs for other in graph.graph.nodes)


def _needed(wanted: Iterable[fx.Node], received: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that compute the wanted ones from what a stage received."""
    needed: set[fx.Node] = set()
    pending, known = list(wanted), set(received)
    while pending:
        node = pending.pop()
        if node not in needed and node not in known:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed


def _nodes_in(results: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(results, found.append)
    return found


def _check_passed_on(stage: int, nodes: Sequence[fx.Node]) -> None:
    if not nodes:
        raise PreparationError(
            f"Stage {stage} of the model computes nothing that a later stage needs. Name other blocks (blocks= of "
            "TorchPipelineParallelConfig), to cut the model elsewhere."
        )
    for node in nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not all(type(size) is int for size in value.shape):
            kind = "a tensor whose shape depends on values" if isinstance(value, Tensor) else type(value).__name__
            raise PreparationError(
                f"A stage of the model would pass on {kind} ({_where(node)}), and stages pass on tensors of "
                "fixed shapes. Name other blocks (blocks= of TorchPipelineParallelConfig), to cut the model elsewhere."
            )


def _storage(node: fx.Node) -> int | None:
    """Return the identity of a value's memory, which it shares with its views."""
    value: Any = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None  # pyright: ignore[reportPrivateUsage] - torch has no public identity of a storage


def _where(node: fx.Node) -> str:
    """Return the operation, and the innermost module that runs it."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack", {})
    names = [name for name, _ in stack.values() if name]
    return f"{node.target}{f' in {names[-1]}' if names else ''}"
