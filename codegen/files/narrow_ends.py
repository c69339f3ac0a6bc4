"""The lines of a stage's ``finish`` that start sums of gradients with fewer bytes.

In: the sums that the graph has behind all microbatches, each of the gradients of one block or of
what stands outside of blocks. Out: for equal blocks a loop,

    for layer in self.blocks:
        flat, grads = joined(self.partials.take([*layer.parameters()]))
        done = Int8Sum(flat, 2, 256, [layer.w_residual_dp, ...], self.dp)
        reduced.append((grads, done))

and for others a line each. All sums of a step start before one is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from partc.codegen.calls.backends import c10d
from partc.codegen.files.spelling import read
from partc.codegen.helpers.needed import Helpers
from partc.codegen.repeats.own_names import own_name
from partc.codegen.text import Line
from partc.graph import collectives, value
from partc.graph.moves import kind_of, wire_of
from partc.plan.wires import OWN, THRESHOLD, WIRES
from partc.quoting import literal

if TYPE_CHECKING:
    from partc.codegen.files.stages import StageText


@dataclass(frozen=True)
class NarrowEnd:
    """A sum with fewer bytes, behind all microbatches: the parameters of its gradients, and the
    buffers of what it has not sent. The node is in no graph any more.
    """

    node: fx.Node
    params: tuple[str, ...]
    state: tuple[fx.Node, ...]

    @property
    def how(self) -> tuple[object, ...]:
        """What is equal for sums that one line of a loop starts."""
        known = self.node.kwargs
        words = ("wire", "size", THRESHOLD, "start", "axis", "num")
        return (*(known.get(name) for name in words), *self.cuts)

    @property
    def cuts(self) -> list[dict[str, int]]:
        """How each gradient is scattered: on which dim, and how many parts that has; else empty."""
        k: dict[str, Any] = dict(self.node.kwargs)
        if kind_of(self.node) != "reduce_scatter":
            return []
        if self.node.target not in collectives.JOINED:
            return [{name: k[name] for name in ("num", "dim", "outer") if name in k}]
        pairs = zip(k["dims"], k["outers"], strict=True)
        return [{"num": k["num"], "dim": dim, "outer": outer} for dim, outer in pairs]


@dataclass(frozen=True)
class Place:
    """A sum of one block's gradients: the list, the block's number in it, and names in the block.

    ``site``: the name that the sum draws random numbers for, as seen from the block.
    """

    listed: str
    number: int
    params: tuple[str, ...]
    state: tuple[str, ...]
    site: str
    how: tuple[object, ...]

    @property
    def form(self) -> tuple[object, ...]:
        """What is equal for blocks that one loop serves."""
        return self.params, self.state, self.site, self.how


def lent(ends: Sequence[NarrowEnd]) -> dict[str, Any]:
    """What classes of blocks are told: the buffers that ``finish`` reads, and whether it draws for
    sums of blocks, under their names.
    """
    state = frozenset(value(node).name for end in ends for node in end.state)
    return {"lent": state, "lends_name": any(WIRES[wire_of(end.node)].drawn for end in ends)}


Block = list[tuple[Place, NarrowEnd]]  # the sums of one block, in order


@dataclass(frozen=True)
class NarrowEnds:
    """Prints these sums of one stage.

    ``attributes``: the paths of parameters and buffers in the stage (``blocks.0.w``). ``lists``:
    the paths in the model of the blocks of each list. ``literal_of`` writes a name in the model as
    an expression.
    """

    sums: Sequence[NarrowEnd]
    params: Mapping[str, fx.Node]
    attributes: Mapping[fx.Node, str]
    lists: Mapping[str, Sequence[str]]
    helpers: Helpers
    literal_of: Callable[[str], str]

    @classmethod
    def of(cls, stage: StageText) -> NarrowEnds:
        lists = {each.attribute: each.run.layers for each in stage.classes.values()}
        return cls(
            stage.ends.narrow, stage.graph.params, stage.attributes, lists, stage.helpers,
            stage.site_literal,
        )  # fmt: skip

    def lines(self) -> Iterator[Line]:
        """The lines of ``finish``, which has made ``reduced`` before them."""
        looped = {listed: of for listed, of in self._by_list().items() if self._alike(listed, of)}
        begun: set[str] = set()
        for end in self.sums:
            place = self._place(end)
            if place is None or place.listed not in looped:
                yield from self._alone(end)
            elif place.listed not in begun:
                begun.add(place.listed)
                yield from self._loop(place.listed, looped[place.listed])

    def _alone(self, end: NarrowEnd) -> Iterator[Line]:
        """The lines that start one sum outside of a loop."""
        params = [read(self.attributes[self.params[name]]) for name in end.params]
        state = [read(self.attributes[node]) for node in end.state]
        yield from self._start(end, params, params, state, self.literal_of(value(end.node).site))

    def _start(
        self,
        end: NarrowEnd,
        params: Sequence[str],
        each: Sequence[str],
        state: Sequence[str],
        site: str,
        indent: int = 0,
    ) -> Iterator[Line]:
        """The lines that start one sum, of the texts of its parameters, buffers and name.

        ``params``: as they are taken together, ``each``: one by one.
        """
        taken = f"self.partials.take([{', '.join(params)}])"
        drawn = WIRES[wire_of(end.node)].drawn
        own = [f"self.{end.node.kwargs['axis']}_rank"] * (drawn == OWN)
        key = f"self.rng.of_step({', '.join([site, *own])})" if drawn else ""
        if end.cuts:
            yield Line(f"grads = {taken}", indent=indent)
            yield from self._laid_out(end, each, indent)
            call = c10d.narrow_scatter(end.node, "grads", key, self.helpers)
            yield Line(f"reduced.append({call})", indent=indent)
            return
        yield Line(f"flat, grads = {self.helpers.use('joined')}({taken})", indent=indent)
        call = c10d.narrow_sum(end.node, ["flat", "[*grads.values()]", key], state, self.helpers)
        yield Line(f"done = {call}", indent=indent)
        yield Line("reduced.append((grads, done))", indent=indent)

    def _laid_out(self, end: NarrowEnd, each: Sequence[str], indent: int) -> Iterator[Line]:
        """The lines before a reduce-scatter for gradients that are not sharded on dim 0."""
        for param, cut in zip(each, end.cuts, strict=True):
            entry = f"grads[{param}]"
            laid_out = c10d.laid_out(entry, cut, self.helpers)
            if laid_out != entry:
                yield Line(f"{entry} = {laid_out}", indent=indent)

    # loops ---------------------------------------------------------------------------------------
    def _by_list(self) -> dict[str, dict[int, Block]]:
        """The sums that are of one block each, by list and by the block's number in the list."""
        found: dict[str, dict[int, Block]] = {}
        for end in self.sums:
            if (place := self._place(end)) is not None:
                blocks = found.setdefault(place.listed, {})
                blocks.setdefault(place.number, []).append((place, end))
        return found

    def _place(self, end: NarrowEnd) -> Place | None:
        """The block of a list that all gradients and buffers of a sum are of; None without one."""
        nodes = [self.params[name] for name in end.params]
        paths = [self.attributes[node].split(".", 2) for node in (*nodes, *end.state)]
        if any(len(path) < 3 or path[:2] != paths[0][:2] for path in paths):
            return None
        names = [path[2] for path in paths]
        listed, number, _ = paths[0]
        site = own_name(self.lists[listed][int(number)], value(end.node).site)
        params, state = names[: len(nodes)], names[len(nodes) :]
        return Place(listed, int(number), tuple(params), tuple(state), site, end.how)

    def _alike(self, listed: str, blocks: Mapping[int, Block]) -> bool:
        """Whether one loop serves a list of blocks: all of them have the same sums."""
        forms = [[place.form for place, _ in sums] for sums in blocks.values()]
        return {*blocks} == {*self._parameters_of(listed)} and all(f == forms[0] for f in forms)

    def _parameters_of(self, listed: str) -> dict[int, set[str]]:
        """The names of parameters in each block of a list."""
        found: dict[int, set[str]] = {}
        for node in self.params.values():
            path = self.attributes[node].split(".", 2)
            if len(path) == 3 and path[0] == listed:
                found.setdefault(int(path[1]), set()).add(path[2])
        return found

    def _loop(self, listed: str, blocks: Mapping[int, Block]) -> Iterator[Line]:
        """The lines that start the sums of all blocks of a list."""
        names = self._parameters_of(listed)
        yield Line(f"for layer in self.{listed}:")
        for place, end in blocks[min(blocks)]:
            whole = names[place.number] == {*place.params}
            each = [f"layer.{name}" for name in place.params]
            params = ["*layer.parameters()"] if whole else each
            state = [f"layer.{name}" for name in place.state]
            site = "f" + literal("{layer.name}." + _escaped(place.site))
            yield from self._start(end, params, each, state, site, 1)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
