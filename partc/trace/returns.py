"""What a training step gives back: a loss, or ``(loss, extras)``.

Extras are what a script wants to see of a step beside its loss: logits, counts, a hidden state for
the next step. They may be nested; the program gives back their tensors by name, and the stage the
structure that the loss returned.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from partc.errors import TraceError
from partc.trace.script_loss import GivenOut
from partc.trace.trees import Names, Tree, TreeError, tensors_of, told, tree_of

LOSS = ""  # the name of the loss among the tensors that are returned
EXTRA = "extra "  # with which the plan's note on each begins
Objective = Callable[..., Any]


@dataclass
class Returns:
    """Notes what the loss of a step returns: ``tree``, whose first tensor is the loss.

    None for a loss alone. ``own``: the loss is the model's own, and no function of the user's.
    """

    own: bool
    tree: Tree | None = None
    inputs: tuple[str, ...] = ()  # those whose gradients come last
    is_known: bool = False  # whether a step was run

    @property
    def names(self) -> list[str]:
        """The names of the extras' tensors."""
        return [*extras_in(self.tree), *map(gradient_of, self.inputs)]

    @property
    def loss_name(self) -> str:
        """The name of the loss among the results of a program that computes no gradients."""
        return loss_name(self.tree)

    def objective(self, function: Objective) -> Objective:
        """``function``, but it returns the loss and the extras' tensors as one list.

        TraceError if its result does not begin with one floating-point number.
        """
        noted = self

        def checked(model: nn.Module, *tensors: Tensor) -> list[Tensor]:
            outcome = function(model, *tensors)
            if noted.own and (loss := getattr(outcome, "loss", None)) is not None:
                outcome = loss
            return noted.split(outcome, type(model).__name__)

        return checked

    def forward(self, function: Objective) -> Objective:
        """``function``, but it returns the tensors of what the model returns, by name."""
        noted = self

        def checked(model: nn.Module, *tensors: Tensor) -> Any:
            tree, results = described(function(model, *tensors))
            noted._note(tree, type(model).__name__)
            return results

        return checked

    def split(self, outcome: Any, model: str) -> list[Tensor]:
        """The loss, and behind it the extras' tensors, detached."""
        if _is_loss(outcome):
            self._note(None, model)
            return [outcome]
        if not isinstance(outcome, tuple | list) or not outcome or not _is_loss(outcome[0]):
            raise self._no_loss(outcome, model)
        if isinstance(outcome, list) and any(_is_loss(x) and x.requires_grad for x in outcome[1:]):
            raise _several_losses(model, len(outcome))
        self._note(_tree(outcome, model), model)
        self.inputs = outcome.inputs if isinstance(outcome, GivenOut) else ()
        return [outcome[0], *(x.detach() for x in tensors_of(list(outcome[1:])))]

    def _note(self, tree: Tree | None, model: str) -> None:
        if self.is_known and tree != self.tree:
            raise TraceError(
                where=model,
                what="it returns another structure in one step than in another",
                why="what is no tensor in them is part of the program",
                do="Return tensors alone, and leave out what changes from step to step.",
            )
        self.tree, self.is_known = tree, True

    def _no_loss(self, outcome: Any, model: str) -> TraceError:
        what = _told(outcome)
        do = "Return the tensor that the loss is."
        if isinstance(outcome, Tensor) and not outcome.shape and outcome.is_complex():
            do = "Return a real number of it: loss.abs(), or loss.real."
        elif isinstance(outcome, Tensor) and not outcome.shape:
            do = "Return a loss of floating-point numbers: classes that argmax picks, and "
            do += "comparisons, have no gradient."
        elif isinstance(outcome, Tensor) and not self.own and outcome.is_floating_point():
            what += f", {outcome.numel()} numbers"
            do = 'Return their mean, loss.mean(), or give the criterion reduction="mean".'
        elif isinstance(outcome, Tensor):
            do = "Give loss=fn(model, *inputs) with a 0-d result; the tensor itself may be an "
            do += "extra, (loss, extras). For a forward program compile under torch.no_grad() and "
            do += "without loss=."
        elif isinstance(outcome, Generator | Coroutine):
            outcome.close()  # which would tell that nobody has waited for it
            do = "Write an ordinary function: return in place of yield, and def without async."
        elif isinstance(outcome, tuple | list) and outcome:
            what += f", and its first entry {_told(outcome[0])}"
            do = "Return the loss first, and what else the step is to give back behind it: "
            do += "(loss, extras)."
        elif isinstance(outcome, Mapping) or hasattr(outcome, "loss"):
            do = "Return its loss, or (loss, extras) if the step is to give back more of it."
            if self.own and isinstance(outcome, Mapping):
                what += f" with {', '.join(map(str, outcome))}"
                do = "Let the model return it under the name loss, or give partc.compile "
                do += "loss=lambda model, x, y: criterion(model(x)['logits'], y)."
        return TraceError(
            where=model,
            what=f"the loss is {what}",
            why="a training step starts from one floating-point number",
            do=do,
        )


