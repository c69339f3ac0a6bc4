"""A parameter that another pipeline rank has, for scripts that go through all parameters.

Scripts compute with it until they ask for a number, or for what only the other rank could answer:
then one sentence names the parameter, whatever torch would have said of an empty tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from partc.errors import PartcError, RunError

# what gives numbers, or answers that depend on them
_READS = {
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "unbind", "__array__", "__bool__",
    "__complex__", "__contains__", "__dlpack__", "__float__", "__index__", "__int__", "__len__",
    "untyped_storage",  # which writers of files ask for
}  # fmt: skip
_MOVES = {"to", "cuda", "pin_memory"}  # fail of the device, whoever has the value
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
    "lshift", "rshift", "lt", "le", "gt", "ge",
)  # fmt: skip


class StandIn(nn.Parameter):
    """A parameter that another pipeline rank has, ``f32[0]``: it has no gradient and no state.

    What is computed from stand-ins alone is one too; its value, and that with a tensor of this
    rank, are refused. ``called``: its name; ``places``: the pipeline ranks that have it;
    ``groups``: the stage's process groups, by axis.
    """

    called = "a parameter"
    places: tuple[int, ...] = ()
    groups: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        name = getattr(func, "__name__", str(func))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        mine = next((x for x in tensors if isinstance(x, StandIn)), None)
        with DisableTorchFunctionSubclass():
            others = any(_has_values(x) for x in tensors)
            if mine is not None and (others or name in _READS):
                raise _mixed(name, mine) if others else _unknown(name, mine)
            try:
                result = func(*args, **(kwargs or {}))
            except (RuntimeError, IndexError, ValueError) as error:  # it is empty, of one dim
                if mine is None or name in _MOVES or isinstance(error, PartcError):
                    raise
                raise _unknown(name, mine) from error
            return tree_map(partial(_as_stand_in, mine), result)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StandIn({self.called}{on_ranks(self.places)})"

    def storage(self) -> NoReturn:
        raise _unknown("storage", self)  # torch warns before it asks __torch_function__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _unknown("a pickle", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        with DisableTorchFunctionSubclass():
            made = StandIn(self.detach().clone(), self.requires_grad)
        made.called, made.places, made.groups = self.called, self.places, self.groups
        memo[id(self)] = made
        return made

    def __format__(self, spec: str) -> str:
        if spec:  # "{:.3f}" asks for a number
            raise _unknown("format", self)
        return repr(self)


def _has_values(x: Tensor) -> bool:
    """Whether it is no stand-in, and no plain number."""
    return not isinstance(x, StandIn) and (isinstance(x, DTensor) or x.dim() > 0)


def _as_stand_in(of: StandIn | None, result: Any) -> Any:
    """What was computed from stand-ins, as one of the same name."""
    if of is None or not isinstance(result, Tensor) or isinstance(result, StandIn):
        return result
    made = result.as_subclass(StandIn)
    made.called, made.places = of.called, of.places
    return made


def _refuse_none() -> None:
    """Let the methods and operators of stand-ins refuse None, which ``.grad`` is here.

    torch refuses it as a wrong argument, before it asks ``__torch_function__``.
    """
    operators = [f"__{kind}{each}__" for each in _OPERATORS for kind in ("", "r", "i")]
    for name in [*(n for n in dir(Tensor) if n[0] != "_"), *operators]:
        plain = getattr(Tensor, name, None)
        own = name in vars(nn.Parameter) or name in vars(StandIn)
        if callable(plain) and not own and not isinstance(plain, type):
            setattr(StandIn, name, _refusing(name, plain))


def _refusing(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def asked(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        nothing = any(x is None for x in (*args, *kwargs.values()))
        try:
            result = plain(self, *args, **kwargs)
        except (TypeError, AttributeError):
            if nothing:
                raise _of_none(name, self) from None
            raise
        if result is NotImplemented and nothing:
            raise _of_none(name, self)
        return result

    return asked


_refuse_none()


def on_ranks(places: tuple[int, ...]) -> str:
    """Where a tensor is, behind its name: ", on pipeline ranks 1, 2"."""
    ranks = ", ".join(map(str, places))
    return f", on pipeline rank{'s' if len(places) > 1 else ''} {ranks}" if places else ""


def _mixed(call: str, param: StandIn) -> RunError:
    return RunError(
        where=f"{call} of {param.called} and another tensor",
        what="they are not on the same pipeline rank",
        why="the parts that are computed with each other lie on several stages",
        do="Compute it of whole tensors: whole = stage.full_state_dict() on all ranks, then "
        "stage.load_full(whole); or let both parts lie in one stage (stages=).",
    )


def _unknown(call: str, param: StandIn) -> RunError:
    return RunError(
        where=f"{call} of {param.called}",
        what="this pipeline rank does not have its value",
        why=f"it belongs to another stage of the pipeline{on_ranks(param.places)}",
        do="Call stage.full_state_dict() on all ranks, which has every tensor whole.",
    )


def _of_none(call: str, param: StandIn) -> RunError:
    return RunError(
        where=f"{call.removeprefix('__').removesuffix('__')} of {param.called} and None",
        what="this pipeline rank has neither its value nor its gradient",
        why=f"it belongs to another stage of the pipeline{on_ranks(param.places)}, and its .grad "
        "is None here",
        do="Pass over parameters without a gradient (if p.grad is None: continue), or go by "
        "stage.named_parameters(), which has those of this rank.",
    )
