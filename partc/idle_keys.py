"""The keys of a plan, and where each is read: which of those that were written say nothing here.

In: a plan as it was asked for, and the step that was compiled with it. Out: a sentence for every
key without an effect. A key that nothing reads looks like a decision; so it is told.

Every field of ``Plan`` is in one of two tables: in ``KEYS`` with what has to be there for anybody
to read it, or in ``ALWAYS`` with the reason why no step ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partc.key_readers import Compiled
from partc.passes.search.plans.choose_plan import AUTO_PLAN
from partc.passes.shard.overruled_preset import overruled_preset
from partc.passes.shard.preset_words import said_by
from partc.plan import Plan
from partc.plan.allowed import ALLOWED_TABLES
from partc.plan.coded import COMPRESS_WEIGHTS
from partc.plan.compress import COMPRESS
from partc.plan.decided import GLOO, MEMORY
from partc.plan.mesh import PP

Reads = Callable[..., bool]
Why = str | Callable[[Compiled, Any], str]


@dataclass(frozen=True)
class Key:
    """A key of a plan; ``*`` in its name stands for an entry's own.

    ``read`` says of a step whether anything reads the key; it is given the step, the key's value
    and the names that stand for ``*``. ``why`` is the rest of a sentence that begins "... says
    nothing here:", in which {0} is the first such name, and {value} the value; or makes that of the
    step and the value. ``instead`` is what to do.
    """

    read: Reads
    why: Why
    instead: str = "Leave it out"

    def told(self, name: str, step: Compiled, given: Any, names: tuple[str, ...]) -> str:
        """The whole sentence."""
        why = self.why if isinstance(self.why, str) else self.why(step, given)
        why = why.format(*names, value=given)
        return f"{name} says nothing here: {why}. {self.instead}."


def _copies(step: Compiled, most_mb: float, axis: str, kind: str) -> bool:
    return (axis, kind) in step.copied


def _clock(step: Compiled, flops: float, axis: str) -> bool:
    return bool(step.turned) if axis == MEMORY else step.crosses_in_turns(axis)


def _again(step: Compiled, what: str | tuple[str, ...]) -> bool:
    """``"none"`` is true of any step that trains, and lists of modules are checked by name."""
    of_model = {"block": step.blocks, "attention": step.attention}
    return step.trains and (not isinstance(what, str) or of_model.get(what, True))


def _sends(step: Compiled, num: Any, way: str) -> bool:
    return step.state.mesh.pipeline_ranks > 1 and (way == "forward" or step.trains)


def _gathers(step: Compiled, num: int) -> bool:
    """One is what a step does anyway."""
    return num == 1 or (not step.pipelined and step.gathers_ahead and step.blocks)


def _messages(step: Compiled, wanted: bool) -> bool:
    kinds = {move.kind for move in step.moves}
    return step.plan.backend == GLOO and bool({"all_gather", "reduce_scatter"} & kinds)


def _reduces(step: Compiled, when: str) -> bool:
    return step.plan.microbatches > 1 and step.stores_cut(*step.plan.batch_axes)


def _no_pipeline(step: Compiled, given: Any) -> str:
    mesh = step.state.mesh
    where = f"the mesh {mesh} has no axis pp" if mesh.axes else "no axis pp"
    where = f"the mesh {mesh} has one rank along pp" if PP in mesh.names else where
    return f"{where}, and the step is computed in one microbatch"


def _none_again(step: Compiled, what: Any) -> str:
    if not step.trains:
        return "the step has no backward that could compute anything again"
    if what == "block":
        return "the model has no list of modules, and so no blocks"
    return "no block has an attention, a product of two activations, that is cheap to make again"


def _no_gathers_ahead(step: Compiled, num: int) -> str:
    if step.pipelined:
        return "a pipeline gathers the weights of one block ahead"
    return "no loop over blocks gathers their weights"


def _has_table(step: Compiled, word: str) -> bool:
    """Whether the plan has a table that a word of ``allow`` is for."""
    tables = (word, COMPRESS_WEIGHTS) if word == COMPRESS else (word,)
    return any(getattr(step.asked, each) is not None for each in tables)


def _without_table(step: Compiled, words: tuple[str, ...]) -> str:
    word = next(each for each in words if not _has_table(step, each))
    return f"the plan has no table [{word}], so {ALLOWED_TABLES[word].without}"


_NO_SUMS = "no several gradients of a block are summed over {0} together"

KEYS: Mapping[str, Key] = {
    "preset": Key(
        lambda step, words: words in ("ddp", AUTO_PLAN) or step.has_axes,
        lambda step, words: f"the mesh {step.state.mesh} has no axis over which it shards",
        'Write preset = "ddp", or a mesh with such an axis beside the others: dp=2',
    ),
    "gather.*": Key(
        lambda step, life, axis: step.stores_cut(axis),
        "no weight is stored in shards over {0}, so that none is gathered over it",
        'Leave it out, or store weights so: preset = "fsdp", or entries of [params]',
    ),
    "scatter.*": Key(
        lambda step, dim, axis: step.scattered(axis, dim),
        "no sum of activations over {0} can be scattered along dim {value}; partc scatters "
        "unfinished sums of three dims or more, along a dim that {0} divides",
    ),
    "batch_norm": Key(
        lambda step, word: step.batch_norms and step.pieces > 1,
        "no BatchNorm takes statistics of a batch in pieces",
    ),
    "random": Key(
        lambda step, word: step.draws,
        "the step draws no numbers",
    ),
    "recompute": Key(_again, _none_again),
    "bucket_mb": Key(
        lambda step, limit_mb: step.joined,
        "no weights or gradients of one block are sent together",
    ),
    "bucket_copy_mb.*.*": Key(
        _copies,
        "no {1} over {0} copies weights or gradients into a bucket",
    ),
    "grad_parts.*": Key(
        lambda step, num, axis: axis in step.in_parts,
        _NO_SUMS,
    ),
    "hierarchical.*.*": Key(
        lambda step, least_mb, inner, outer: frozenset((inner, outer)) in step.summed_over_both,
        "no gradient is summed over {0} and over {1} by all-reduces",
    ),
    "messages": Key(
        _messages,
        "no all_gather or reduce_scatter goes over gloo here",
    ),
    "prefetch": Key(
        _gathers,
        _no_gathers_ahead,
    ),
    "overlap_pieces": Key(
        lambda step, num: num == 1 or step.awaited,  # one says that there are none
        "no block waits for a sum of activations",
    ),
    "flops_per_byte.*": Key(
        _clock,
        "no block is computed in pieces with a transfer over {0}",
    ),
    "schedule": Key(lambda step, name: step.pipelined, _no_pipeline),
    "virtual_stages": Key(lambda step, num: step.pipelined, _no_pipeline),
    "early_sums": Key(lambda step, stages: step.pipelined or not stages, _no_pipeline),
    "sends.*": Key(_sends, "no stages on several ranks send {0} to each other"),
    "reduce": Key(
        _reduces,
        "the step has one microbatch, or no gradient is kept in shards over the axes of the batch",
    ),
    **dict.fromkeys(
        ("compress", "local_steps", "stale", "uneven", "servers"),
        Key(
            lambda step, table: table is None or step.trains,
            "the step computes no gradients, and optimizers take no steps behind it",
        ),
    ),
    "compress_weights": Key(
        lambda step, table: table is None or step.stores_cut(*step.plan.batch_axes),
        "no weight is stored in shards over an axis of the batch, so that none is gathered",
        'Leave it out, or store weights so: preset = "fsdp"',
    ),
    "allow": Key(
        lambda step, words: all(_has_table(step, word) for word in words),
        _without_table,
    ),
}

ALWAYS: Mapping[str, str] = {
    "mesh": "the ranks themselves; a plan for another mesh is refused",
    "params": "how a weight is stored; names and axes that there are not are refused",
    "inputs": "how the batch is dealt out; names and axes that there are not are refused",
    "values": "where a result lies; names and axes that there are not are refused",
    "batch": "what a step is called with, also where one rank has all of it",
    "compile": "every step computes something",
    "profiler_ranges": "refused where nothing has a range",
    "backend": "a program does not start on another one",
    "microbatches": "the number of turns, also if it is one",
    "order": "refused without the schedule that it belongs to",
    "memory_bytes": "a limit, also for a step that is far below it",
    "stages": "refused on a mesh without pp",
    "notes": "words for people",
    "hooks": "modules that there are not are refused",
    "apart": "no key: what no pattern may fit",
    "of_another": "no key: whose plan it is",
    "homes": "no key: where another program's parameters lie",
    "other_passes": "no key: a comment, compared with the passes in force",
    "left_out": "no key: a comment, compared with the passes in force",
}


def idle_keys(step: Compiled) -> Iterator[str]:
    """A sentence for each key that the plan says and nothing in the step reads.

    What the plan's preset says anyway is no key of its own: a printed plan has both.
    """
    alone = {axis for axis, size in step.state.mesh.axes if size == 1}  # of plans for more ranks
    of_preset = _said(said_by(step.asked, step.state.mesh.cutting_axes()))
    for name, (key, names, given) in said(step.asked).items():
        if alone & {*names} or (name in of_preset and of_preset[name][2] == given):
            continue
        if not key.read(step, given, *names):
            yield key.told(name, step, given, names)
    axes = step.state.mesh.cutting_axes()
    if step.asked.preset and step.asked.params:
        yield from overruled_preset(step.asked, step.plan, step.local.graph, axes)


def said(plan: Plan) -> dict[str, tuple[Key, tuple[str, ...], Any]]:
    """The keys of ``KEYS`` that a plan says, each with the names for ``*``, and the value."""
    return _said({name: each for name, each in vars(plan).items() if plan.says(name)})


def _said(fields: Mapping[str, Any]) -> dict[str, tuple[Key, tuple[str, ...], Any]]:
    found = {}
    for row, key in KEYS.items():
        name, *stars = row.split(".")
        for names, given in _entries(fields[name], len(stars)) if name in fields else ():
            found[".".join((name, *names))] = key, names, given
    return found


def _entries(given: Any, depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The entries of nested tables, each with its names from the outermost on."""
    if not depth:
        yield (), given
        return
    for name, inner in given.items():
        for names, each in _entries(inner, depth - 1):
            yield (name, *names), each
