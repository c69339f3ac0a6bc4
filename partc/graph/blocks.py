"""Which modules of a list are alike, so that they count as the blocks of a model, and in which of
them a call stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from partc.graph import Graph, value
from partc.graph.folds import list_member


def blocks_of(graph: Graph) -> set[str]:
    """The paths of modules in lists that are alike: half of their parameters have equal shapes."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, node in graph.params.items():
        for path in prefixes(name):
            if path.rpartition(".")[2].isdigit():
                shapes.setdefault(path, {})[name.removeprefix(path)] = value(node).shape
    lists: dict[str, list[str]] = {}
    for path in shapes:
        lists.setdefault(path.rpartition(".")[0], []).append(path)
    return {
        path
        for paths in lists.values()
        for path in paths
        if any(_alike(shapes[path], shapes[other]) for other in paths if other != path)
    }


def _alike(a: Mapping[str, tuple[int, ...]], b: Mapping[str, tuple[int, ...]]) -> bool:
    return 2 * sum(b.get(name) == shape for name, shape in a.items()) >= max(len(a), len(b))


def prefixes(path: str) -> Iterator[str]:
    """``"h"``, ``"h.0"``, ``"h.0.mlp"`` of ``"h.0.mlp"``."""
    parts = path.split(".") if path else []
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def outermost_block(node: fx.Node) -> str:
    """The member of an outermost list of modules in which a call stands, "" if in none."""
    path, index = list_member(value(node).module)
    return f"{path}.{index}" if path else ""
