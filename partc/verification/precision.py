"""Run code that was written for float32 (or narrower floats) in float64.

Models cast to float32 inside norms, losses and rotary tables, whatever their own dtype is, and a
program has the dtypes it was compiled for. Under the mode ``Raised`` both compute in float64, and
complex64 becomes complex128, so that they can be compared at 1e-12 instead of 1e-6. The mode acts
on the current thread.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partc.codegen.helpers.attention import plain_attention, plain_attention_backward

GROUPED = "torch.ops.aten._grouped_mm("
GPU_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{backward}").default
    for kernel, backward in product(("flash", "cudnn", "efficient"), ("", "_backward"))
}
APART = GPU_ATTENTION | {torch.ops.aten._grouped_mm.default, torch.ops.aten.full.default}
NARROW = {torch.float32, torch.float16, torch.bfloat16}
WIDE = dict.fromkeys(NARROW, torch.float64) | {torch.complex64: torch.complex128}


class Raised(TorchDispatchMode):
    """While this is open, every ``aten`` op that would run in a narrower float runs in float64.

    Casts inside a model to f32, bf16 or f16 then cast to f64, so that a program and its model can
    be compared at 1e-12 in place of 1e-6. It holds in the current thread.

    Example::

        with partc.Raised():
            loss = loss_of(model.double(), *batch)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _is_raised(func):
            return func(*args, **(kwargs or {}))
        raised = {name: _raise(value) for name, value in kwargs.items()} if kwargs else {}
        if func not in APART:
            return _raise(func(*map(_raise, args), **raised))
        if func is torch.ops.aten._grouped_mm.default:
            return grouped_products(*map(_raise, args), **raised)
        if func in GPU_ATTENTION:
            return _plain_attention(func, *map(_raise, args), **raised)
        if func is torch.ops.aten.full.default and isinstance(args[1], float):
            raised.setdefault("dtype", torch.float64)  # else float32 would round the number
        return _raise(func(*map(_raise, args), **raised))


class EpsAsBuilt(TorchFunctionMode):
    """A mode under which ``rms_norm`` without an ``eps`` uses float32's, not float64's.

    A model with narrower parameters uses float32's eps when it is not raised.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in (torch.rms_norm, nn.functional.rms_norm):
            return func(*args, **(kwargs or {}))
        given = inspect.signature(nn.functional.rms_norm).bind(*args, **(kwargs or {})).arguments
        if given.get("eps") is None:
            given["eps"] = torch.finfo(torch.float32).eps
        return func(**given)


@cache
def _is_raised(func: Any) -> bool:
    """Whether an op is one of ``aten`` that changes none of its arguments."""
    return func.namespace == "aten" and not func._schema.is_mutable


def _raise(value: Any) -> Any:
    """An op's argument or result (tensor, dtype or sequence) with float64 for narrower floats."""
    if isinstance(value, Tensor):
        wide = WIDE.get(value.dtype)
        return value if wide is None else value.to(wide)
    if isinstance(value, torch.dtype):
        return WIDE.get(value, value)
    if isinstance(value, list | tuple):
        return type(value)(map(_raise, value))
    return value


def grouped_products(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.grouped_mm`` in float64, which torch has no kernel for.

    ``offs`` has the ends of the groups: of rows of ``a`` (2-d times 3-d), of columns of ``b``
    (3-d times 2-d), or of both along the dim that is summed (2-d times 2-d).
    """
    assert bias is None
    if offs is None:
        return a @ b
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim():
        return torch.stack([a[:, group] @ b[group] for group in groups])
    rows = a.dim() == 2
    whole = a.new_zeros(a.shape[0] if rows else a.shape[1], b.shape[-1])
    for i, group in enumerate(groups):
        if rows:
            whole[group] = a[group] @ b[i]
        else:
            whole[:, group] = a[i] @ b[:, group]
    return whole


def _plain_attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A GPU's fused attention in float64, which it has no kernel for; what only the kernel's own
    backward reads is empty.
    """
    names = [each.name for each in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    q, k, v = (given[name] for name in ("query", "key", "value"))
    how: dict[str, Any] = {"scale": given.get("scale"), "mask": given.get("attn_bias")}
    how["is_causal"] = bool(given.get("is_causal"))
    found: tuple[Tensor, ...]
    if "out" in given:
        d_y = given["grad_out_" if "grad_out_" in given else "grad_out"]
        found = plain_attention_backward(d_y, q, k, v, given["out"], given["logsumexp"], **how)
    else:
        found = plain_attention(q, k, v, **how)
    rest = func._schema.returns[len(found) :]
    return *found, *(q.new_empty(0) if str(each.type) == "Tensor" else 0 for each in rest)


def raised_model(model: nn.Module) -> AbstractContextManager[None]:
    """The modes under which ``model``, in float64 by then, computes what it does as it is now.

    Only rounding differs then.
    """
    narrow = any(p.dtype in NARROW for p in model.parameters())
    return _raised(EpsAsBuilt() if narrow else nullcontext())


@contextmanager
def _raised(eps: AbstractContextManager[Any]) -> Iterator[None]:
    with Raised(), eps:
        yield


def raised_text(source: str) -> str:
    """A program's text with float64 in place of every narrower float.

    For programs with ``torch.compile``, whose functions would run eagerly under a mode like
    ``Raised``. A cast to float64 gets ``copy=True``: it would otherwise return its operand, and the
    program may overwrite the result.
    """
    if GROUPED in source:
        own = inspect.getsource(grouped_products)
        source = f"{source.replace(GROUPED, 'grouped_products(')}\n\n{own}"
    names = "|".join(sorted(map(str, NARROW))).replace(".", r"\.")
    raised = re.sub(rf"\b({names})\b", "torch.float64", source)
    raised = raised.replace("torch.complex64", "torch.complex128")
    return re.sub(
        r"\.to\(torch\.float64(?:, copy=True)?([,)])", r".to(torch.float64, copy=True\1", raised
    )


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A detached copy: a floating-point tensor in ``dtype``, a complex one in the complex dtype of
    that width, others in their own dtype.
    """
    return tensor.detach().to(_instead(tensor, dtype), copy=True)


def convert(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``module.to(dtype)``, but complex tensors stay complex: torch drops their imaginary part."""
    module._apply(lambda tensor: tensor.to(_instead(tensor, dtype)))
    return module


def _instead(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor gets when it is converted to ``dtype``."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype
