"""What a stage gives that has no backward, a step's loss or a forward's results, and says why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from partc.errors import RunError
from partc.program.optimizer.divided import divided_by

# What scripts do to a loss before they call backward: the result is a loss of a step, too.
_SCALED = {
    Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, Tensor.add,
    Tensor.__add__, Tensor.__radd__, Tensor.mean, Tensor.sum, torch.mul, torch.div, torch.add,
    torch.mean, torch.sum,
}  # fmt: skip

_DIVIDED = {Tensor.div, Tensor.__truediv__, torch.div}


class _Told(Tensor):
    """A tensor that looks, prints and pickles as a plain one."""

    def __repr__(self, **named: Any) -> str:  # type: ignore[override]
        return repr(plain(self))

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain(self), memo)


class StepLoss(_Told):
    """The loss of a step, ``f32[]``; ops give plain tensors, but for its sums and multiples."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func in _DIVIDED:
                divided_by(args[1] if len(args) > 1 else None)
            if func in _SCALED and type(result) is Tensor and not result.requires_grad:
                return result.as_subclass(cls)
            return plain(result) if isinstance(result, cls) else result

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RunError: the gradients are there."""
        raise RunError(
            where="loss.backward()",
            what="the gradients are there already",
            why="stage.step computes them together with the loss, and adds them to .grad",
            do="Leave backward out, and multiply gradients by stage.step(..., scale=1 / 4); or "
            "call loss = stage(...) in the place of stage.step(...).",
        )


class HalfLoss(StepLoss):
    """The loss of a step that computes in float16, for which scripts have a GradScaler."""

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RunError: the gradients are there, and no scale can help them."""
        raise RunError(
            where="loss.backward()",
            what="the gradients are there already, in float16",
            why="stage.step computes them together with the loss, so that no scale comes before: "
            "what is too small for float16 is 0 by now",
            do="Leave backward out; in place of a GradScaler compute in bfloat16, which needs no "
            "scale: torch.autocast(device, torch.bfloat16).",
        )


class _Detached(_Told):
    """What has no gradients, and what was computed from it alone."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _JOINED and torch.is_grad_enabled():
                args = _refusing_backward(args)
            result = func(*args, **(kwargs or {}))
            trains = isinstance(result, Tensor) and result.requires_grad
            if type(result) is Tensor and result.is_floating_point() and not trains:
                return result.as_subclass(cls)
            return plain(result) if isinstance(result, cls) and trains else result


class Evaluated(_Detached):
    """What a forward gives without gradients, and what was computed from it alone."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """RunError where nothing is there to train."""
        if self.requires_grad:
            plain(self).backward(*args, **kwargs)
            return
        raise self.refusal()

    @staticmethod
    def refusal() -> RunError:
        """What a backward is told."""
        return _of_eval_mode()


class EvaluatedInput(Evaluated):
    """The same, where an input waits for its gradient, as an adversarial example does."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.autograd.grad:
            raise cls.refusal()
        return super().__torch_function__(func, types, args, kwargs)

    @staticmethod
    def refusal() -> RunError:
        """What a backward is told."""
        return RunError(
            where="backward()",
            what="it was computed from what stage(...) gives in eval mode, without gradients, and "
            "an input waits for one (requires_grad)",
            why="a program computes gradients together with what was compiled",
            do="Compile the model itself in eval mode, model.eval() and loss=partc.ScriptLoss("
            'model, ["x"]), with the names of such inputs: its stage gives x.grad as it is, '
            "without stage.eval(). It takes the weights by load_full(stage.full_state_dict()).",
        )


def _of_eval_mode() -> RunError:
    return RunError(
        where="backward()",
        what="it was computed from what stage(...) gives in eval mode, without gradients",
        why="a program computes the gradients together with the loss that was compiled",
        do="Train by stage.train() and stage.step(...), or loss = stage(...) and "
        "loss.backward(), with the arguments of that loss. To train without dropout and with the "
        "statistics of batch norms as they are, put parts into eval mode behind it, before the "
        "first step and behind each train(): for part in model.children(): part.eval().",
    )


