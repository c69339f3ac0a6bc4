"""The blocks of a model: members of a module list that are alike: ``layers.0``, ``layers.1``.

Lists may be nested: ``layers.3.experts.1`` is the innermost block and ``layers.3`` the outermost
block of a call in ``layers.3.experts.1.w1``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from partc.graph import Graph, value
from partc.graph.folds import list_member


def blocks_of(graph: Graph) -> set[str]:
    """The paths of all blocks: members of module lists that are alike.

    Two members are alike if at least half of their parameters have the same names and shapes.
    """
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
    """A module path and the paths of its parents: ``"h.0.mlp" -> "h", "h.0", "h.0.mlp"``."""
    parts = path.split(".") if path else []
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def outermost_block(node: fx.Node) -> str:
    """The outermost block that a call belongs to: ``layers.3`` for ``layers.3.experts.1.w1``.

    "" outside of module lists.
    """
    path, index = list_member(value(node).module)
    return f"{path}.{index}" if path else ""
