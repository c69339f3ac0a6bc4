"""Constants of a step that are not dense: what the program has in their place.

What follows from such a constant alone is computed while tracing, ``a.to_dense()``. A product by a
constant sparse matrix is recorded as the gathers and sums that it consists of. All else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from partc.errors import TraceError
from partc.trace.contents import Contents
from partc.trace.odd_tensors import INSTEAD, WHY, dense_parts, odd_kind
from partc.trace.reachable import Place
from partc.trace.source_lines import source_here

_PRODUCTS = {
    torch.sparse.mm, torch.spmm, torch.mm, torch.mv, torch.matmul, Tensor.mm, Tensor.mv,
    Tensor.matmul, Tensor.__matmul__,
}  # fmt: skip


def odd_constants(places: Iterable[Place], contents: Contents) -> AbstractContextManager[Any]:
    """Lets a step compute with the constants among ``places`` that are not dense, if there are any.

    Only then, as every call of torch takes longer under it.
    """
    tensors = (place.value for place in places if isinstance(place.value, Tensor))
    return _OddConstants(contents) if any(map(odd_kind, tensors)) else nullcontext()


@dataclass(eq=False)
class _OddConstants(TorchFunctionMode):
    """Computes with constants that are not dense, as this module's docstring says.

    ``derived`` has by ``id`` what was computed of them, ``elements`` the rows, columns and values
    of sparse matrices: the same tensors each time that a matrix is read.
    """

    contents: Contents
    derived: dict[int, Tensor] = field(default_factory=dict)
    elements: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # so that no other tensor gets the same id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        odd = [x for x in given if not isinstance(x, FakeTensor) and odd_kind(x)]
        if not odd:
            return func(*args, **(kwargs or {}))
        if any(x.requires_grad for x in odd) or _writes(func):
            raise _refused(odd[0], func)
        self._note(odd)
        if len(odd) == len(given):
            return self._alone(func, args, kwargs or {}, odd)
        if func not in _PRODUCTS or kwargs or len(args) != 2 or len(given) != 2:
            raise _refused(odd[0], func)
        return self._product(func, *args)

    def _note(self, odd: Sequence[Tensor]) -> None:
        """Note which tensors from outside the step reads."""
        own = [x for x in odd if id(x) not in self.derived]
        self.contents.note_outside(own, source_here())
        for each in own:
            self.contents.content(each)

    def _alone(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], odd: Sequence[Tensor]
    ) -> Any:
        """What follows from constants alone; of a view, which no fake can be made of, a copy."""
        with _disable_current_modes():
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor) or any(result is x for x in odd):
                return result
            result = result if odd_kind(result) or not result._is_view() else result.clone()
        return self._derive(result)

    def _derive(self, tensor: Tensor) -> Tensor:
        """The tensor, which is not read from outside: what it follows from is."""
        self.derived[id(tensor)] = tensor
        self.contents.content(tensor)
        return tensor

    def _product(self, func: Any, one: Tensor, other: Tensor) -> Tensor:
        """``a @ x`` or ``x @ a`` of a sparse matrix ``a`` and a dense matrix or vector ``x``."""
        matrix, dense = (one, other) if odd_kind(one) else (other, one)
        is_plain = dense.dim() == 2 or (dense.dim() == 1 and matrix is one)
        elements = self._elements(matrix) if odd_kind(matrix) == "sparse" and is_plain else ()
        if len(elements) != 3 or matrix.dim() != 2:
            raise _refused(matrix, func)
        rows, cols, values = elements
        if matrix is one:
            return _gathered(matrix.shape[0], rows, cols, values, dense)
        return _gathered(matrix.shape[1], cols, rows, values, dense.t()).t()

    def _elements(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The row, column and value of each element; more or fewer tensors for what is no matrix
        of numbers.
        """
        if id(matrix) not in self.elements:
            self.alive.append(matrix)
            with _disable_current_modes():
                indices, values = dense_parts(matrix.detach().to_sparse_coo())
                found = [each.clone() for each in (*indices, values)]
            self.elements[id(matrix)] = tuple(map(self._derive, found))
        return self.elements[id(matrix)]


def _gathered(size: int, rows: Tensor, cols: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """The product of a sparse matrix with ``size`` rows and a dense ``x``."""
    weights = values if x.dim() == 1 else values[:, None]
    return x.new_zeros(size, *x.shape[1:]).index_add(0, rows, x[cols] * weights)


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes into its operand: ``mul_``, ``a[0] = 1``."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _refused(tensor: Tensor, func: Callable[..., Any]) -> TraceError:
    kind, name = odd_kind(tensor), getattr(func, "__name__", "a function").strip("_")
    article = "trained " if tensor.requires_grad else ""
    return TraceError(
        where=source_here(), what=f"{name} of a {article}{kind} tensor",
        why=f"{WHY}; of a sparse matrix that is a constant they take products with matrices and "
        "vectors", do=INSTEAD[kind],
    )  # fmt: skip