# What joins an extra and a loss to one that would train on both.
_JOINED = {
    Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_, torch.add,
    Tensor.sub, Tensor.__sub__, Tensor.__rsub__, torch.sub, torch.stack,
}  # fmt: skip


class Extra(_Detached):
    """What a training step gives beside its loss, and what was computed from it: detached."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.autograd.grad:
            raise _untrained_extra()
        if func is Tensor.detach:  # said so by the script
            return plain(args[0]).detach()
        return super().__torch_function__(func, types, args, kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RunError: a step has one loss."""
        raise _untrained_extra()


class _Refuses(torch.autograd.Function):
    """Gives a tensor as it is, and refuses to be part of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Callable[[], RunError]) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise ctx.error()


def _refusing_backward(args: Any) -> Any:
    """The operands of a sum; of those without gradients, where another one trains, so that the sum
    has no backward.
    """
    flat = [each for x in args for each in (x if isinstance(x, list | tuple) else [x])]
    if not any(isinstance(x, Tensor) and x.requires_grad for x in flat):
        return args
    return tuple(
        type(x)(map(_refusing, x)) if type(x) in (list, tuple) else _refusing(x) for x in args
    )


def _refusing(x: Any) -> Any:
    if not isinstance(x, Extra | Evaluated) or x.dim():  # what is no number is no loss
        return x
    apply: Any = _Refuses.apply
    error = _untrained_extra if isinstance(x, Extra) else x.refusal
    return apply(plain(x).detach().requires_grad_(), error)


def _untrained_extra() -> RunError:
    return RunError(
        where="backward()",
        what="it is of something that the step gives beside its loss, without gradients",
        why="a program computes gradients together with the loss that was compiled, the first that "
        "loss_of returns; all else is to look at",
        do="Add it to the loss inside of the loss that is compiled, return loss + aux, {'aux': "
        "aux}; or train on it as a loss of its own, program.also(...) and stage.share(...). To "
        "log their sum add extra.detach() behind loss.detach().",
    )


def plain(loss: Tensor) -> Tensor:
    """The same tensor, without what its class adds."""
    with torch._C.DisableTorchFunctionSubclass():
        return loss.as_subclass(Tensor)


def of_step(loss: Any, *, is_half: bool = False) -> Any:
    """What a step gives for a loss that its gradients were computed with; ``is_half``: in
    float16.
    """
    kind = HalfLoss if is_half else StepLoss
    return loss.as_subclass(kind) if type(loss) is Tensor else loss


def evaluated(
    results: Any, args: Sequence[Any] = (), named: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """A forward's results, one or several by name, that say why they have no backward.

    ``args`` and ``named``: its arguments. Under ``torch.no_grad()``, as evaluations run, results
    stay plain.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return results
    if isinstance(results, dict):
        return {name: evaluated(each, args, named) for name, each in results.items()}
    waits = any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *named.values()))
    kind = EvaluatedInput if waits else Evaluated
    return results.as_subclass(kind) if type(results) is Tensor else results


class Dropped(Evaluated):
    """The loss of a call under ``torch.no_grad()``, which drops the gradients."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """RunError: they are gone."""
        raise RunError(
            where="loss.backward()",
            what="the stage was called under torch.no_grad() or torch.inference_mode()",
            why="such a call drops the gradients that the step has computed",
            do="Call loss = stage(...) outside of it; stage.eval_step(...) gives a loss without "
            "gradients.",
        )


def dropped(loss: Tensor) -> Tensor:
    """The loss of a call whose gradients are not kept; the loss itself where none trains."""
    return loss.as_subclass(Dropped) if type(loss) is Tensor else loss


def extra(x: Tensor) -> Tensor:
    """What a training step gives beside its loss, which says why it has no backward."""
    x = x.detach()
    return x.as_subclass(Extra) if type(x) is Tensor and x.is_floating_point() else x
