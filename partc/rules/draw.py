"""Random operands for a call: values that the op accepts and that reveal a wrong sharding rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partc.rules.signature import Operand, Signature, Spec

FREE_HIGH = 5  # integer operands that index nothing are drawn below this


def draw(signature: Signature, domain: str, generator: torch.Generator) -> list[Tensor]:
    """One random tensor per operand: floats from the domain, integers from the op's index range."""
    special = SPECIAL.get(signature.packet, {})
    highs = BOUNDS.get(signature.packet, _no_bounds)(signature)
    drawn = []
    for i, spec in enumerate(signature.operands):
        if i in special:
            drawn.append(special[i](signature, spec, generator))
        else:
            drawn.append(_draw_one(spec, spec.high or highs.get(i, FREE_HIGH), domain, generator))
    return drawn


def _draw_one(spec: Spec, high: int, domain: str, generator: torch.Generator) -> Tensor:
    if spec.dtype == torch.bool:
        return _mask(spec, generator)
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return torch.randint(0, high, spec.shape, generator=generator).to(spec.dtype)
    return DOMAINS[domain](spec, generator)


def _mask(spec: Spec, generator: torch.Generator) -> Tensor:
    """A random mask with sparse and dense lines, so that ``any`` and ``all`` give both answers.

    The lines run along the last dim or the first one, by the seed.
    """
    lines = list(spec.shape)
    if lines:
        lines[0 if generator.initial_seed() % 2 else -1] = 1
    density = torch.tensor([0.04, 0.5, 0.96])[torch.randint(0, 3, lines, generator=generator)]
    return torch.rand(spec.shape, generator=generator) < density


def _normal(spec: Spec, generator: torch.Generator) -> Tensor:
    wide = torch.complex128 if spec.dtype.is_complex else torch.float64
    return torch.randn(spec.shape, generator=generator, dtype=wide).to(spec.dtype)


def _between(low: float, high: float) -> Callable[[Spec, torch.Generator], Tensor]:
    def sample(spec: Spec, generator: torch.Generator) -> Tensor:
        unit = torch.rand(spec.shape, generator=generator, dtype=torch.float64)
        return (low + (high - low) * unit).to(spec.dtype)

    return sample


# Tried in this order until the op's results are finite: log needs the second, atanh the third.
DOMAINS: dict[str, Callable[[Spec, torch.Generator], Tensor]] = {
    "normal": _normal,
    "positive": _between(0.3, 2.5),
    "unit": _between(0.05, 0.95),
    "above one": _between(1.05, 3.0),
}


def _no_bounds(signature: Signature) -> dict[int, int]:
    return {}


def _size(signature: Signature, operand: int, dim: int) -> int:
    shape = signature.operands[operand].shape
    return shape[dim] if shape else 1


def _literal(signature: Signature, position: int) -> int:
    literal = signature.args[position]
    assert isinstance(literal, int)
    return literal


def _index_bounds(signature: Signature) -> dict[int, int]:
    """The bounds of ``aten.index(x, [i, None, j])``: per index tensor, the size of its dim of x."""
    pairs = enumerate(signature.args[1])
    return {i.index: _size(signature, 0, dim) for dim, i in pairs if isinstance(i, Operand)}


def _pooled_bounds(signature: Signature) -> dict[int, int]:
    """The bounds of a pooling backward: indices point into one plane of the pooled input."""
    plane = signature.operands[1].shape[-2:]
    return {2: plane[0] * plane[1]}


def _along_dim(position: int = 1) -> Callable[[Signature], dict[int, int]]:
    return lambda s: {1: _size(s, 0, _literal(s, position))}


def _classes(operand: int) -> Callable[[Signature], dict[int, int]]:
    """The bound of nll's targets: the number of classes, dim 1 (or the only dim) of ``operand``."""
    return lambda s: {
        operand + 1: s.operands[operand].shape[0 if len(s.operands[operand].shape) == 1 else 1]
    }


# By op, the bound of each integer operand: the size of the dim that the operand indexes.
BOUNDS: dict[str, Callable[[Signature], dict[int, int]]] = {
    "aten.embedding": lambda s: {1: _size(s, 0, 0)},
    "aten.embedding_dense_backward": lambda s: {1: _literal(s, 2)},
    "aten.nll_loss_forward": _classes(0),
    "aten.nll_loss2d_forward": _classes(0),
    "aten.nll_loss_backward": _classes(1),
    "aten.nll_loss2d_backward": _classes(1),
    "partc.ops.masked_embedding": lambda s: {1: _size(s, 0, 0)},
    "partc.ops.masked_gather": _along_dim(),
    "aten.gather": _along_dim(),
    "aten.scatter": _along_dim(),
    "aten.scatter_add": _along_dim(),
    "aten.scatter_reduce": _along_dim(),
    "aten.index_select": _along_dim(),
    "aten.index_add": _along_dim(),
    "aten.index": _index_bounds,
    "aten._unsafe_index": _index_bounds,
    "aten.index_put": _index_bounds,
    "aten._unsafe_index_put": _index_bounds,
    "aten.max_pool2d_with_indices_backward": _pooled_bounds,
}


def _offsets(signature: Signature, spec: Spec, generator: torch.Generator) -> Tensor:
    """The row offsets of a grouped matmul: ascending; the last one is the number of rows."""
    rows = signature.operands[0].shape[0]
    ends = torch.randint(0, rows + 1, spec.shape, generator=generator).sort().values
    ends[-1] = rows
    return ends.to(spec.dtype)


def _order(signature: Signature, spec: Spec, generator: torch.Generator) -> Tensor:
    """A random permutation."""
    return torch.randperm(spec.shape[0], generator=generator).to(spec.dtype)


def _positive_definite(signature: Signature, spec: Spec, generator: torch.Generator) -> Tensor:
    """Random symmetric positive definite matrices, which have a Cholesky decomposition."""
    root = _normal(spec, generator).double()
    return (root @ root.mT + torch.eye(spec.shape[-1], dtype=torch.float64)).to(spec.dtype)


def _positive(signature: Signature, spec: Spec, generator: torch.Generator) -> Tensor:
    """Numbers above 0, below which an op may give nonsense without a word."""
    return DOMAINS["positive"](spec, generator)


def _pivots(signature: Signature, spec: Spec, generator: torch.Generator) -> Tensor:
    """The pivots of a factorisation that moved no row: 1, 2, 3, ... (LAPACK counts from 1)."""
    return torch.arange(1, spec.shape[-1] + 1).expand(spec.shape).to(spec.dtype)


def _all_of(operand: int, dim: int) -> Callable[[Signature, Spec, torch.Generator], Tensor]:
    """Lengths that take all entries of a dim of another operand."""

    def lengths(signature: Signature, spec: Spec, generator: torch.Generator) -> Tensor:
        return torch.full(spec.shape, _size(signature, operand, dim), dtype=spec.dtype)

    return lengths


# By op, operands that need a special structure.
SPECIAL: dict[str, dict[int, Callable[[Signature, Spec, torch.Generator], Tensor]]] = {
    "aten._grouped_mm": {2: _offsets},
    "aten._ctc_loss": {2: _all_of(0, 0), 3: _all_of(1, 1)},
    "aten._ctc_loss_backward": {3: _all_of(1, 0), 4: _all_of(2, 1)},
    "aten._standard_gamma": {0: _positive},
    "aten.linalg_cholesky_ex": {0: _positive_definite},
    "aten.linalg_lu_solve": {1: _pivots},
    "partc.ops.inverse_order": {0: _order},
}
