"""What a script says of a plan to a wrapper, before anything is compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from partc.api import compile as compile_program
from partc.errors import UsageError
from partc.given_plan import read_plan
from partc.passes.search.plans.choose_plan import AUTO_PLAN
from partc.passes.shard.apply_preset import preset_words
from partc.plan.field_kinds import FIELDS, check_fields
from partc.plan.mesh import Mesh
from partc.wrong_calls import did_you_mean, quoted

_DECIDED = ("model", "mesh", "inputs", "loss", "plan")  # by other arguments of a wrapper


def check_said(where: str, mesh: Any, plan: Any, options: Any, *, deals: bool = True) -> None:
    """PlanError for what is no mesh or no plan; UsageError for options that are none of
    ``partc.compile``'s, and for islands where the wrapper ``deals`` out batches to ranks.
    """
    if deals and Mesh.of(mesh).islands > 1:
        raise UsageError(
            where=where, what=f"the mesh {Mesh.of(mesh)} has islands",
            why="it deals out every batch to all ranks, and each island has batches of its own",
            do="Write the loop yourself: stage.loader(dataset) gives each island its rows.",
        )  # fmt: skip
    preset = read_plan(plan).preset
    if preset and preset != AUTO_PLAN:
        preset_words(preset)
    if not isinstance(options, Mapping | None):
        raise UsageError(
            where=f"{where}(options=...)", what=f"it is {quoted(options)}",
            why="it has further arguments of partc.compile by name",
            do='Pass a dict: options={"microbatches": 4}.',
        )  # fmt: skip
    known = [name for name in inspect.signature(compile_program).parameters if name not in _DECIDED]
    unknown = next((name for name in options or {} if name not in known), None)
    if unknown is not None:
        raise UsageError(
            where=where, what=f"there is no option {unknown!r}",
            why=f"partc.compile has {', '.join(known)}",
            do=f"Pass it beside the options: {unknown}=..." if unknown in _DECIDED
            else did_you_mean(unknown, [*known, "plan", "mesh"]) or "Leave it out.",
        )  # fmt: skip
    said = {n: x for n, x in (options or {}).items() if n in FIELDS and x is not None}
    check_fields({n: tuple(x) if isinstance(x, list) else x for n, x in said.items()}, where)


def check_known(
    where: str, named: Mapping[str, Any], made: type, ours: type, others: Mapping[str, str]
) -> None:
    """UsageError for arguments that no class has which makes a wrapper, the library's among them.

    ``made``: the class of what is made, of which ``ours`` is the wrapper. ``others``: what to do
    about names that belong elsewhere.
    """
    known = ["self"]
    for cls in made.__mro__[made.__mro__.index(ours) :]:
        if "__init__" not in vars(cls) or cls is object:
            continue
        parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if passes_on and not cls.__module__.startswith("partc."):
            return  # to a class that nobody knows here
        known += [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    unknown = next((name for name in named if name not in known), None)
    if unknown is not None:
        raise _unknown(where, unknown, known[1:], others)


def _unknown(where: str, name: str, known: Sequence[str], others: Mapping[str, str]) -> UsageError:
    do = others.get(name, "")
    if name in inspect.signature(compile_program).parameters:
        do = f"It is one of partc.compile: options={{{name!r}: ...}}."
    return UsageError(
        where=f"{where}()", what=f"there is no argument {name!r}",
        why=f"it takes {', '.join(dict.fromkeys(n for n in known if n != 'self'))}",
        do=do or did_you_mean(name, known) or "Leave it out.",
    )  # fmt: skip


@contextmanager
def in_our_words(where: str, do: str) -> Iterator[None]:
    """What the wrapped library says of wrong arguments and files, as a UsageError."""
    try:
        yield
    except (ValueError, TypeError, OSError, KeyError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(where=where, what=said, why="", do=do) from error


def check_names(where: str, given: Any) -> None:
    """UsageError for a text in the place of a list of texts."""
    listed = isinstance(given, Collection) and not isinstance(given, str | Mapping)
    if not listed or not all(isinstance(each, str) for each in given):
        raise UsageError(
            where=where, what=f"it is {quoted(given)}", why="it is a list of names of results",
            do=f"Pass a list: [{quoted(given)}]." if isinstance(given, str) else "Pass texts.",
        )  # fmt: skip


def check_loss(where: str, loss: Any) -> None:
    """UsageError for what is no function of model and inputs, such as a word."""
    if loss is not None and not callable(loss):
        raise UsageError(
            where=f"{where}(loss=...)", what=f"it is {quoted(loss)}",
            why="a loss is called as loss(model, *inputs), and computes predictions too",
            do="Pass a function: def loss(model, x, y): return criterion(model(x), y).",
        )  # fmt: skip


def check_no_plugins(where: str, named: Mapping[str, Any], plugins: Callable[[str], bool]) -> None:
    """UsageError for other ways to distribute a model."""
    other = next((name for name, given in named.items() if given and plugins(name)), None)
    if other is not None:
        raise UsageError(
            where=f"{where}({other}=...)", what="it shards the model in another way",
            why="the plan says how tensors are sharded",
            do='Leave it out; plan="fsdp" shards as FSDP.',
        )  # fmt: skip
