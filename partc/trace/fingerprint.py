"""The names, shapes and dtypes of a model's tensors, which a program is compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from partc.errors import TraceError
from partc.plan.sharding import dtype_name
from partc.trace.forward_code import forward_code
from partc.trace.touched_modules import touched_modules

Kind = Literal["param", "buffer", "unsaved buffer"]
KINDS: tuple[Kind, ...] = ("param", "buffer", "unsaved buffer")


@dataclass(frozen=True)
class TensorSpec:
    """Kind, shape and dtype of one tensor; an ``unsaved buffer`` is a non-persistent one."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Fingerprint:
    """The tensors of a model by name; a tied tensor stands under each of its names.

    Their order is that in which ``named_parameters``, ``named_buffers`` and ``state_dict`` of the
    model have them. ``touched`` has the modules with hooks or a forward of their own, ``code``
    what the forward of each module is.
    """

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    touched: Mapping[str, str] = field(default_factory=dict, compare=False)
    code: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        """The fingerprint of a model, which may be on the meta device."""
        tensors, saved = named_tensors(model), model.state_dict(keep_vars=True)
        in_order = _in_order(model, [name for name in saved if name in tensors])
        specs = {name: _spec(tensors[name], name in saved) for name in in_order}
        return cls(specs, touched_modules(model), forward_code(model))

    def differences(self, other: Fingerprint) -> list[str]:
        """One line per name whose tensor differs between two fingerprints: compiled, given."""
        lines = []
        for name in sorted({*self.tensors, *other.tensors}):
            mine, theirs = self.tensors.get(name), other.tensors.get(name)
            if mine != theirs:
                lines.append(f"{name}: {mine or 'absent'} compiled, {theirs or 'absent'} given")
        return lines

    def saved_names(self) -> Iterator[str]:
        """The names in the model's own state dict, in the order there; tied ones included."""
        return (name for name, spec in self.tensors.items() if spec.kind != "unsaved buffer")


def _spec(tensor: Tensor, saved: bool) -> TensorSpec:
    kind: Kind = "buffer" if saved else "unsaved buffer"
    if isinstance(tensor, nn.Parameter):
        kind = "param"
    return TensorSpec(kind, tuple(tensor.shape), dtype_name(tensor.dtype))


def _in_order(model: nn.Module, saved: list[str]) -> list[str]:
    """The names of all tensors in the model's order: a module's own before those of its parts.

    Where the model's state dict has an order of its own, the rest stands behind that.
    """
    names = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for table_of in (module._parameters, module._buffers)
        for name, tensor in table_of.items()
        if tensor is not None
    ]
    if [name for name in names if name in set(saved)] == saved:
        return names
    return [*saved, *(name for name in names if name not in set(saved))]


def table(lines: list[str], most: int = 20) -> str:
    """The first lines of a list, indented, and how many more there are."""
    rest = len(lines) - most
    return "".join(f"\n  {line}" for line in lines[:most]) + (f"\n  ... {rest} more" * (rest > 0))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model under each of its names.

    TraceError for one of a lazy module that has not run yet, as it has no shape.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    found = {**params, **dict(model.named_buffers(remove_duplicate=False))}
    for name, tensor in found.items():
        if is_lazy(tensor):
            raise TraceError(
                where=name,
                what="it has no shape yet",
                why="a lazy module gets its parameters when it first runs",
                do="Run the model once on a small batch, under torch.no_grad(), and compile then.",
            )
    return found
