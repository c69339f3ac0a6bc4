"""The body of ``step``: single calls, and a ``for`` loop for each phase of equal blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import fx

from partc.codegen.bodies.block_arguments import (
    argument_name,
    main_slot,
    passed,
    reads_microbatch,
)
from partc.codegen.bodies.body import Body, types
from partc.codegen.bodies.gathers_ahead import begin_at
from partc.codegen.bodies.loop_texts import head_of_calls, numbers_in, sliced
from partc.codegen.calls.expressions import ADDS
from partc.codegen.calls.path_names import inside
from partc.codegen.calls.ranges import WAIT_FOR_GRADS, of_loop
from partc.codegen.calls.settle import unmarked
from partc.codegen.calls.statements import Statement
from partc.codegen.repeats.runs import LATER, Item, Loop, Run, sections
from partc.codegen.repeats.slots import Interface, Slot
from partc.codegen.text import Line, Range, Text
from partc.graph import Phase, collectives, is_call
from partc.graph.given_back import is_given_back
from partc.graph.moves import carried, gathers_param
from partc.quoting import comment

if TYPE_CHECKING:
    from partc.codegen.bodies.classes import BlockClass

CALLS: dict[Phase, str] = {"F": "", "B": ".backward", "W": ".weights"}
NEAR = 30  # calls between the start of a loop's gathers and the loop need no word
EARLY = "for the next {}; early, as little is computed"
SAID: dict[Phase, str] = {"F": "forward", "B": "backward", "W": "weight gradients"}


@dataclass
class StepBody(Body):
    """A Body that also writes loops: ``items`` has single calls (``order``) and loops in order.

    In a loop the weights of the next block are gathered while one computes. Before a loop, where
    calls stand between it and the loop before, the gathers of its first ``prefetch`` blocks start,
    as late as the calls that follow hide them; before any other loop that of its first block.
    """

    items: Sequence[Item] = ()
    classes: dict[Run, BlockClass] = field(default_factory=dict)
    # gathers that a loop's last iteration starts
    ahead: dict[fx.Node, Loop] = field(default_factory=dict)
    prefetch: int = 1
    counters: dict[str, str] = field(default_factory=dict)  # variables of loops over calls
    begun: set[Loop] = field(default_factory=set)  # loops with several blocks gathered before them
    # for each run the lines before its loop, and those at the end of each iteration
    sums: Mapping[Run, tuple[list[Line], list[Line]]] = field(default_factory=dict)

    def statements(self) -> list[Statement]:
        """The statements of all calls and loops, in order.

        Gathers that stand right behind a loop are started in the loop's last iteration.
        """
        found: list[Statement] = []
        self._carry_names()
        stretches = sections(self.items)
        for loop, nodes in stretches:
            early = [*takewhile(gathers_param, nodes)]
            following = next(
                (lp for lp, ns in stretches[stretches.index((loop, nodes)) + 1 :]), None
            )
            waits = any(map(is_given_back, nodes))
            ahead = [] if waits else self._begun_in(loop, following)
            if loop is not None:
                self.ahead |= dict.fromkeys(early, loop)
                found.append(self._loop(loop, early, ahead))
            found += [s for node in early for s in self.one(node)]
            rest = [node for node in nodes if node not in early]
            if following is not None and self._gather(following) and not ahead:
                between = loop is not None and bool(rest)
                num = self.prefetch if between else 1
                at = begin_at(rest, following, num)
                found += [s for node in rest[:at] for s in self.one(node)]
                found.append(self._begin(following, num, early=len(rest) - at > NEAR))
                rest = rest[at:]
            found += [s for node in rest for s in self.one(node)]
        return found

    def _hidden_by(self, start: fx.Node, wait: fx.Node) -> str:
        if (loop := self.ahead.get(start)) is not None:
            name = f"the {SAID[loop.phase]} of {self.classes[loop.run].attribute}"
            return f"hidden behind {name if loop.run.is_single else 'the last block'}"
        loops = self._loops_between(start, wait)
        return f"hidden behind {self._called(loops)}" if loops else super()._hidden_by(start, wait)

    def _loops_between(self, start: fx.Node, wait: fx.Node) -> list[Loop]:
        """The loops over blocks whose lines stand between two calls of the step."""
        stretches = sections(self.items)
        first, last = (
            next((i for i, (_, nodes) in enumerate(stretches) if node in nodes), 0)
            for node in (start, wait)
        )
        return [loop for loop, _ in stretches[first + 1 : last + 1] if loop is not None]

    def _called(self, loops: Sequence[Loop]) -> str:
        """Loops in words: ``the backward of decoder_block and the backward of encoder_block``."""
        names = [f"the {SAID[loop.phase]} of {self.classes[loop.run].attribute}" for loop in loops]
        return " and ".join(names[:2]) if len(names) <= 2 else f"{names[0]} to {names[-1]}"

    def _next_wait(self, start: fx.Node) -> fx.Node | None:
        """As in ``Transfers``; None where a loop between start and wait hides the transfer."""
        wait = super()._next_wait(start)
        stretches = [nodes for _, nodes in sections(self.items)]
        return wait if any(start in nodes and wait in nodes for nodes in stretches) else None

    def _gather(self, loop: Loop) -> str:
        """The method that starts to gather a block's weights; "" if this loop gathers none."""
        cls = self.classes[loop.run]
        return "" if cls.is_steady else cls.gather_name(self._side(loop))

    def _begin(self, loop: Loop, num: int, *, early: bool = False) -> Statement:
        """The lines that start the gathers of a loop's first ``num`` blocks, if it has so many.

        ``early``: many calls stand between, which together compute less than these blocks do.
        """
        num = min(num, len(loop.run.layers))
        self.begun |= {loop} if num > 1 else set()
        blocks = f"self.{self.classes[loop.run].attribute}"
        if loop.run.is_single:
            remark = EARLY.format("block") if early else "what the next block begins with"
            return Statement([Line(f"{blocks}.{self._gather(loop)}()", remark)])
        indices = [-1 - i if self._descends(loop) else i for i in range(num)]
        first = EARLY.format("loop") if early else "what the next loop begins with"
        remarks = [first, *["and goes on with"] * (num - 1)]
        return Statement([
            Line(f"{blocks}[{index}].{self._gather(loop)}()", remark)
            for index, remark in zip(indices, remarks, strict=True)
        ])  # fmt: skip

    def _begun_in(self, loop: Loop | None, following: Loop | None) -> list[Line]:
        """The line that starts a loop's gathers while the last block of the one before computes.

        So it is where one of the two is a single block: others begin before their loop. A block
        that runs next once more cannot gather for both at once.
        """
        if loop is None or following is None or loop.run is following.run:
            return []
        single = loop.run.is_single or following.run.is_single
        return self._begin(following, 1).lines if single and self._gather(following) else []

    def _side(self, loop: Loop) -> Interface:
        return next(s for s in self.classes[loop.run].sides if s.loop.phase == loop.phase)

    def _carry_names(self) -> None:
        """Give a value that only the first iteration of a loop reads the loop variable's name.

        Then ``x = embedding(...)`` stands before the loop over ``x`` in place of ``x = embedding``.
        """
        for item in self.items:
            if not isinstance(item, Loop) or item.run.is_single:
                continue
            side = self._side(item)
            for slot in side.of("carried"):
                first = slot.nodes[0]
                if self._is_first_read(item, slot):
                    name = self._variable_name(side, slot)
                    self.wishes.give(dict.fromkeys(self._in_place_of(first), name))

    def _is_first_read(self, loop: Loop, slot: Slot) -> bool:
        """Whether the first iteration of a loop alone reads the value with which a slot begins."""
        first, readers = slot.nodes[0], {*loop.groups[0].nodes, *self._backward_of(loop)}
        return first in self.place and readers.issuperset(first.users)

    def _in_place_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """A value, and the values before it that were moved without a copy: they share a name."""
        while node in self.place:
            yield node
            before = carried(node)
            copies = node.target is collectives.all_reduce and node not in self.in_place
            if before is None or len(before.users) > 1 or copies:
                return
            node = before

    def _variable_name(self, side: Interface, slot: Slot) -> str:
        """The loop variable of a carried value: ``x`` or ``d_x`` for the residual stream."""
        if slot is main_slot(side):
            return "x" if side.loop.phase == "F" else "d_x"
        return argument_name(side, slot, self.wishes)

    def _backward_of(self, loop: Loop) -> set[fx.Node]:
        """The calls of the first block's later phases, which read its saved values."""
        later = [loop.run.of(phase) for phase in LATER] if loop.phase == "F" else []
        return {node for groups in later if groups for node in groups[0].nodes}

    # loops -----------------------------------------------------------------------------------
    def _loop(self, loop: Loop, early: Sequence[fx.Node], begun: Sequence[Line]) -> Statement:
        """The lines of a loop over blocks; its last iteration starts the gathers ``early``.

        ``for layer in self.layers:`` with the lists of saved values before it, the call of the
        block's method in it, and ``del`` of the last saved values behind it. ``begun``: the line
        that starts the gathers of the loop behind, which stands in the last iteration too.
        """
        if loop.run.is_single:
            return self._single(loop, early, begun)
        side, cls = self._side(loop), self.classes[loop.run]
        lines: list[Line] = []
        variables = {
            slot.position: self._variable(side, slot, lines) for slot in side.of("carried")
        }
        listed = [self._list(slot) for slot in side.of("listed")]
        items = [
            self.scope.fresh(f"{argument_name(side, s, self.wishes)}_here")
            for s in side.of("listed")
        ]
        arguments = [variables[s.position] for s in side.of("carried")]
        arguments += [str(self.text(s.nodes[0])) for s in side.of("shared")] + items
        for position in side.carried:
            variables.setdefault(
                position, self.scope.value(loop.groups[-1].nodes[position], self.wishes)
            )
        kept = {
            p: self.scope.fresh(f"{self.wishes.get(side.group.nodes[p], 'value')}_all")
            for p in side.listed
        }
        lines += [Line(f"{name}: list[Tensor] = []") for name in kept.values()]
        targets = [variables[p] for p in side.carried] + [f"{kept[p]}_here" for p in side.listed]
        body = []
        for word in cls.left_by(side):
            lines.append(Line(f"{self._saved(cls, word)}: list[{cls.saved_type}] = []"))
            targets.append(word)
            body.append(Line(f"{self._saved(cls, word)}.append({word})", indent=1))
        arguments += [self._pop(cls, word, loop) for word in cls.taken_by(side)]
        numbers = {name: self._counter(name) for name in side.numbers}
        arguments += numbers.values()
        items += numbers.values()
        listed += [numbers_in(loop, name) for name in numbers]
        arguments += ["i"] if reads_microbatch(side) else []
        arguments += ["reduced"] if cls.reduces(side) else []
        sums = [Line(f"{name} = Sums()") for name in self._sums_of(cls, side)]
        lines += sums
        arguments += self._sums_of(cls, side)
        layer = f"self.{cls.attribute}" if loop.run.is_called else "layer"
        call = f"{layer}{CALLS[loop.phase]}({', '.join(arguments)})"
        ahead, after = [], []
        if cls.reduces(side):
            ahead.append(Line(f"before, reduced = reduced, {cls.adds.reduced}", indent=1))
            behind = "reduced behind this block's backward"
            waits = Range(WAIT_FOR_GRADS) if self.helpers.ranges else None
            passes_on = self.helpers.narrow and cls.adds is ADDS
            ends = "before.pass_on(reduced)" if passes_on else "before.finish()"
            after.append(Line(ends, behind, indent=1, range=waits))
        if self._gather(loop):
            ahead += self._gather_ahead(loop, early, begun)
        elif begun:
            lines += begun
        body += [Line(f"{name}.append({name}_here)", indent=1) for name in kept.values()]
        opening, closing = self.sums.get(loop.run, ([], []))
        lines += opening
        after += closing
        left = f"{', '.join(targets)} = " if targets else ""
        lines += [Line(self._head(cls, loop, items, listed)), *ahead]
        ranged = of_loop(loop.phase) if self.helpers.ranges else None
        lines += [Line(left + call, self._remark(side), indent=1, range=ranged), *body, *after]
        put_by = [word for word in cls.left_by(side) if word in targets]
        lines += [Line(f"del {', '.join(put_by)}")] if put_by else []
        self._bind_results(loop, side, variables, kept)
        lines += self._bind_totals(cls, side)
        if loop.run.is_called:
            last = loop.groups[-1].nodes
            lines += [line for p in side.carried for line in self._stores(last[p])]
        reads = [n for slot in passed(side) for n in slot.nodes if n not in self._inside(loop)]
        last = loop.groups[-1].nodes
        binds = [last[p] for p in side.carried]
        binds += [total.adds[-1] for total in side.totals if side.sums_up]
        around = loop.run.module if loop.run.is_called else loop.run.module.rpartition(".")[0]
        return Statement(lines, reads, binds, section=inside(around, ""))

    def _single(self, loop: Loop, early: Sequence[fx.Node], begun: Sequence[Line]) -> Statement:
        """The call of a single block's method: ``x, down1_saved = self.down1(x)``.

        Before it start the gathers of what comes behind.
        """
        side, cls, nodes = self._side(loop), self.classes[loop.run], loop.groups[0].nodes
        arguments = [str(self.text(slot.nodes[0])) for slot in passed(side)]
        taken = [self._saved(cls, word) for word in cls.taken_by(side)]
        arguments += [*taken, *(["i"] if reads_microbatch(side) else [])]
        arguments += ["reduced"] if cls.reduces(side) else []
        read = [p for p in (*side.carried, *side.listed) if p not in side.unread]
        names = {p: self.scope.value(nodes[p], self.wishes) for p in read}
        targets = [names.get(p, "_") for p in (*side.carried, *side.listed)]
        targets += [self._saved(cls, word) for word in cls.left_by(side)]
        ahead = [line for node in early for s in self.one(node) for line in s.lines]
        left = f"{', '.join(targets)} = " if targets else ""
        call = f"self.{cls.attribute}{CALLS[loop.phase]}({', '.join(arguments)})"
        lines = [*ahead, *begun, Line(left + call, self._remark(side), both=True)]
        lines += [Line(f"del {', '.join(taken)}")] if taken else []
        self.seen |= {nodes[p]: Text(name) for p, name in names.items()}
        reads = [slot.nodes[0] for slot in passed(side)]
        section = inside(loop.run.layers[0], "").rpartition(".")[0]
        return Statement(lines, reads, [nodes[p] for p in read], [*nodes], section)

    def _inside(self, loop: Loop) -> set[fx.Node]:
        return {n for group in loop.groups for n in group.nodes}

    def _variable(self, side: Interface, slot: Slot, lines: list[Line]) -> str:
        """The loop variable of a carried value; ``lines`` get ``x = ...`` if it has to be set."""
        first = str(self.text(slot.nodes[0]))
        wish = self._variable_name(side, slot)
        same = self.wishes.get(slot.nodes[0]) == wish and first.isidentifier()
        if same and self._is_first_read(side.loop, slot):
            return first
        inside = self._inside(side.loop)
        if same and first == wish and inside.issuperset(slot.nodes[0].users):  # an argument
            return first
        last = side.loop.groups[-1].nodes[slot.position]
        name = self.scope.value(last, self.wishes, wish, first=True)
        lines.append(Line(f"{name} = {first}"))
        return name

    def _list(self, slot: Slot) -> str:
        """A listed slot as a list, one value for each block: ``[a, b] * 4``, ``kept[:8]``."""
        texts = [str(self.text(n)) for n in slot.nodes]
        for period in range(1, len(texts) // 2 + 1):
            if len(texts) % period == 0 and texts == texts[:period] * (len(texts) // period):
                return f"[{', '.join(texts[:period])}] * {len(texts) // period}"
        return sliced(texts) or f"[{', '.join(texts)}]"

    def _counter(self, name: str) -> str:
        """The variable of a number in which calls differ; loops one after the other share it."""
        if name not in self.counters:
            self.counters[name] = self.scope.fresh(name)
        return self.counters[name]

    def _sums_of(self, cls: BlockClass, side: Interface) -> list[str]:
        """The name of the dict in which a loop's calls add up gradients: ``cell_sums``."""
        names = [f"{cls.attribute}_sums"] if side.sums_up else []
        self.scope.taken |= {*names}
        return names

    def _bind_totals(self, cls: BlockClass, side: Interface) -> list[Line]:
        """Note how calls behind a loop read totals; the lines that store those nobody reads."""
        lines = []
        for name in self._sums_of(cls, side):
            for total in side.totals:
                param = f"self.{cls.attribute}.{cls.suffixes[cls.own(total.param)]}"
                node = total.adds[-1]
                self.seen[node] = Text(f"{name}[{param}]")
                for stored in self.stored.get(node, []):
                    call = self.helpers.called(self.adds.grad)
                    lines.append(Line(f"{call}({stored}, {self.seen[node]})"))
        return lines

    def _saved(self, cls: BlockClass, word: str) -> str:
        """The step's list of the blocks' lists of saved values: ``layers_saved``."""
        name = f"{cls.attribute}_{word}"
        self.scope.taken.add(name)
        return name

    def _pop(self, cls: BlockClass, word: str, loop: Loop) -> str:
        """The saved values of the block of this iteration: ``layers_saved.pop()``.

        The last that was added, or the first, where this loop runs in the order of the loop that
        saved them.
        """
        turned = self._descends(loop) and word != "left"
        return f"{self._saved(cls, word)}.pop({'' if turned else '0'})"

    def _descends(self, loop: Loop) -> bool:
        """Whether a loop runs from the last block to the first."""
        return loop.groups[0].layer != loop.run.layers[0]

    def _head(self, cls: BlockClass, loop: Loop, items: list[str], lists: list[str]) -> str:
        """The ``for`` line; ``following`` is the next block, None in the last iteration."""
        if loop.run.is_called:
            return head_of_calls(loop, items, lists)
        over, layer = f"self.{cls.attribute}", "layer"
        over = f"reversed({over})" if self._descends(loop) else over
        if self._gather(loop):
            over = f"zip({over}, [*{over}, None][1:], strict=True)"
            layer = "(layer, following)" if items else "layer, following"
        if not items:
            return f"for {layer} in {over}:"
        return f"for {layer}, {', '.join(items)} in zip({', '.join([over, *lists])}, strict=True):"

    def _gather_ahead(
        self, loop: Loop, early: Sequence[fx.Node], behind: Sequence[Line]
    ) -> list[Line]:
        """The lines that start the next block's gathers, or after the last block ``early``.

        ``behind`` starts the gathers of the loop behind.
        """
        remark = comment(
            f"hidden behind this block's {'forward' if loop.phase == 'F' else 'backward'}"
        )
        begun = " and not following.whole" if loop in self.begun else ""
        lines = [
            Line(f"if following is not None{begun}:", indent=1),
            Line(f"following.{self._gather(loop)}()", remark, indent=2),
        ]
        starts = [
            line for node in early for statement in self.one(node) for line in statement.lines
        ] + [*behind]
        if starts:
            other = "elif following is None:" if begun else "else:"
            lines += [Line(other, indent=1), *(replace(line, indent=2) for line in starts)]
        return lines

    def _remark(self, side: Interface) -> str:
        return comment(types([side.group.nodes[p] for p in side.carried]))

    def _bind_results(
        self, loop: Loop, side: Interface, variables: dict[int, str], kept: dict[int, str]
    ) -> None:
        """Note how calls behind a loop read the blocks' results: ``x``, or ``x_all[3]``."""
        for position, name in kept.items():
            for i, group in enumerate(loop.groups):
                self.seen[group.nodes[position]] = Text(f"{name}[{i}]", among=len(loop.groups))
        for position in side.carried:
            last, name = loop.groups[-1].nodes[position], variables[position]
            self.seen[last] = Text(name)
            before = self.wishes.get(last, "")
            casts = [user for user in last.users if is_call(user, torch.ops.aten._to_copy.default)]
            for user in casts:  # which is called after what it casts
                if self.wishes.get(user, "").startswith(f"{before}_"):
                    behind = self.wishes.get(user).removeprefix(before)
                    self.wishes.names[user] = unmarked(name) + behind
