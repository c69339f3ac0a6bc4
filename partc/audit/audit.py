"""Check a program's text: the function ``audit``, which ``partc check`` calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from partc.audit.changed_lines import Changes
from partc.audit.fixed import check_fixed
from partc.audit.numbers import check_numbers
from partc.audit.order import check_alike, check_order, within
from partc.audit.other_numbers import check_other_numbers
from partc.audit.record import fail, record
from partc.audit.recording import Record, check_names
from partc.audit.sums import Followed, check_sums, summing_axes
from partc.audit.tables import check_tables
from partc.codegen.safety import check_source
from partc.dryrun.nccl_order import ALL_RULES
from partc.dryrun.nccl_order import check_order as check_nccl_order
from partc.dryrun.recording import record as nccl_events
from partc.graph.fake_calls import quiet_log
from partc.plan import Plan
from partc.plan.mesh import PP, Mesh
from partc.program import Program
from partc.program.fixed_text import FixedText
from partc.program.hooks import NAME as HOOKS
from partc.program.hooks import called

FLOATS = re.compile(r"\b(float16|bfloat16|float32|float64)\b")
RECORDED = 16  # ranks of a mesh that are all recorded; of larger ones the first and last of a role


@dataclass(frozen=True)
class Audit:
    """What was checked of a program, each as a sentence."""

    checked: tuple[str, ...]
    unchecked: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.checked, *(f"not checked: {each}" for each in self.unchecked)])

    def as_json(self) -> dict[str, Any]:
        return {"checked": list(self.checked), "unchecked": list(self.unchecked)}


def audit(program: Program) -> Audit:
    """Check the text of every rank as it stands; nothing but the program is needed.

    The text may do nothing but compute with torch. Its tables must be those of the model and the
    mesh, and what no run can judge must stand as it was printed. On tensors without data every
    rank's step must run with shapes that fit, read what a transfer brings after its one wait, leave
    alone what is under way, change no parameter, and give every trained parameter a gradient of its
    shape. All members of a group must start the same transfers in one order, and no ranks wait for
    each other, by the rules of gloo and of NCCL. Where the program has the numbers of the
    single-device step, all ranks run in this process in float64, and loss, gradients, gradients
    added up over two steps, buffers and results must be those; and each rank must draw its random
    numbers from keys of its own.

    Raises:
        CheckError: a check failed; it names file and line.
        RunError: ranks that run in this process wait for each other.
        LoadError: a source is no rank program.
    """
    for name, text in sorted(program.sources.items()):
        check_source(text, name)
        check_names(text, name)
    with quiet_log():
        found = _audited(replace(program, hooks=None))
    own = called(program.sources.values())
    if own:
        theirs = f"what your functions in {HOOKS} compute: {', '.join(own)}"
        found = replace(found, unchecked=(*found.unchecked, theirs))
    return found


def _audited(program: Program) -> Audit:
    check_tables(program)
    num = check_fixed(program)
    checked = [f"text: what no run can judge stands as printed (lines and functions: {num})"]
    checked += _transfers(program)
    sums, expected = check_sums(program), program.expected.numbers
    of_sums, open_sums = _of_sums(sums, program.mesh, expected is not None)
    checked.append(of_sums)
    unchecked = (*open_sums, *_of_dtypes(program), *_of_rounding(program))
    changes = _changes(program)
    if expected is None:
        unchecked += (f"numbers: {program.expected.lacking}",)
        if changes:
            unchecked += (f"edits ({changes}) at bounds, on NaN and in eval mode, without numbers",)
        return Audit(tuple(checked), unchecked)
    constant = check_numbers(program, expected, str(changes))
    num = len(expected.tensors)
    checked.append(f"numbers: {num} tensors of all ranks are those of the step on one device")
    if program.draws:
        checked.append(f"draws: {len(program.draws)} sites, each rank and step with its own keys")
    unchecked += tuple(
        f"which numbers {name} draws, as constants were drawn" for name in sorted(constant)
    )
    if changes:
        told, open_ones = check_other_numbers(program, expected, changes)
        checked.append(told)
        unchecked += tuple(open_ones)
    return Audit(tuple(checked), unchecked)


def _changes(program: Program) -> Changes:
    """What was edited of a program whose printed text is known."""
    printed = (program.fixed or FixedText()).sources
    return Changes.of(printed, program.sources) if printed else Changes()


def _of_dtypes(program: Program) -> Iterator[str]:
    """What is not known of a program that computes in several float dtypes."""
    used = {name for text in program.sources.values() for name in FLOATS.findall(text)}
    if len(used) > 1:
        yield (
            f"in which of {', '.join(sorted(used))} a call between two casts computes, as numbers "
            "are compared in float64; the casts stand as printed"
        )


def _of_rounding(program: Program) -> Iterator[str]:
    """What is not known of sums in narrow numbers."""
    plan = Plan.parse(program.plan)
    how, weights = plan.compress, plan.compress_weights
    if weights is not None:
        yield (
            f"what {weights.wire} makes of weights that are gathered: the check gathers them as "
            "they are, and the classes that round stand as printed; partc verify compares them "
            "with the definition of the format"
        )
    if how is not None:
        yield (
            f"what {how.wire} makes of sums of gradients: the check sums exactly in its place, and "
            "the classes that round stand as printed; partc verify compares them with the "
            "definition of the format"
        )


def _of_sums(sums: Followed, mesh: Mesh, numbers: bool) -> tuple[str, tuple[str, ...]]:
    """What is known of sums over ranks, and what is not; ``numbers`` tell of sums too."""
    if not summing_axes(mesh):
        return "sums: no axis but pp, so no rank has a part of another one's sum", ()
    if not sums.total:
        return "sums: there are no gradients", ()
    if sums.known == sums.total:
        return f"sums: {sums.known} gradients are summed over the right axes, each once", ()
    told = f"sums: {sums.known} of {sums.total} gradients could be followed call by call"
    if numbers:
        return f"{told}; of the others the numbers tell", ()
    unknown = (
        f"sums of {sums.total - sums.known} gradients: a call on their way has no rule, or is not "
        "the same on all ranks; partc verify compares these gradients with the model's"
    )
    return told, (unknown,)


def _transfers(program: Program) -> Iterator[str]:
    """Record ranks' transfers, and check that they meet; says what was checked."""
    mesh = program.mesh
    every = mesh.num_ranks <= RECORDED
    ranks = range(mesh.num_ranks) if every else sorted({*_ends(program)})
    for library in _libraries(program):
        records = {rank: record(program.role(rank), rank, library) for rank in ranks}
        num = sum(len(each.transfers) for each in records.values())
        yield f"{library}: {len(records)} ranks run on shapes, {num} transfers are waited for"
        _meet(program, records, every)
    _meet_on_nccl(program, ranks)
    yield "order: all members start the same transfers, and no ranks wait for each other"


