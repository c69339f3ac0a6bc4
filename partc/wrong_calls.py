"""Calls with arguments that no function here takes: unknown names, missing ones, things that are no
path; and the names that somebody may have meant."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from partc.errors import PartcError, UsageError
from partc.misplaced import misplaced
from partc.other_words import told_elsewhere

if TYPE_CHECKING:
    from inspect import Signature

# inspect, traceback and difflib are imported where an error is told: they take as long as all else
# that `partc --help` imports.

P = ParamSpec("P")
R = TypeVar("R")
Made = TypeVar("Made")
RENAMED = {  # old names of a plan's fields and of arguments: their names now
    "join_mb": "bucket_mb",
    "pieces": "overlap_pieces",
    "chunks": "virtual_stages",
    "islands": "local_steps",
}
LEAST_BEGUN = 3  # characters of a name that was cut short, as tol for tolerance
LONGEST = 60  # characters of an argument that a message quotes
_SURPLUS = {  # what somebody means who passes more by place than there is
    "compile": "Example inputs are one argument, a tuple: compile(model, mesh, (x, y), "
    "loss=loss_of), and what follows them goes by name",
    "verify": "Inputs are one argument, a tuple: verify(program, model, (x, y), loss_of), and what "
    "follows goes by name",
    "clip_grad_norm_": "Leave the parameters out, a stage knows its own: "
    "stage.clip_grad_norm_(1.0)",
    "with_variants": "Each plan goes by the name of its variant: with_variants(program, int8=plan)",
    "graph_pass": '@graph_pass(after="insert_collectives") says behind which pass yours runs',
    "parallelize": "The first step compiles for its batch, parallelize(model, mesh, "
    "loss=loss_of), and what follows goes by name",
    "loader": "How many rows a step has follows from the plan: loader(dataset, rows_per_step=16) "
    "counts those of all ranks, and what follows the dataset goes by name",
    "report": 'What it gives is written by save: partc.report(program).save("report.html")',
    "load": "partc.with_model(program, model, loss) gives a loaded program the loss of the model",
}
MOST_NAMED = 6
_MISSING = {
    "after": '@graph_pass(after="insert_collectives") names the pass that runs before',
    "axes": 'Mesh.of("dp=2,tp=4") reads axes from a text',
    "groups": 'Topology.load("dgx-h100", devices=64) takes a machine that comes with partc',
    "inputs": "a tuple of tensors with the shapes of the global batch",
    "max_norm": "stage.clip_grad_norm_(1.0); math.inf gives the norm alone",
    "optimizer": "the optimizer over stage.parameters()",
    "loggers": "Meter([JsonLines('metrics.jsonl')]) says who is told of each step",
    "mesh": 'mesh="dp=4" says how many ranks there are, and along which axes',
    "path": 'the folder to write, for example "build"',
}
_MISSING_OF = {  # the same, where one call has another meaning for it
    ("load", "path"): 'the folder that program.save(...) wrote, partc.load("build")',
    ("data_rank", "rank"): "the number of a process, program.data_rank(dist.get_rank())",
    ("role_of", "rank"): "the number of a process, program.role_of(0)",
    (
        "load_full_optim_state_dict",
        "state_dict",
    ): "the optimizer comes first, load_full_optim_state_dict(optimizer, state_dict)",
    ("loader", "dataset"): "a torch Dataset, a list of rows, or an IterableDataset",
    ("sampler", "dataset"): "a torch Dataset, or a list of rows",
}

_AGAIN = {  # how another one is made of something that stays as it was made, by class and field
    ("Program", "plan"): "Compile again: partc.compile(model, mesh, batch, loss=loss, "
    "plan=partc.Plan.parse(text)).",
    ("Program", "sources"): "Edit the files of the saved program, and accept them by "
    "partc check FOLDER --accept-edits.",
    ("Program", "hooks"): "Edit hooks.py in the folder of the saved program.",
    ("Program", ""): "Compile again: partc.compile(model, mesh, batch, loss=loss, plan=plan).",
    ("Mesh", ""): 'Make another one: partc.Mesh.of("dp=2,tp=4").',
}


def known_arguments(call: Callable[P, R]) -> Callable[P, R]:
    """The function, which answers arguments that it does not take with a UsageError.

    ``compile(microbatch=2)`` then says that ``microbatches`` may be meant.
    """
    flags = [name for name, kind in call.__annotations__.items() if kind == "bool"]

    @wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in flags:
            check_flag(kwargs.get(name), f"{_name_of(call)}({name}=...)")
        try:
            return call(*args, **kwargs)
        except (TypeError, PartcError) as error:
            from inspect import signature

            known = signature(call)
            if told := misplaced(_name_of(call), known, args, kwargs):
                raise told from None
            if isinstance(error, PartcError):
                raise
            try:
                known.bind(*args, **kwargs)
            except TypeError as unbound:
                raise _unbound(call, known, kwargs, unbound) from None
            raise

    return checked


def known_fields(cls: type[Made]) -> type[Made]:
    """A class, whose ``__init__`` answers as ``known_arguments`` does, and a frozen one whoever
    sets its fields as ``frozen`` does.
    """
    cls.__init__ = known_arguments(cls.__init__)  # type: ignore[method-assign]
    return frozen(cls) if vars(cls)["__dataclass_params__"].frozen else cls


class SetError(UsageError, AttributeError):
    """A field of something was set that stays as it was made."""


def frozen(cls: type[Made]) -> type[Made]:
    """A frozen dataclass, which says to whoever sets its fields how another one is made."""

    def refused(self: Any, name: str, *value: Any) -> None:
        raise SetError(
            where=f"{cls.__name__.lower()}.{name}", what="it cannot be set or deleted",
            why=f"a {cls.__name__} stays as it was made, and others rest on what it says",
            do=_AGAIN.get((cls.__name__, name)) or _AGAIN.get((cls.__name__, "")) or
            f"Make another one: dataclasses.replace({cls.__name__.lower()}, {name}=...).",
        )  # fmt: skip

    cls.__setattr__ = cls.__delattr__ = refused  # type: ignore[method-assign]
    return cls


def _unbound(
    call: Callable[..., Any], of: Signature, named: Iterable[str], error: TypeError
) -> UsageError:
    name = _name_of(call)
    each = [p for p in of.parameters if p not in ("self", "cls") and not p.startswith("_")]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in of.parameters.values())
    unknown = None if takes_any else next((n for n in named if n not in each), None)
    if unknown is None:
        missing = str(error).rpartition(": ")[2].strip("'")
        told = _MISSING_OF.get((name, missing)) or _MISSING.get(missing)
        what, told = str(error), told or f"{help_on(call)} says what each is"
        do = f"Pass what is missing: {told}." if "missing" in what else _surplus(call, name, of)
    else:
        what, told = f"there is no argument {unknown!r}", told_elsewhere(name, unknown)
        do = f"Leave it out: {told}." if told else did_you_mean(unknown, each)
        if RENAMED.get(unknown) in each:
            do = f"It is called {RENAMED[unknown]!r}."
    return UsageError(
        where=f"{name}()", what=what, why=f"it takes {', '.join(each) or 'nothing'}",
        do=do or f"Leave it out, or see {help_on(call)}.",
    )  # fmt: skip


def help_on(call: Callable[..., Any]) -> str:
    """What a user types to read about a function: ``help(partc.compile)``, ``help(stage.seed)``."""
    import partc

    path = call.__qualname__.removesuffix(".__init__")
    first, _, method = path.partition(".")
    if first in partc.__all__ and getattr(partc, first).__module__ == call.__module__:
        return f"help(partc.{path})"
    if not method and hasattr(partc.Program, path):  # written outside of the class
        return f"help(partc.Program.{path})"
    if method and call.__module__.startswith("partc.program."):  # of what a stage is made of
        return f"help(stage.{method})"
    return f"help({call.__module__}.{path})"


def _name_of(call: Callable[..., Any]) -> str:
    """A function as messages name it: ``compile``; ``Mesh.of`` of a class's own."""
    name = call.__qualname__.removesuffix(".__init__")
    is_of_class = call.__code__.co_varnames[:1] == ("cls",)
    return name if is_of_class else name.rpartition(".")[-1]