def gradient_of(name: str) -> str:
    """The name of an input's gradient among what a step gives."""
    return f"d_{name}"


def described(outcome: Any) -> tuple[Tree | None, Any]:
    """What a model returns: its structure, and its tensors by name.

    No structure for one tensor, and where it holds objects of other kinds (a cache of keys), which
    no program gives back; its tensors are then found by ``named_results``.
    """
    if isinstance(outcome, Tensor):
        return None, outcome
    try:
        tree = tree_of(outcome, "", Names(), "what the model returns")
    except TreeError:
        return None, outcome
    return tree, dict(zip(tree.names(), tensors_of(outcome), strict=True))


def loss_name(tree: Tree | None) -> str:
    """``loss``, where no extra has that name."""
    return "(loss)" if "loss" in extras_in(tree) else "loss"


def extras_in(tree: Tree | None) -> list[str]:
    """The names of the extras' tensors in what a loss returns; None: a loss alone."""
    return [] if tree is None else [*tree.names()][1:]


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim() and value.is_floating_point()


def _tree(outcome: Any, model: str) -> Tree:
    """The description of ``(loss, extras)``, or of a loss with several extras behind it."""
    fields = getattr(outcome, "_fields", None)
    names, found = Names(), [(fields[0] if fields else 0, Tree("tensor", name=LOSS))]
    for i, each in enumerate(outcome[1:], start=1):
        key = fields[i] if fields else i
        path = "" if len(outcome) == 2 and not fields else str(key)
        try:
            alone = isinstance(each, Tensor) and isinstance(outcome, GivenOut)
            begin = path or ("result" if alone else "")
            found.append((key, tree_of(each, begin, names, path or "extras")))
        except TreeError as error:
            raise _no_extra(error, model) from None
    kind = type(outcome)
    if fields:
        of = f"{kind.__module__}:{kind.__qualname__}"
        return Tree("fields", entries=tuple(found), of=of, made=kind)
    return Tree("list" if kind is list else "tuple", entries=tuple(found))


def _several_losses(model: str, num: int) -> TraceError:
    return TraceError(
        where=f"{model}, what the loss returns",
        what=f"it is a list of {num} entries, of which more than the first could be trained",
        why="a step has one loss, and would train on the first alone",
        do="Return their sum, sum(losses); or (loss, extras), where the extras are to look at.",
    )


def _no_extra(error: TreeError, model: str) -> TraceError:
    return TraceError(
        where=f"{model}, what the loss returns, {error.where}",
        what=error.what,
        why="a step gives back tensors, and None, numbers and strings, in tuples, lists, dicts, "
        "named tuples and dataclasses",
        do="Return (loss, extras) with what you need of it as a dict of tensors.",
    )


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}"
    return told(value)
