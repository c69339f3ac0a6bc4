"""What torch's schemas and tags say of an op: what it writes, how its results lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partc.graph.writes import write_places
from partc.program.tensors.homes import HomeTensor

_PER_TENSOR = ("_foreach_", "_fused_", "_amp_foreach_")
_SAME_PLACES = {
    "_to_copy", "alias", "clone", "copy_", "detach", "empty_like", "fill_", "full_like",
    "ones_like", "zero_", "zeros_like",
}  # fmt: skip
_OF_ALL_ELEMENTS = {
    "_foreach_max.default", "_foreach_norm.Scalar", "all.default", "any.default", "max.default",
    "mean.default", "min.default", "sum.default",
}  # fmt: skip


@dataclass(frozen=True)
class Op:
    """An op of torch.

    ``is_per_tensor``: it takes lists, and treats the tensors of each index by themselves.
    ``keeps_places``: it makes each element of the elements at the same place alone.
    ``writes_at``: number and name of each operand that it writes to.
    """

    func: Any
    is_of_torch: bool  # not of a library of its own, as those of torch.distributed are
    is_random: bool
    is_per_tensor: bool
    keeps_places: bool
    makes_views: bool
    reshapes_in_place: bool
    has_out: bool
    writes_at: tuple[tuple[int, str], ...]

    @classmethod
    @cache
    def of(cls, func: Any) -> Op:
        """The facts of an op."""
        schema, tags = func._schema, func.tags
        name = _name(func)
        per_tensor = name.startswith(_PER_TENSOR)
        return cls(
            func=func,
            is_of_torch=func.namespace == "aten",
            is_random=torch.Tag.nondeterministic_seeded in tags,
            is_per_tensor=per_tensor,
            keeps_places=torch.Tag.pointwise in tags or per_tensor or name in _SAME_PLACES,
            makes_views=schema._is_view_op(),
            reshapes_in_place=torch.Tag.inplace_view in tags,
            has_out=any(argument.is_out for argument in schema.arguments),
            writes_at=write_places(func),
        )

    @property
    def writes(self) -> bool:
        """Whether it writes to operands."""
        return bool(self.writes_at)

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The operands that the op writes to, also in lists."""
        given = [args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes_at]
        return [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]

    def is_of_all_elements(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a result is of all elements, in whichever order."""
        name = _name(self.func)
        if name == "linalg_vector_norm":
            return (args[2] if len(args) > 2 else kwargs.get("dim")) is None
        return f"{name}.{self.func._overloadname}" in _OF_ALL_ELEMENTS


def home_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[HomeTensor]:
    """The tensors with a home among an op's operands, also in lists."""
    found = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, HomeTensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += [each for each in x if isinstance(each, HomeTensor)]
    return found


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")
