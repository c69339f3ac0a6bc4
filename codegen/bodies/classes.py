"""The class that is printed for a run of equal blocks: parameters, ``forward`` and ``backward``.

All its methods are printed from the calls of the run's first block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from partc.codegen.bodies.block_arguments import (
    ARGUMENT_TYPES,
    LEFT,
    SAVED,
    argument_name,
    main_names,
    passed,
    reads_microbatch,
    signature,
)
from partc.codegen.bodies.block_body import BlockBody
from partc.codegen.bodies.block_gathers import first_gathers, gather_lines, take_whole
from partc.codegen.bodies.block_method import BlockMethod
from partc.codegen.bodies.block_results import (
    buffer_updates,
    grad_parts,
    result_type,
    returned,
    stored_grads,
    written_buffers,
)
from partc.codegen.bodies.frees import Ledger, free_blocks, held_inside
from partc.codegen.bodies.inner_blocks import (
    SAVED_WITH_LISTS,
    give_attributes,
    lists_within,
    read_around,
    sides_within,
)
from partc.codegen.bodies.tables import TABLES
from partc.codegen.calls.backends import c10d
from partc.codegen.calls.expressions import ADDS, SUMS, Adds
from partc.codegen.calls.moved_names import of_turn
from partc.codegen.calls.names import wishes
from partc.codegen.calls.scope import Scope, attributes
from partc.codegen.calls.settle import MARK
from partc.codegen.calls.statements import Statement
from partc.codegen.calls.transfers import weights_of
from partc.codegen.calls.wishes import Wishes
from partc.codegen.helpers.needed import Helpers
from partc.codegen.repeats.equal import ends_step, made_in_step
from partc.codegen.repeats.own_names import NUMBER, has, name_in, own_name, that_all_have
from partc.codegen.repeats.runs import Run
from partc.codegen.repeats.slots import Interface, outside
from partc.codegen.text import Line, Text, block, wrap
from partc.graph import Graph, Kind, Phase, tensor_args, value
from partc.graph.draws import draws_numbers
from partc.graph.moves import is_keyed, moves


@dataclass(eq=False)
class BlockClass:
    """The class of a run of equal blocks.

    ``forward``, ``backward`` and ``weights`` say what each phase reads and returns. ``attribute``
    is the list of the class's instances in the step module: ``layers`` for ``self.layers[3]``.
    """

    graph: Graph
    run: Run
    forward: Interface
    backward: Interface | None
    name: str
    attribute: str
    helpers: Helpers
    adds: Adds = ADDS
    weights: Interface | None = None
    is_distributed: bool = True  # whether it is made for a rank of a mesh
    span: str = ""  # its blocks as comments show them: "layers.0 .. 7"
    suffixes: dict[str, str] = field(
        default_factory=dict
    )  # a parameter's name from the block on -> its attribute: mlp.up.weight -> mlp_up_weight

    lead: BlockClass | None = None  # of the run whose class serves this one too, if it is another
    sized_like: BlockClass | None = None  # of an earlier run of its kin, with blocks of its sizes
    lent: frozenset[str] = frozenset()  # buffers of blocks that the step itself reads and writes
    lends_name: bool = False  # whether the step reads the blocks' names
    inner: list[BlockClass] = field(default_factory=list)  # of blocks inside of its first block
    is_inner: bool = False  # whether it is one of those
    codes: list[str] = field(default_factory=list)  # the methods' statements, without comments
    texts: dict[fx.Node, str] = field(default_factory=dict)  # marks of values in earlier methods

    def __post_init__(self) -> None:
        numbers = [] if self.run.is_called else self.run.numbers
        scope = attributes(self.graph.mesh, *(row.name for row in numbers))
        used = {n for side in self.sides for slot in side.of("own") for n in slot.nodes}
        known = {*self.graph.params, *self.graph.buffers}
        written = self._names_written() | that_all_have(self.lent, self.run.layers, known)
        attributes_of_inner = give_attributes(self, scope)
        for name, node in {**self.graph.params, **self.graph.buffers}.items():
            suffix = self.own(name)
            if suffix and name not in attributes_of_inner and (node in used or name in written):
                self.suffixes[suffix] = scope.fresh(suffix.replace(f".{NUMBER}", ""))
        self.suffixes |= {self.own(name): path for name, path in attributes_of_inner.items()}

    @cached_property
    def wishes(self) -> Wishes:
        """The wanted names of values in all methods."""
        if self.lead is None:
            return wishes(self.graph, self.run.module, main_names(self.sides))
        here, there = ([n for side in cls.sides for n in (*outside(side.group), *side.group.nodes)]
                       for cls in (self.lead, self))  # fmt: skip
        return self.lead.wishes.at(there, here)

    @cached_property
    def scope(self) -> Scope:
        """The names in all methods: one means the same value in each."""
        counts = any(map(reads_microbatch, self.sides))
        numbers = [row.name for row in self.run.numbers] if self.run.is_called else []
        return Scope([*ARGUMENT_TYPES, *self.helpers.names, *(["i"] if counts else []), *numbers])

    def own(self, name: str, layer: str = "") -> str:
        """The name of a block's parameter or buffer as seen from the block; "" of no block's.

        ``layer``: the block, the first one if none is named.
        """
        layer = layer or self.run.layers[0]
        return own_name(layer, name) if has(layer, name, self.run.elsewhere) else ""

    def _names_written(self) -> set[str]:
        """Names of parameters whose gradients, and of buffers whose new values, the block makes.

        A block may make a gradient without reading the weight, where what follows from the weight
        alone (a cast) is computed outside of the block.
        """
        if self.run.is_called:
            return {total.param for side in self.sides for total in side.totals}
        inside = {n for side in self.sides for n in side.group.nodes}
        outputs = self.graph.outputs
        grads = {n for n, d in outputs.grads.items() if made_in_step(self.graph, d) in inside}
        return grads | {name for name, new in outputs.buffers.items() if new in inside}

    @property
    def saved_type(self) -> str:
        """The type of what one method saves for another."""
        return SAVED_WITH_LISTS if self.inner else SAVED

    def held(self, side: Interface) -> int:
        """The bytes that a method holds while it runs beside what it is given and leaves."""
        ledgers = {each: self._method(each).ledger for each in self.sides}
        return held_inside([*ledgers.values()], ledgers[side])

    @property
    def draws(self) -> bool:
        """Whether the block draws random numbers."""
        inside = [node for side in self.sides for node in side.group.nodes]
        return any(draws_numbers(node) or is_keyed(node) for node in inside)

    @property
    def is_named(self) -> bool:
        """Whether an instance has to know its name in the model: for draws, or for ranges."""
        return self.draws or self.helpers.ranges or self.lends_name

    @property
    def adds_up(self) -> bool:
        """Whether the block adds to the rank's parts of gradients by itself."""
        stored = (node for side in self.sides for node in stored_grads(self, side.group))
        ours = any(not ends_step(self.graph, n) for n in stored)
        totals = any(side.totals and not side.sums_up for side in self.sides)
        return self.adds is not ADDS and (ours or totals)

    @property
    def sides(self) -> list[Interface]:
        """What each phase of the run reads and returns, the forward's first."""
        return [side for side in (self.forward, self.backward, self.weights) if side is not None]

    def left_by(self, side: Interface) -> list[str]:
        """The lists of saved values that a phase returns for the block's later phases.

        The forward always returns ``saved`` for the backward, though it be empty.
        """
        phases = [other.loop.phase for other in self.sides]
        words = {then: word for (before, then), word in LEFT.items() if before == side.loop.phase}
        return [w for p, w in words.items() if p in phases and (p == "B" or side.saved.get(p))]

    def taken_by(self, side: Interface) -> list[str]:
        """The lists of saved values that a phase takes from the block's earlier phases."""
        words = {b: word for (b, then), word in LEFT.items() if then == side.loop.phase}
        taken = {slot.made_in for slot in side.of("saved")}
        return [word for before, word in words.items() if before in taken]

    def _saved(self, side: Interface, before: Phase) -> list[fx.Node]:
        """The saved values that a phase takes from one earlier phase, in the order of the list.

        What blocks inside of this one save is not among them: it stands in lists of theirs.
        """
        mine = read_around(side.loop, sides_within(self))
        saved = [side.own(slot) for slot in side.of("saved") if slot.made_in == before]
        return [node for node in saved if mine is None or node in mine]

    def side(self, phase: Phase) -> Interface | None:
        """What a phase reads and returns; None if the blocks have no such phase."""
        return next((side for side in self.sides if side.loop.phase == phase), None)

    def attributes(self) -> dict[str, str]:
        """For each parameter and buffer of all blocks its path in the step: ``layers.0.w``."""
        paths = [f"{self.attribute}.{i}" for i in range(len(self.run.layers))]
        blocks = [self.attribute] if self.run.is_one_module else paths
        return {
            name_in(layer, suffix): f"{block}.{attribute}"
            for layer, block in zip(self.run.layers, blocks, strict=not self.run.is_called)
            for suffix, attribute in self.suffixes.items()
        }

    @property
    def is_steady(self) -> bool:
        """Whether a step gathers the blocks' weights once for all microbatches (ZeRO-1, ZeRO-2)."""
        starts = self.gathered(self.forward)
        return bool(starts) and all(value(n).phase == "S" for n in starts)

    def gathered(self, side: Interface) -> list[fx.Node]:
        """The gathers of the block's own weights with which a phase begins, in a fixed order."""
        return first_gathers(self.graph, side)

    def gather_name(self, side: Interface) -> str:
        """The name of the method that starts a phase's gathers; "" if it gathers nothing.

        ``gather`` serves both phases where the backward gathers the same weights as the forward;
        else the backward has ``regather``.
        """
        forward, mine = (
            [(tensor_args(n), n.kwargs.get("dtype")) for n in self.gathered(s)]
            for s in (self.forward, side)
        )
        return "" if not mine else "gather" if forward in (mine, []) else "regather"

    def gather_methods(self) -> list[dict[str, str]]:
        """The methods that start gathers, ``gather`` and ``regather``, for the template."""
        methods: dict[str, dict[str, str]] = {}
        for side in self.sides:
            name = self.gather_name(side)
            if name:
                purpose = "" if name == "gather" else " for its backward"
                lines = gather_lines(
                    self.gathered(side), self._attribute, self._params(), self.helpers
                )
                methods[name] = {"name": name, "purpose": purpose, "body": block(lines, 2)}
        return list(methods.values())

    def taken(self, gathered: str, side: Interface) -> str:
        """The call that waits for a phase's gathered weights: ``self.whole.take()``."""
        each = [move for start in self.gathered(side) for move in moves(start)]
        return c10d.taken(gathered, each, self.helpers)

    def _params(self) -> list[str]:
        """Every parameter of the class as text, in the order of the declarations."""
        layer, params = self.run.layers[0], self.graph.params
        return [f"self.{a}" for s, a in self.suffixes.items() if name_in(layer, s) in params]

    def _attribute(self, own: fx.Node) -> str:
        """The text by which methods read a parameter or buffer of the block: ``self.w_weight``."""
        return f"self.{self.suffixes[self.own(value(own).name)]}"

    def stored(self, kind: Kind) -> dict[fx.Node, str]:
        """The first block's parameters or buffers with their attributes in the class."""
        placed = self.graph.placeholders(kind)
        names = {name_in(self.run.layers[0], suffix): a for suffix, a in self.suffixes.items()}
        return {placed[name]: attribute for name, attribute in names.items() if name in placed}

    def table(self, constant: str) -> str:
        """The name of the table of one block's parameters or buffers: ``BLOCK_SHARDS``."""
        of = self.sized_like or self
        return f"{(of.attribute if self.run.kin else self.name).upper()}_{constant}"

    def tables(self) -> dict[str, str]:
        """The tables that an instance is given, as its sizes are its own: ``shards`` and others."""
        kinds = {c: kind for kind, c in TABLES.items() if self.run.kin and self.stored(kind)}
        return {constant: self.table(constant) for constant in kinds}

    @property
    def gathers_weights(self) -> bool:
        """Whether the block gathers weights itself."""
        return any(self.gathered(side) for side in self.sides)

    def reduces(self, side: Interface) -> bool:
        """Whether a phase starts reductions of gradients that the step waits for later."""
        return any(
            ends_step(self.graph, user)
            for node in side.group.nodes
            for user in node.users
            if user.op == "call_function"
        )

    def functions(self) -> list[dict[str, str]]:
        """Name, arguments, result and body of ``forward`` and ``backward``."""
        methods = [self._method(side) for side in self.sides]
        free_blocks([method.ledger for method in methods])
        settled = self.scope.settled([method.lines() for method in methods])
        codes = (line.code for lines in settled for line in lines if not line.frees)
        self.codes = [code for code in codes if code and not code.startswith("#")]
        return [
            {"signature": "\n".join(wrap(signature.code, 4)), "body": self.helpers.block(body, 2)}
            for signature, *body in settled
        ]

    def _method(self, side: Interface) -> BlockMethod:
        """One method: unpack saved values, take gathered weights, compute, return.

        Arguments are, in this order: values that run from block to block, shared and listed ones,
        lists of saved values, and ``reduced``, the list of reductions that the step waits for.
        """
        wish, scope = self.wishes, self.scope
        scope.taken |= {*self.helpers.names}
        seen: dict[fx.Node, Text] = {}
        for slot in side.of("own"):
            node = side.own(slot)
            seen[node] = Text(self._attribute(node))
        arguments = [
            self._mark(side.own(slot), argument_name(side, slot, wish)) for slot in passed(side)
        ]
        seen |= {side.own(s): Text(a) for s, a in zip(passed(side), arguments, strict=True)}
        opening, lists = [], dict[str, Statement]()
        for word in self.taken_by(side):
            before = next(b for (b, p), w in LEFT.items() if w == word)
            unpacked = self._saved(side, before)
            seen |= {n: Text(self._mark(n)) for n in unpacked}
            within = lists_within(self, before, side.loop.phase)
            each = [*within, *(str(seen[n]) for n in unpacked)]
            names = ", ".join(each)
            line = Line(f"{names} = {word}" if len(each) > 1 else f"[{names}] = {word}")
            lists[word] = Statement([line], binds=unpacked, lists=within)
            arguments.append(word)
        starts = self.gathered(side)
        if starts:
            whole = [n for start in starts for n in weights_of(start)]
            seen |= {n: Text(scope.value(n, wish, first=True)) for n in whole if n is not None}
            for node in (n for start in starts for n in (start, *start.users)):
                seen.setdefault(node, Text("self.whole"))
            taken = ["_" if n is None else str(seen[n]) for n in whole]
            opening.append(take_whole(starts, taken, self.is_steady, self.helpers))
        arguments += side.numbers
        if reads_microbatch(side):
            arguments.append("i")
        if self.reduces(side):
            self.helpers.use("Reduced")
            arguments.append("reduced")
        if side.sums_up:
            arguments.append(self.helpers.use("Sums").lower())
        body = self._body(side, wish, scope, seen, arguments)
        statements = [*lists.values(), *opening, *body.statements()]
        self.texts |= {n: text.code for n, text in body.seen.items() if MARK.fullmatch(text.code)}
        given = [side.own(slot) for slot in (*side.of("carried"), *side.of("listed"))]
        name = {"F": "forward", "B": "backward", "W": "weights"}[side.loop.phase]
        lists_of_lists = dict.fromkeys(lists, self.saved_type)
        kinds = {
            **ARGUMENT_TYPES,
            **lists_of_lists,
            **{row.name: row.type_name for row in self.run.numbers},
        }
        typed_arguments = [f"{a}: {kinds.get(a, 'Tensor')}" for a in arguments]
        return BlockMethod(
            signature(name, ["self", *typed_arguments], result_type(self, side)),
            Ledger(statements, body, lists, given),
            [*buffer_updates(self, side, body), Line(f"return {returned(self, side, body)}")],
            self.run.module,
        )

    def _mark(self, node: fx.Node, wish: str = "") -> str:
        """The mark of a method's argument or unpacked value: that of an earlier method."""
        known = self.texts.get(node)
        return known or self.scope.value(
            node, self.wishes, of_turn(node, wish or self.wishes.get(node, "value")), first=True
        )

    def _body(
        self, side: Interface, wish: Wishes, scope: Scope, seen: dict[fx.Node, Text],
        arguments: Sequence[str],
    ) -> BlockBody:  # fmt: skip
        """The writer of a method's statements; ``kept`` are the values that the method returns."""
        group = side.group
        kept = {group.nodes[p] for p in [*side.carried, *side.listed]}
        kept |= {n for nodes in side.saved.values() for n in nodes}
        kept |= set(written_buffers(self, group).values())
        tensors = [a for a in arguments if a not in (*ARGUMENT_TYPES, *side.numbers)]
        lends = tensors[0] if tensors else f"self.{next(iter(self.suffixes.values()))}"
        items = side.loop.items()
        return BlockBody(
            self.graph, [item for item in items if isinstance(item, fx.Node)], wish, scope,
            self.helpers, seen, kept, {**stored_grads(self, group), **grad_parts(self, side)},
            f"{lends}.device", prefix=self.run.module, own=self._params(), added=side.adds,
            adds=SUMS if side.sums_up else self.adds, items=items,
            classes={cls.run: cls for cls in self.inner},
        )  # fmt: skip