def _surplus(call: Callable[..., Any], name: str, of: Signature) -> str:
    """What to do about more arguments by place than a function takes."""
    if name in _SURPLUS:
        return f"{_SURPLUS[name]}."
    named = [p.name for p in of.parameters.values() if p.kind is p.KEYWORD_ONLY]
    named = [n for n in named if not n.startswith("_")]
    listed = ", ".join(f"{n}=..." for n in named[:MOST_NAMED])
    return f"Pass by name: {listed}." if named else f"See {help_on(call)}."


def did_you_mean(name: object, known: Iterable[str], alike: float = 0.6) -> str:
    """``Did you mean 'fsdp'?`` for the known names next to one, whatever their case; "" if none is.

    ``alike``: from how alike on, 1 being equal.

    >>> did_you_mean("FDSP", ["ddp", "fsdp"])
    "Did you mean 'fsdp'?"
    """
    from difflib import get_close_matches

    by_lower = {each.lower(): each for each in known}
    said = str(name).lower()
    near = get_close_matches(said, by_lower, n=2, cutoff=alike)
    if not near and len(said) >= LEAST_BEGUN:
        near = [each for each in by_lower if each.startswith(said)][:2]
    return f"Did you mean {' or '.join(repr(by_lower[each]) for each in near)}?" if near else ""


