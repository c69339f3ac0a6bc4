"""What a script says of a plan to a wrapper, before anything is compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from partc.errors import UsageError
from partc.given_plan import read_plan
from partc.passes.search.plans.choose_plan import AUTO_PLAN
from partc.passes.shard.preset_words import preset_words
from partc.plan.field_kinds import FIELDS, check_fields
from partc.plan.mesh import Mesh
from partc.trace.inputs_refused import check_loss as check_takes_model
from partc.wrappers.instead import DECIDED, OF_COMPILE, instead
from partc.wrong_calls import quoted


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
    known = [name for name in OF_COMPILE if name not in DECIDED]
    unknown = next((name for name in options or {} if name not in known), None)
    if unknown is not None:
        raise UsageError(
            where=where, what=f"there is no option {unknown!r}",
            why=f"partc.compile has {', '.join(known)}",
            do=instead(where, unknown, [*known, "plan", "mesh"], {}),
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
    return UsageError(
        where=f"{where}()", what=f"there is no argument {name!r}",
        why=f"it takes {', '.join(dict.fromkeys(n for n in known if n != 'self'))}",
        do=instead(where, name, known, others),
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
    """UsageError for a text in the place of a list of texts, and for what is no list."""
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise UsageError(
            where=where, what=f"it is {quoted(given)}", why="it is a list of names of results",
            do=f"Pass a list: [{quoted(given)}]." if isinstance(given, str)
            else 'Pass texts, ["logits"], or leave it out.',
        )  # fmt: skip


def check_loss(where: str, loss: Any) -> None:
    """UsageError for what is no function of model and inputs, such as a word; TraceError for a
    loss of torch's, which takes no model.
    """
    if callable(loss):
        check_takes_model(loss)
    if loss is not None and not callable(loss):
        raise UsageError(
            where=f"{where}(loss=...)", what=f"it is {quoted(loss)}",
            why="a loss is called as loss(model, *inputs), and computes predictions too",
            do="Pass a function: def loss(model, x, y): return criterion(model(x), y).",
        )  # fmt: skip


def check_outputs(where: str, outputs: Sequence[str], loss: Any) -> None:
    """UsageError for names of results where they are a loss's to return."""
    check_names(f"{where}(outputs=...)", outputs)
    if "loss" in outputs:
        others = [each for each in outputs if each != "loss"]
        raise UsageError(
            where=f"{where}(outputs=...)", what="'loss' is one of them",
            why="a training step returns its loss in any case",
            do=f"Leave it out: outputs={others}." if others else "Leave outputs out.",
        )  # fmt: skip
    if outputs and loss is not None:
        raise UsageError(
            where=f"{where}(outputs=...)", what="loss= is given too",
            why="outputs names results of a model that computes its loss itself",
            do=f"Let the loss return them: return loss, {{{outputs[0]!r}: ...}}.",
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


def check_compiles_once(where: str, named: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """UsageError for an argument by which torch.compile would compile what a program computes."""
    given = next((name for name in arguments if named.get(name)), None)
    if given is not None:
        raise UsageError(
            where=f"{where}({given}=...)", what="torch.compile would compile the model too",
            why="partc compiles a training step as a whole, and says itself who compiles its text",
            do='Leave it out; for TorchInductor options={"compile": "inductor"}.',
        )  # fmt: skip
