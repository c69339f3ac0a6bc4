"""What a step is given: the arguments of the loss (or of the model), and the tensors in them.

In: the model, example inputs as the user has them, the loss. Out: a ``Given``, whose tensors have
names, and whose function computes with other tensors in their place; and an ``Arguments``, which
says the same of the arguments without any values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import BoundArguments, Signature
from typing import Any

from torch import Tensor, nn

from partc.errors import TraceError
from partc.trace.capture import names_of
from partc.trace.inputs_refused import check_batch, check_loss, check_takes, unbound
from partc.trace.odd_tensors import dense_of, odd_kind
from partc.trace.trees import Names, Tree, TreeError, filled, tensors_of, tree_of

KINDS = {
    str(kind.name): kind
    for kind in (
        inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
}  # fmt: skip
MANY, NAMED = "VAR_POSITIONAL", "VAR_KEYWORD"
PLAIN = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")
_EMPTY = {MANY: Tree("tuple"), NAMED: Tree("dict")}


@dataclass(frozen=True)
class Argument:
    """A parameter of the loss: its kind in a signature, what it was when compiled, its default."""

    name: str
    kind: str
    tree: Tree
    default: Tree | None = None  # None: it has to be given


@dataclass(frozen=True)
class Arguments:
    """The parameters of the loss behind the model, or those of the model's forward."""

    each: tuple[Argument, ...] = ()

    @classmethod
    def of_names(cls, names: Sequence[str]) -> Arguments:
        """Arguments that are one tensor each."""
        found = (Argument(n, "POSITIONAL_OR_KEYWORD", Tree("tensor", name=n)) for n in names)
        return cls(tuple(found))

    @cached_property
    def signature(self) -> Signature:
        """Binds the arguments of a step as the loss does."""
        return Signature([_parameter(each) for each in self.each])

    @property
    def is_plain(self) -> bool:
        """Whether every argument is one tensor, given by place or by name."""
        return all(
            each.tree.kind == "tensor" and each.kind == "POSITIONAL_OR_KEYWORD"
            for each in self.each
        )

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order in which programs take them."""
        return [name for each in self.each for name in each.tree.names()]

    @property
    def form(self) -> Arguments:
        """The same without what numbers are (``Tree.form``)."""
        return Arguments(tuple(replace(each, tree=each.tree.form) for each in self.each))

    def may_be(self, other: Arguments) -> bool:
        """Whether a loss may be called with either (``Tree.may_be``)."""
        pairs = zip(self.each, other.each, strict=False)
        return len(self.each) == len(other.each) and all(a.tree.may_be(b.tree) for a, b in pairs)

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a step's arguments are as these describe them."""
        try:
            self.tensors(args, kwargs)
        except (TypeError, TreeError):
            return False
        return True

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors in a step's arguments, in that order.

        TreeError for an argument that is not as it was compiled; TypeError, as of any function,
        for one that is missing, unknown or given twice.
        """
        given = self.signature.bind(*args, **kwargs).arguments
        found: list[Tensor] = []
        for each in self.each:
            if each.name in given:
                found += each.tree.tensors(given[each.name], each.name)
            elif each.tree != each.default:
                raise TreeError(each.name, "it was given when compiled, and is left out now")
        return found

    def call(
        self, tensors: Mapping[str, Tensor], *, alike: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by place and by name, as a step takes them, with these tensors by name.

        ``alike``: without the classes of named tuples and dataclasses (``Tree.built``).
        """
        bound = BoundArguments(self.signature, {})
        for each in self.each:
            if each.tree != each.default:
                bound.arguments[each.name] = each.tree.built(tensors, alike=alike)
        return bound.args, bound.kwargs

    def as_json(self) -> Any:
        """Plain data, which ``of_json`` reads."""
        return [
            [a.name, a.kind, a.tree.as_json(), None if a.default is None else a.default.as_json()]
            for a in self.each
        ]

    @classmethod
    def of_json(cls, data: Any) -> Arguments:
        """Read ``as_json``; ValueError and alike for anything else."""
        found = cls(tuple(_argument(*each) for each in data))
        _ = found.signature  # ValueError where no function has such parameters
        return found


def _argument(name: Any, kind: Any, tree: Any, default: Any) -> Argument:
    return Argument(
        name, KINDS[kind].name, Tree.of_json(tree),
        None if default is None else Tree.of_json(default),
    )  # fmt: skip


def _parameter(each: Argument) -> inspect.Parameter:
    optional = each.default is not None and each.kind not in _EMPTY
    default = None if optional else inspect.Parameter.empty
    return inspect.Parameter(each.name, KINDS[each.kind], default=default)


