"""A step's arguments and what it gives back, as the script has them, and the tensors of a program.

``stage.step(**batch)`` becomes the tensors of ``Step.step(ids, labels)``; the loss and the tensors
by name that this returns become ``(loss, extras)`` as the script's loss has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partc.errors import RunError
from partc.program.step.step_loss import extra
from partc.trace.arguments import Arguments
from partc.trace.returns import LOSS, loss_name
from partc.trace.trees import Tree, TreeError
from partc.wrong_calls import did_you_mean

MOST_NAMED = 8
ALSO = "by a loss of its own, other = model.also(loss), and other.step or other.eval_step"


def tensors_given(
    arguments: Arguments, args: Sequence[Any], kwargs: Mapping[str, Any], call: str = "step"
) -> Sequence[Tensor]:
    """The tensors in the arguments of a step, in the order in which its program takes them.

    ``call`` is the method that was called, as messages name it. RunError for an argument that is
    missing, unknown, given twice, or not as it was compiled.
    """
    _check_no_keys(arguments, args, call)
    _check_no_rows(arguments, args, call)
    try:
        return arguments.tensors(args, kwargs)
    except TypeError as error:
        raise _unbound(arguments, args, kwargs, call, error) from None
    except TreeError as error:
        raise _differs(error, call) from None


def _check_no_keys(arguments: Arguments, args: Sequence[Any], call: str) -> None:
    """RunError where names of inputs stand in their place, as ``step(*batch)`` of a dict."""
    texts = [each for each in arguments.each if isinstance(each.tree.plain, str)]
    if texts or not args or not all(isinstance(each, str) for each in args):
        return
    known = [each.name for each in arguments.each]
    do = f"Write two stars: {call}(**batch)."
    if len(known) == 1 and arguments.each[0].tree.kind == "dict":
        do = f"Pass the dict as it was compiled: {call}(batch)."
    elif not {*args} <= {*known}:
        do = f"Write two stars, {call}(**batch), of a dict with the names ({', '.join(known)})."
    raise RunError(
        where=call, what=f"it is given the names {', '.join(map(repr, args))}, and no tensors",
        why="the batch is a dict, and * before a dict gives its keys", do=do,
    )  # fmt: skip


def _check_no_rows(arguments: Arguments, args: Sequence[Any], call: str) -> None:
    """RunError for the rows of a batch in the place of their tensors, as ``collate_fn`` leaves them
    that joins nothing.
    """
    rows = args[0] if len(args) == 1 and isinstance(args[0], list) else args
    first = rows[0] if len(rows) > 0 else None
    alike = isinstance(first, tuple | list | Mapping) and all(
        type(row) is type(first) and len(row) == len(first) for row in rows
    )
    several = len(rows) > 1 and len(rows) != len(arguments.each)
    if several and alike and first is not None and len(first) == len(arguments.each):
        raise RunError(
            where=call, what=f"it is given {len(rows)} rows, each a {type(first).__name__}, and no "
            "batch",
            why="a step takes one tensor of each input, with all rows in it",
            do="Join them: torch.utils.data.default_collate(rows), as a DataLoader without "
            "collate_fn does; a collate_fn(rows) of yours returns tensors, torch.stack([x for x, _ "
            "in rows]) of each.",
        )  # fmt: skip


def _unbound(
    arguments: Arguments, args: Sequence[Any], kwargs: Mapping[str, Any], call: str,
    error: TypeError,
) -> RunError:  # fmt: skip
    known = [a.name for a in arguments.each]
    needed = [a.name for a in arguments.each if a.default is None or [*a.tree.names()]]
    more = ", ..." if len(needed) > MOST_NAMED else ""
    what, do = str(error), "Pass these, by place or by name"
    unknown = next((name for name in kwargs if name not in known), None)
    if unknown is not None:
        what = f"there is no argument {unknown!r}"
        do = did_you_mean(unknown, [*known, "scale"] if call == "step" else known) or do
    elif "too many" in what:
        what = f"{what}, {len(args)} are given"
        do = _by_name(arguments) or _surplus(known, call)
    elif "missing" in what and len(args) == 1 and isinstance(args[0], Mapping):
        do += f": {call}(**batch)"
    elif len(args) == 1 and isinstance(args[0], list | tuple):
        do += f": {call}(*batch)"
    elif call == "step" and args:
        do += "; what the model returns for its own arguments stage(...) gives behind stage.eval()"
    return RunError(
        where=call, what=what,
        why=f"it takes ({', '.join(needed[:MOST_NAMED])}{more}), as the loss that was compiled",
        do=do if do.endswith("?") else f"{do}.",
    )  # fmt: skip


def _surplus(known: Sequence[str], call: str) -> str:
    """What to do about more arguments by place than there are."""
    do = f"Leave out what stands behind {known[-1]}" if known else "Leave them out"
    return f"{do}; scale=... goes by name" if call == "step" else do


def _by_name(arguments: Arguments) -> str:
    """What to do about arguments by place where they go by name; "" where none does."""
    named = [f"{a.name}=..." for a in arguments.each if a.kind == "KEYWORD_ONLY"]
    return f"Pass by name: {', '.join(named[:MOST_NAMED])}" if named else ""


def _differs(error: TreeError, call: str) -> RunError:
    do = f"Pass what was compiled, or compile again; with partc.parallelize, {ALSO}."
    if "the string" in error.what:
        do = "Leave it out of the batch, for which the loss then needs no argument; or pass what "
        do += "was compiled, or compile for it."
    elif "the number" in error.what or "None" in error.what:
        do = "Pass what was compiled, make it a tensor and compile again, or compile for it: with "
        do += f"partc.parallelize, {ALSO}."
    if "is a ndarray now" in error.what or "is a list now" in error.what:
        do = "Pass a tensor, torch.as_tensor(...), or compile for it."
    if "is a tuple now" in error.what:
        do = "Pass a tensor; of rows torch.utils.data.default_collate(rows) makes tensors."
    if "is a dict now" in error.what:
        do = f"Pass a dict as its entries, {call}(**batch), or compile for it."
    return RunError(
        where=f"{call}, {error.where}",
        what=error.what,
        why="a program computes with tensors; all else is as it was when it was compiled",
        do=do,
    )


class Returned:
    """Gives back the loss of a step, or ``(loss, extras)`` if the compiled loss did.

    ``tree``: what it returned, whose first entry is the loss; None for a loss alone.
    """

    def __init__(self, tree: Tree | None) -> None:
        self.tree = tree
        self._extras: Mapping[str, Tensor] = {}

    def loss(self, result: Any) -> Tensor:
        """The loss of what a program's step returned; the extras are kept for ``whole``."""
        loss: Tensor = result
        if isinstance(result, tuple):
            loss, self._extras = result
        return loss

    def of_results(self, results: Mapping[str, Tensor]) -> Any:
        """What ``whole`` gives, of a program that computes the loss without gradients."""
        extras = dict(results)
        loss = extras.pop(loss_name(self.tree))
        self._extras = extras
        return self.whole(loss)

    def given_out(self, results: Mapping[str, Tensor]) -> Any:
        """What the model returns, with these results of it, from which the script computes."""
        assert self.tree is not None, "it has the results beside the loss"
        return self.tree.built({LOSS: torch.zeros(()), **results})[1]

    def whole(self, loss: Tensor) -> Any:
        """The loss, with the extras of the step that gave it, detached."""
        if self.tree is None:
            return loss
        extras = {name: extra(each) for name, each in self._extras.items()}
        self._extras = {}
        try:
            return self.tree.built({LOSS: loss, **extras})
        except TreeError as error:
            raise RunError(
                where="step",
                what=f"the loss returns a {error.where.rpartition(':')[2]}",
                why=error.what,
                do=f"Import {error.where.partition(':')[0]} before the step, or let the loss "
                "return a dict.",
            ) from None
