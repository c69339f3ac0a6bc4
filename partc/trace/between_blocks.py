"""Give the calls that a model makes in its loop over blocks to the blocks.

``for block in self.blocks: x = x + block(x)`` records the ``add`` between two blocks, in neither of
them. Calls between two blocks that are the same in every turn of the loop become the end of the
block before them; the remaining ones become the beginning of the block behind. So do calls of a
module that all turns share, and of members of other lists: ``zip(self.norms, self.blocks)``. The
blocks are then complete and equal, so that a program has one function for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, takewhile
from typing import Any

from torch import fx

from partc.graph import Graph, innermost_block, literals, update, value
from partc.graph.draws import draws_of, set_site
from partc.graph.folds import CALL, DEPTHS, layer_path
from partc.graph.places import PIECES, is_one_call, place_of

Calls = Sequence[fx.Node]
LOOPED = 3  # so many calls of a module with the same calls between them are turns of a loop


@dataclass(frozen=True)
class _Block:
    """A member of a list, the range of positions in which its calls stand, and their number."""

    path: str
    first: int
    behind: int
    num: int


def adopt_between(forward: Calls) -> None:
    """Set the module path of every call between two blocks to one of the two blocks.

    ``forward``: all calls of the forward, in order. Of several lists that one loop goes through,
    the one with the most calls takes the members of the others: ``norms.3`` becomes
    ``blocks.3.norms``.
    """
    for depth in DEPTHS:
        done: set[str] = set()
        while True:
            lists = _lists(forward, depth)
            left = {path: blocks for path, blocks in lists.items() if path not in done}
            path = max(left, key=lambda p: _takes(left[p]), default="")
            if not path:
                break
            done.add(path)
            _adopt(forward, path, lists[path])


def _adopt(forward: Calls, path: str, blocks: Sequence[_Block]) -> None:
    """Give the calls of the loop over one list to its members."""
    if len(blocks) > 1:
        inside = [[n for n in forward[b.first : b.behind] if not _is_in(n, path)] for b in blocks]
        between = [forward[a.behind : b.first] for a, b in pairwise(blocks)]
        _fill(blocks, inside)
        _divide(forward, blocks, between)


def name_adopted(graph: Graph) -> None:
    """Name each draw that a block was given after the block: ``dropout#3`` --> ``h.3.dropout``.

    Blocks are then equal but for the path in front. ``graph.sites`` gets the site of every draw,
    with its name before.
    """
    draws = draws_of(graph)
    now = {value(node).site: value(node).site for node in draws}
    for node in draws:
        before, block = value(node).site, innermost_block(node)
        adopted = value(node).module != node.meta.get("custom", {}).get("module", "")
        if adopted and now[before] == before and not before.startswith(f"{block}."):
            word = before.partition("#")[0].rpartition(".")[2]
            names = (f"{block}.{word}#{i}" if i else f"{block}.{word}" for i in count())
            now[before] = next(name for name in names if name not in now.values())
    for node in draws:
        set_site(node, now[value(node).site])
    graph.sites = {site: before for before, site in now.items()}


def _lists(forward: Calls, depth: int) -> dict[str, list[_Block]]:
    """The blocks of each list of modules; no list whose members' calls are interleaved."""
    places: dict[str, dict[str, list[int]]] = {}
    for place, node in enumerate(forward):
        path, _, index = layer_path(_stands_in(node), depth).rpartition(".")
        if path:
            places.setdefault(path, {}).setdefault(index, []).append(place)
    lists = {
        path: [_Block(f"{path}.{i}", min(of[i]), max(of[i]) + 1, len(of[i])) for i in _sorted(of)]
        for path, of in places.items()
    }
    return {path: blocks for path, blocks in lists.items() if _in_order(blocks)}


def _sorted(numbers: Iterable[str]) -> list[str]:
    return sorted(numbers, key=lambda number: int(number.removeprefix(CALL)))


def _takes(blocks: Sequence[_Block]) -> tuple[bool, int]:
    """What decides which of several lists takes the members of the others: no calls of one module,
    and the most ops.
    """
    return not is_one_call(blocks[0].path), sum(b.num for b in blocks)


