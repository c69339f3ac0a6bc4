"""What a pipeline stage does once per step, after all microbatches: the sums over ranks.

In: the collectives that ``take_ends`` took out of the stage's graph. Out: the text of ``finish``,
which runs them in buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from partc.codegen.calls.backends import c10d
from partc.codegen.calls.ranges import finished
from partc.codegen.files.spelling import result_type
from partc.codegen.files.take_ends import Ends
from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import Line, block
from partc.errors import CheckError
from partc.graph import Graph, collectives
from partc.graph.moves import kind_of
from partc.passes.stages.early_sums import Chain
from partc.quoting import literal

Group = tuple[Chain, list[str]]  # what finishes gradients, and the parameters of these


@dataclass(frozen=True)
class Finish:
    """Prints a stage's method ``finish``: sums over ranks once per step, the loss, the results.

    ``attributes`` has the paths of parameters in the stage. ``steady`` has the lists of blocks
    whose gathered weights are held for the whole step, to be let go here. Up to ``bucket_bytes`` of
    gradients share a bucket.
    """

    graph: Graph
    ends: Ends
    attributes: Mapping[fx.Node, str]
    steady: Sequence[str]
    helpers: Helpers
    bucket_bytes: int
    late: Sequence[Line] = ()  # the statements that write new values of buffers
    narrow: Sequence[Line] = ()  # those that start sums with fewer bytes

    def function(self) -> dict[str, str]:
        """Signature, docstring and body of ``finish``."""
        lines = list(self._reductions()) if self.ends.reduces else []
        for blocks in self.steady:
            lines.append(Line(f"for layer in self.{blocks}:"))
            lines.append(Line("layer.whole = []", indent=1))
        lines += self.late
        total, sums = "torch.stack(self.losses).sum()", list(self.ends.loss or ())
        if sums:
            lines.append(Line(f"loss = {total}"))
            lines += [Line(f"dist.all_reduce(loss, group=self.{n.kwargs['axis']})") for n in sums]
            lines.append(Line("return loss"))
        elif self.graph.loss is not None:
            lines.append(Line(f"return {total}"))
        trains, results = self.graph.loss is not None, bool(self.graph.outputs.results)
        if results:
            lines = [*lines[: len(lines) - trains], *self._results(lines[-1] if trains else None)]
        result = result_type(trains, results) if trains or results else "None"
        return {
            "signature": f"    def finish(self{self._given}) -> {result}:",
            "doc": self._doc(bool(sums)),
            "body": block(lines, 2),
        }

    @property
    def _given(self) -> str:
        """The argument of ``finish`` where the step waits for sums, those of all its stages."""
        return ", reduced: Reduced" if self.ends.reduces and self.helpers.narrow else ""

    def _doc(self, sums: bool) -> str:
        if self.graph.loss is None and self.graph.outputs.results:
            return "The results, all microbatches side by side."
        if self.ends.reduces or sums:
            return "Sum over ranks what all microbatches have added up."
        made = self.graph.loss is not None or self.steady
        return "The loss, of all microbatches." if made else "Write the new values of buffers."

    def _results(self, loss: Line | None) -> Iterator[Line]:
        """The lines that return the results, of all microbatches; ``loss``: the line that would
        return the loss alone.
        """
        texts = []
        for name in self.graph.outputs.results:
            known, turns = self.ends.results[name], f"self.results[{literal(name)}]"
            text = f"{turns}[-1]" if known.side_by_side is None else _cat(known.side_by_side, turns)
            if known.sums is not None:
                text = f"torch.stack({turns}).sum(0, dtype={turns}[0].dtype)"
            if known.sums:
                yield Line(f"{turns} = {text}")
                text = turns
                for node in known.sums:
                    yield Line(f"dist.all_reduce({turns}, group=self.{node.kwargs['axis']})")
            texts.append(f"{literal(name)}: {text}")
        before = f"{loss.code.removeprefix('return ')}, " if loss else ""
        yield Line(f"return {before}{{{', '.join(texts)}}}")

    def reduce(self) -> dict[str, str]:
        """The method that starts sums of gradients which leave before the end."""
        (chain, names), *_ = self._early()
        return {
            "signature": "    def reduce(self, params: list[nn.Parameter]) -> None:",
            "doc": "Start to sum over ranks what microbatches have added up of some gradients.",
            "body": block([*self._summed_up(chain, names[0], "params")], 2),
        }

    def _early(self) -> list[Group]:
        """The group whose gradients are reduced early: ``finish`` reduces those that are left."""
        mine = self.ends.leaving.blocks if self.ends.leaving else ()
        return [group for group in self.ends.groups() if mine and mine[0] in group[1]]

    def _reductions(self) -> Iterator[Line]:
        """The lines of ``finish`` that start all sums over ranks and then wait for them.

        The parameters of the largest group are what the others leave.
        """
        if not self.ends.leaving and not self._given:
            yield Line(f"reduced = {self.helpers.use('Reduced')}()")
        yield from self._before_narrow()
        yield from self.narrow
        early = self._early()
        groups = sorted(self.ends.groups(), key=lambda group: len(group[1]))
        if groups:
            yield from self._finished_exactly(groups, early)
        if not self._given:
            yield from finished(f"{self._reduced}.finish()", ranges=self.helpers.ranges)

    def _before_narrow(self) -> Iterator[Line]:
        """The lines that sum over other ranks, exactly, what is then summed with fewer bytes."""
        for chain, names in self.ends.before_narrow():
            yield from params_lines([self.attributes[self.graph.params[n]] for n in names])
            yield Line(f"for bucket in self.partials.buckets(params, {self.bucket_bytes:_}):")
            grads = "self.partials.take(bucket)"
            if self._is_cut(chain[0]):
                yield Line(f"grads = {grads}", indent=1)
                grads = "grads"
            for node in chain:
                yield from self._awaited(node, names[0], grads)
                grads = "grads"
            yield Line("self.partials.update(grads)", indent=1)

    def _awaited(self, node: fx.Node, param: str, grads: str) -> Iterator[Line]:
        """The lines that start one collective of a chain and wait for what it brings."""
        if node.target is collectives.all_to_all:
            yield Line(f"grads = {self._moved(node, grads)}", indent=1)
            return
        yield Line(f"grads, done = {self._summed(node, grads, param)}", indent=1)
        yield Line("done.wait()", indent=1)
        if node.target is collectives.reduce_scatter and self.helpers.in_pieces:
            yield Line(f"grads = {self.helpers.use('summed')}(grads)", indent=1)

    def _finished_exactly(
        self, sorted_groups: Sequence[Group], early: Sequence[Group]
    ) -> Iterator[Line]:
        """The lines that reduce the gradients of all groups; the last has what others leave."""
        *groups, (chain, names) = sorted_groups
        for other, some in groups:
            yield from params_lines([self.attributes[self.graph.params[n]] for n in some])
            yield from self._group(other, some[0], "params", (other, some) in early)
        yield from self._group(chain, names[0], "[*self.parameters()]", (chain, names) in early)

    def _group(self, chain: Chain, name: str, params: str, early: bool) -> Iterator[Line]:
        """The lines that reduce what is left of the gradients of some parameters, or only store it.

        ``early``: the method ``reduce`` has the lines; ``name``: one of the parameters.
        """
        if early:
            yield Line(f"self.reduce({params})", "those that are left")
        elif chain:
            yield from self._summed_up(chain, name, params)
        else:
            yield Line(f"for w, grad in self.partials.take({params}).items():")
            yield Line(f"{self.helpers.use('add_grad')}(w, grad)", indent=1)

    @property
    def _reduced(self) -> str:
        return "self.reduced" if self.ends.leaving else "reduced"

    def _summed_up(self, chain: Chain, name: str, params: str) -> Iterator[Line]:
        """The loop that reduces the sums over microbatches of some parameters, bucket by bucket."""
        yield Line(f"for bucket in self.partials.buckets({params}, {self.bucket_bytes:_}):")
        yield from self._passed(chain, name)

    def _passed(self, chain: Chain, param: str) -> Iterator[Line]:
        """The lines that run a chain on one ``bucket``; only the last start is not awaited.

        That handle goes into ``reduced``.
        """
        grads = "self.partials.take(bucket)"
        if self._is_cut(chain[0]):
            yield Line(f"grads = {grads}", indent=1)
            grads = "grads"
        for node in chain:
            if node.target is collectives.all_to_all or node is not chain[-1]:
                yield from self._awaited(node, param, grads)
            else:
                call = self._summed(node, grads, param)
                yield Line(f"{self._reduced}.append({call})", indent=1)
            grads = "grads"
        if chain[-1].target is collectives.all_to_all:
            yield Line("for w, grad in grads.items():", indent=1)
            yield Line(f"{self.helpers.use('add_grad')}(w, grad)", indent=2)

    def _is_cut(self, node: fx.Node) -> bool:
        """Whether gradients are scattered along another dim than 0."""
        scatters = node.target is collectives.reduce_scatter
        return scatters and (node.kwargs["dim"], node.kwargs.get("outer", 1)) != (0, 1)

    def _moved(self, node: fx.Node, grads: str) -> str:
        """The call that shards gradients on another dim, an all_to_all."""
        k: dict[str, Any] = dict(node.kwargs)
        outers = [k.get("outer", 1), k.get("to_outer", 1)]
        cuts = [k["dim"], k["to_dim"], *(outers if outers != [1, 1] else [])]
        to = ", ".join(map(str, cuts))
        return f"{self.helpers.use('move_grads')}({grads}, {k['num']}, self.{k['axis']}, {to})"

    def _summed(self, node: fx.Node, grads: str, param: str) -> str:
        """The call that starts one collective of gradients; ``param`` names one in an error."""
        k: dict[str, Any] = dict(node.kwargs)
        if kind_of(node) == "all_reduce":
            return f"{self.helpers.use('sum_grads')}({grads}, self.{k['axis']})"
        if node.target is collectives.all_gather and (k["dim"], k.get("outer", 1)) == (0, 1):
            return f"{self.helpers.use('gather_grads')}({grads}, {k['num']}, self.{k['axis']})"
        if node.target is not collectives.reduce_scatter:
            raise CheckError(
                where=param,
                what=f"a gradient's sum over microbatches goes through {node.target}",
                why="only sums over ranks are expected there",
                do="Use reduce = 'microbatch' in the plan.",
            )
        laid_out = c10d.laid_out("x", k, self.helpers)
        sent = grads if laid_out == "x" else f"{{p: {laid_out} for p, x in {grads}.items()}}"
        return f"{self.helpers.use('scatter_grads')}({sent}, {k['num']}, self.{k['axis']})"


def _cat(node: fx.Node, turns: str) -> str:
    """The results of microbatches, a list, side by side as a ``collect`` says."""
    dim, outer = int(str(node.kwargs["dim"])), int(str(node.kwargs.get("outer", 1)))
    if outer == 1:
        return f"torch.cat({turns}, {dim})"
    parts = f"[x.unflatten({dim}, ({outer}, -1)) for x in {turns}]"
    return f"torch.cat({parts}, {dim + 1}).flatten({dim}, {dim + 1})"


def params_lines(paths: Sequence[str]) -> Iterator[Line]:
    """The lines that list parameters as ``params``, with a loop over blocks for those of blocks.

    >>> for line in params_lines(["embed", "layers.0.w", "layers.1.w"]):
    ...     print("    " * line.indent + line.code)
    params = [self.embed]
    for layer in self.layers:
        params += [layer.w]
    """
    lists: dict[str, dict[str, None]] = {}
    for path in paths:
        if "." in path:
            attribute, _, suffix = path.split(".", 2)
            lists.setdefault(attribute, {})[suffix] = None
    yield Line(f"params = [{', '.join(f'self.{path}' for path in paths if '.' not in path)}]")
    for attribute, suffixes in lists.items():
        yield Line(f"for layer in self.{attribute}:")
        yield Line(f"params += [{', '.join(f'layer.{suffix}' for suffix in suffixes)}]", indent=1)