def is_word(given: object, words: Collection[str]) -> bool:
    """Whether a value is one of some words; an array, which compares entry by entry, is none."""
    return isinstance(given, str) and given in words


def quoted(given: object) -> str:
    """A value as a message quotes it: its text, cut, without control characters; else its type."""
    items = given if isinstance(given, list | tuple) else [given]
    if all(x is None or isinstance(x, str | bytes | bool | int | float) for x in items):
        text = repr(given)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    if isinstance(given, type):
        return f"the class {given.__name__}"
    kind = type(given).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def as_path(given: Any, where: str) -> Path:
    """The path; UsageError for what cannot be one, or is the text of a file."""
    if isinstance(given, str) and "\n" in given.strip():
        raise UsageError(
            where=where, what="a text of several lines stands where a path is needed",
            why="a path names the file that has the text", do="Write it to a file, and name that.",
        )  # fmt: skip
    if not isinstance(given, str | os.PathLike) or given == "" or "\0" in os.fspath(given):
        raise UsageError(
            where=where, what=f"{quoted(given)} is no path", why="a path is a text or a Path",
            do='Name a file or folder, for example "build".',
        )  # fmt: skip
    refuse_tilde(given, where)
    return Path(given)


def refuse_tilde(given: str | os.PathLike[str], where: str) -> None:
    """UsageError for a path that begins with ``~``, as a folder of that very name would be made."""
    text = str(given)
    if text.startswith("~") and (home := os.path.expanduser(text)) != text:
        raise UsageError(
            where=f"{where}, {text}".removeprefix(f"{text}, "),
            what="it names a folder called ~ in the current one, and not the home folder",
            why="a shell reads ~ where a word begins with it, and Python does not",
            do=f"Write {home}; in Python os.path.expanduser({text!r}) gives it.",
        )  # fmt: skip


def check_flag(given: Any, where: str) -> None:
    """UsageError for what is no truth value, nor left out: the text "no" would count as yes."""
    if not isinstance(given, bool | int | None) or given not in (None, 0, 1):
        raise UsageError(
            where=where, what=f"it is {quoted(given)}", why="it is True or False",
            do="Write True or False.",
        )  # fmt: skip


def check_whole_number(given: Any, where: str, least: int = 0) -> int:
    """The number; UsageError for what is no whole number, or is below ``least``."""
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        above = f", {least} or more" if least >= 0 else ""  # below 0 nobody comes near the bound
        text = isinstance(given, str) and given.strip().lstrip("-").isdigit()
        why = "it is a text" if isinstance(given, str) else ""
        if isinstance(given, int) and not isinstance(given, bool):
            why = f"the least is {least}"
        raise UsageError(
            where=where, what=f"{quoted(given)} is no whole number{above}",
            why=why,
            do=f"Write {int(given)}, without quotation marks." if text
            else f"Give a whole number{above}.",
        )  # fmt: skip
    return given