@dataclass(frozen=True)
class Given:
    """A step's arguments with example values, bound as the loss (or the forward) binds them.

    ``call`` is what they are arguments of, beside the model: the loss, or a function that calls
    the model.
    """

    call: Callable[..., Any]
    bound: BoundArguments
    arguments: Arguments

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, loss: Callable[..., Any] | None) -> Given:
        """Bind the inputs of ``compile``: a tuple by place, a dict by name, all else as one.

        TraceError for what is no loss, arguments that it does not take, and values that are
        neither tensors nor plain.
        """
        if isinstance(inputs, Given):
            return inputs
        check_loss(loss)
        return cls.of_call(model, *spread(inputs), loss)

    @classmethod
    def of_call(
        cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any],
        loss: Callable[..., Any] | None = None,
    ) -> Given:  # fmt: skip
        """The same of arguments by place and by name."""
        signature = _signature(model, loss)
        check_batch(signature, args, kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise unbound(model, loss, signature, args, kwargs, error) from None
        check_takes(model, loss, args, kwargs)
        own = names_of(model)
        names = Names([*own.params, *own.buffers, *own.aliases])
        try:
            arguments = _arguments(bound, names)
        except TreeError as error:
            raise _no_input(error) from None
        given = cls(_call if loss is None else loss, bound, arguments)
        _check_tensors(given.names, given.tensors, bound.arguments.values())
        return given

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return self.arguments.names

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The example tensors, in the order of ``names``."""
        return tuple(tensors_of(list(self.bound.arguments.values())))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Given:
        """The same arguments with other tensors."""
        return Given(self.call, self.filled(tensors), self.arguments)

    def filled(self, tensors: Sequence[Tensor]) -> BoundArguments:
        """The arguments, new down to their leaves, with these tensors."""
        left = iter(tensors)
        known = {name: filled(each, left) for name, each in self.bound.arguments.items()}
        return BoundArguments(self.bound.signature, known)

    @property
    def function(self) -> Callable[..., Any]:
        """``function(model, *tensors)`` computes what the loss does, with these tensors."""
        given, call = self, self.call  # the loss itself, so that what it reads is seen

        def function(model: nn.Module, *tensors: Tensor) -> Any:
            bound = given.filled(tensors)
            return call(model, *bound.args, **bound.kwargs)

        return function


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def spread(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of ``compile`` as arguments by place and by name."""
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        return (), dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    return (inputs,), {}


def _signature(model: nn.Module, loss: Callable[..., Any] | None) -> Signature:
    """The parameters of the forward, or of the loss behind the model."""
    try:
        given = list(inspect.signature(model.forward if loss is None else loss).parameters.values())
    except (ValueError, TypeError):  # of a function in C
        given = []
    if loss is not None and given and given[0].kind.name in PLAIN:
        given = given[1:]
    if not given:
        every = (("inputs", MANY), ("named", NAMED))
        given = [inspect.Parameter(name, KINDS[kind]) for name, kind in every]
    return Signature([each.replace(annotation=inspect.Parameter.empty) for each in given])


def _arguments(bound: BoundArguments, names: Names) -> Arguments:
    """The description of bound arguments; their tensors get names."""
    found = []
    for place, (name, parameter) in enumerate(bound.signature.parameters.items()):
        kind = parameter.kind.name
        default = _EMPTY.get(kind) or _default(parameter)
        tree = default
        if name in bound.arguments:
            tree = _tree(name, kind, bound.arguments[name], place, names)
        assert tree is not None, "an argument without a default is bound"
        found.append(Argument(name, kind, tree, default))
    return Arguments(tuple(found))


def _tree(name: str, kind: str, value: Any, place: int, names: Names) -> Tree:
    """The tree of one argument; of ``*args`` and ``**kwargs`` each has a name of its own."""
    if kind not in _EMPTY:
        return tree_of(value, name, names, name)
    entries = {f"input_{place + i}": (i, x) for i, x in enumerate(value)} if kind == MANY else {
        key: (key, x) for key, x in value.items()
    }  # fmt: skip
    trees = ((key, tree_of(x, path, names, path)) for path, (key, x) in entries.items())
    return Tree(_EMPTY[kind].kind, entries=tuple(trees))


def _default(parameter: inspect.Parameter) -> Tree | None:
    """The default of a parameter; what no description has is only known by its text."""
    if parameter.default is inspect.Parameter.empty:
        return None
    try:
        tree = tree_of(parameter.default, "", Names(), "")
    except TreeError:
        tree = None
    known = tree is not None and not [*tree.names()] and tree.kind != "fields"
    return tree if known else Tree("left out", of=f"a {type(parameter.default).__name__}")


def _check_tensors(names: Sequence[str], tensors: Sequence[Tensor], given: Iterable[Any]) -> None:
    """TraceError for sparse and quantised tensors, for a batch without rows, and for shapes in the
    place of tensors.
    """
    for name, each in zip(names, tensors, strict=True):
        if kind := odd_kind(each):
            raise TraceError(
                where=f"input {name}", what=f"it is a {kind} tensor",
                why="programs compute with dense tensors", do=dense_of(kind),
            )  # fmt: skip
    if not tensors and any(isinstance(each, list | tuple) for each in given):
        raise TraceError(
            where="inputs of compile", what="there is no tensor in them",
            why="they are example arguments, not shapes or lists of numbers",
            do="Pass tensors: torch.empty(8, 256), or torch.as_tensor(numbers).",
        )  # fmt: skip
    if tensors and all(each.numel() == 0 for each in tensors):
        shape = list(tensors[0].shape)
        raise TraceError(
            where=f"input {names[0]}", what=f"its shape is {shape}: the batch has no rows",
            why="a mean over no rows is not a number",
            do="Pass a batch of the size that a step takes; a DataLoader's last one may be empty.",
        )  # fmt: skip


def _no_input(error: TreeError) -> TraceError:
    return TraceError(
        where=f"input {error.where}",
        what=error.what,
        why="inputs are tensors, and None, numbers and strings, which become part of the program, "
        "in tuples, lists, dicts, named tuples and dataclasses",
        do=f"Pass torch.from_numpy({error.where})." if "ndarray" in error.what
        else "Pass tensors (torch.as_tensor), or bind it inside of the loss function.",
    )  # fmt: skip
