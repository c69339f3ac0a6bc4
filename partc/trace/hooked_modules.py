"""Modules whose results, or the gradients of these, go through a function of the user's hooks.

In: the plan's ``hooks``, ``layers.*.mlp`` or ``layers.*.mlp.grad``. While the model is traced, each
module that fits has a forward hook, so that the recorded step calls ``partc.hooked`` there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.fx.traceback import annotate

from partc.errors import PlanError
from partc.graph.hooked import GRAD, HOOKED, function_of
from partc.wrong_calls import did_you_mean


class _Hooked(Function):
    """A tensor, and its gradient, each through a function of the user's, where there is a name."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, path: str, name: str, grad: str) -> Tensor:
        ctx.path, ctx.grad = path, grad  # type: ignore[attr-defined]
        return HOOKED(x, name) if name else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (d,) = grads
        if ctx.grad:
            with annotate({"module": ctx.path}):
                d = HOOKED(d, ctx.grad)
        return d, None, None, None


@contextmanager
def hooked_modules(model: nn.Module, hooks: Collection[str]) -> Iterator[None]:
    """Let results of modules, and gradients, go through ``partc.hooked``.

    PlanError for an entry that fits no module, or one module of a list alone.
    """
    paths = {path: module for path, module in model.named_modules() if path}
    removed = []
    entries = {entry: entry.removesuffix(GRAD) for entry in hooks}
    for entry, pattern in entries.items():
        _check(entry, pattern, paths)
    for path, module in paths.items():
        mine = [entry for entry, pattern in entries.items() if _names(pattern, path)]
        if mine:
            removed.append(module.register_forward_hook(_hook(path, mine)).remove)
    try:
        yield
    finally:
        for remove in removed:
            remove()


def _hook(path: str, entries: Collection[str]) -> Callable[[nn.Module, Any, Any], Tensor]:
    name = next((function_of(e) for e in entries if not e.endswith(GRAD)), "")
    grad = next((function_of(e) for e in entries if e.endswith(GRAD)), "")

    def hook(module: nn.Module, args: Any, result: Any) -> Tensor:
        if not isinstance(result, Tensor):
            raise PlanError(
                where=f"plan, hooks, {path}", what="it returns more than a tensor",
                why=f"{type(module).__name__} gives a {type(result).__name__}",
                do="Name a module inside of it that returns one tensor.",
            )  # fmt: skip
        hooked: Tensor = _Hooked.apply(result, path, name, grad)  # type: ignore[no-untyped-call]
        return hooked

    return hook


def _names(pattern: str, path: str) -> bool:
    """Whether a pattern names a module: ``*`` stands for one number."""
    wanted, parts = pattern.split("."), path.split(".")
    pairs = zip(wanted, parts, strict=False)
    return len(wanted) == len(parts) and all(w == p or (w == "*" and p.isdigit()) for w, p in pairs)


def _of_all(path: str) -> str:
    """The pattern of all blocks of a list: ``blocks.*.mlp`` of ``blocks.0.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _check(entry: str, pattern: str, paths: Collection[str]) -> None:
    if pattern in paths and any(part.isdigit() for part in pattern.split(".")):
        raise PlanError(
            where=f"plan, hooks, {entry}", what="it names one module of a list",
            why="equal blocks share one text, and a hook is called in it",
            do="Write * for the number; a function that acts on some calls alone may count them.",
        )  # fmt: skip
    if not any(_names(pattern, path) for path in paths):
        raise PlanError(
            where=f"plan, hooks, {entry}", what="the model has no such module",
            why=f"it has {', '.join([*paths][:6])}{', ...' if len(paths) > 6 else ''}",
            do=did_you_mean(pattern, map(_of_all, paths))
            or "Name a module, with * for the number in a list.",
        )  # fmt: skip