def _meet_on_nccl(program: Program, ranks: Iterable[int]) -> None:
    """Check that no ranks wait for each other by NCCL's rules, under which no send is buffered."""
    events = {}
    for rank in ranks:
        role = program.role(rank)
        try:
            events[rank] = nccl_events(role, rank)
        except Exception as error:
            fail(role, rank, error)
    for rules in ALL_RULES:
        check_nccl_order(events, rules)


def _libraries(program: Program) -> tuple[str, ...]:
    """The libraries of collectives for which the text does different things."""
    asks = any("get_backend_config" in text for text in program.sources.values())
    return ("gloo", "nccl") if asks else ("gloo",)


def _ends(program: Program) -> Iterator[int]:
    """The first and the last rank of every place in the pipeline."""
    places: dict[int, list[int]] = {}
    for rank, coords in enumerate(program.mesh.all_coords()):
        places.setdefault(coords.get(PP, 0), []).append(rank)
    for ranks in places.values():
        yield from (ranks[0], ranks[-1])


def _meet(program: Program, records: Mapping[int, Record], every: bool) -> None:
    """Check that the transfers of the recorded ranks meet.

    Of a large mesh these are two pipelines, and at every place of these the ranks differ in their
    coordinates alone: so do those between them, which run the same text.
    """
    if every:
        check_order([*records.values()])
        return
    places: dict[int, list[Record]] = {}
    for rank, each in records.items():
        places.setdefault(program.mesh.coords(rank).get(PP, 0), []).append(each)
    for alike in places.values():
        check_alike(alike[0], alike[-1])
    for end in (0, -1):
        check_order(within([alike[end] for alike in places.values()]))