def _stands_in(node: fx.Node) -> str:
    """The path of the module that makes a call, or of the entry of a ParameterList that it reads.

    The latter where the module itself has the list: it goes through it as through blocks.
    """
    module = value(node).module
    for read in node.all_input_nodes:
        name = value(read).name if read.op == "placeholder" else ""
        if name.rpartition(".")[2].isdigit() and _is_above(module, name):
            return name
    return place_of(node)


def _is_above(module: str, path: str) -> bool:
    return not module or path.startswith(f"{module}.")


def _in_order(blocks: Sequence[_Block]) -> bool:
    return all(a.behind <= b.first for a, b in pairwise(blocks))


def _fill(blocks: Sequence[_Block], inside: Sequence[Calls]) -> None:
    """Give calls that stand amid a block's calls to the block, if all blocks have the same ones."""
    says = _how(blocks)
    if len({tuple(map(says, calls)) for calls in inside}) == 1:
        _give(blocks, inside)


def _divide(forward: Calls, blocks: Sequence[_Block], between: Sequence[Calls]) -> None:
    """Divide the calls between two blocks into the first one's end and the second one's beginning.

    The end is what all turns of the loop have in common behind a block, the last block included.
    The beginning is the rest. The first block gets one too, if the same calls stand before it.
    """
    longest = max(map(len, between))
    behind = forward[blocks[-1].behind : blocks[-1].behind + longest]
    says = _how(blocks)
    said = [[says(n) for n in calls] for calls in (*between, behind)]
    same = takewhile(lambda turns: len(set(turns)) == 1, zip(*said, strict=False))
    num = len([*same])
    _give(blocks, [calls[:num] for calls in (*between, behind)])
    rest = [each[num:] for each in said[:-1]]
    if rest[0] and all(each == rest[0] for each in rest):
        first = forward[max(blocks[0].first - len(rest[0]), 0) : blocks[0].first]
        begins = [says(n) for n in first] == rest[0]
        if is_one_call(blocks[0].path) and not begins and len(blocks) < LOOPED:
            return  # two calls of a module need not be turns of a loop
        _give(blocks, [first if begins else [], *(calls[num:] for calls in between)])


def _how(blocks: Sequence[_Block]) -> Callable[[fx.Node], tuple[object, ...]]:
    """The function that says what a call has in common with those of other turns of a loop."""
    return _says_of_call if is_one_call(blocks[0].path) else _says


def _is_in(node: fx.Node, path: str) -> bool:
    return place_of(node).startswith(f"{path}.")


def _says(node: fx.Node) -> tuple[object, ...]:
    """The op, literals, module (list indices as ``#``) and line: equal in every turn of a loop."""
    module = re.sub(r"\d+", "#", value(node).module)
    return node.target, literals(node), module, value(node).source


def _says_of_call(node: fx.Node) -> tuple[object, ...]:
    """As ``_says``; which piece of a tensor a call takes may differ from turn to turn."""
    target, _, module, source = _says(node)
    schema: Any = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    pieces = [i for i, name in enumerate(names) if (node.target, name) in PIECES]
    return target, literals(node, but=pieces), module, source


def _give(blocks: Sequence[_Block], calls: Sequence[Calls]) -> None:
    for block, own in zip(blocks, calls, strict=True):
        for node in own:
            if is_one_call(block.path):
                update(node, at=block.path)
            else:
                update(node, module=_path_in(block.path, node), at="")


def _path_in(block: str, node: fx.Node) -> str:
    """The module path of a call that is given to a block: ``blocks.3.norms`` of ``norms.3``.

    A call of a module around the list, and one without parameters, has the block's own path.
    """
    module, path = value(node).module, block.rpartition(".")[0]
    reads = any(value(n).kind == "param" for n in node.all_input_nodes)
    if _is_above(module, path) or not reads:
        return block
    depth = sum(part.isdigit() for part in block.split("."))
    member = layer_path(module, depth)
    inner = (member.rpartition(".")[0] + module.removeprefix(member)).split(".")
    pairs = zip(path.split("."), inner, strict=False)
    shared = [*takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return ".".join([block, *inner[len(shared) :]])
