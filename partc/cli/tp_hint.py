"""The tensor parallelism that a model of transformers suggests, beside what a plan does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from partc.plan import Plan, fits
from partc.plan.sharding import Layout

AXIS = "tp"
DIMS = {  # the dim of a weight that each word of transformers cuts
    "colwise": 0, "colwise_rep": 0, "colwise_gather_output": 0, "packed_colwise": 0,
    "rowwise": 1, "rowwise_rep": 1, "rowwise_split_input": 1, "packed_rowwise": 1,
    "embedding_rowwise": 0, "replicate": None, "replicated_with_grad_allreduce": None,
}  # fmt: skip


@dataclass(frozen=True)
class Hint:
    """What transformers says of the weights of some modules, and how a plan stores them.

    ``agrees``: None where partc does not know the word, or no parameter has such a name.
    """

    modules: str
    word: str
    here: str
    agrees: bool | None

    def __str__(self) -> str:
        beside = {True: "the same here", False: "differs", None: "not compared"}[self.agrees]
        return f"{self.modules}: {self.word}, here {self.here}: {beside}"


def hints(model: nn.Module, plan: Plan) -> tuple[Hint, ...]:
    """Compare what models of transformers suggest with the shards of a plan; empty without such."""
    return tuple(_hint(model, plan, name, word) for name, word in _asked(model).items())


def _asked(model: nn.Module) -> dict[str, str]:
    """Words by modules: of ``base_model_tp_plan`` in the configuration of each base model inside of
    the model, and of what models add for their heads.
    """
    found = {}
    for path, module in model.named_modules():
        plans = [getattr(module, "_tp_plan", None)]
        if getattr(module, "base_model", None) is module:
            plans.append(getattr(getattr(module, "config", None), "base_model_tp_plan", None))
        for each in plans:
            for name, word in (each or {}).items():
                found[f"{path}.{name}".strip(".")] = str(word)
    return found


def hint_text(found: tuple[Hint, ...], plan: Plan) -> list[str]:
    """The comparison as lines: how many are the same, then those that are not."""
    if not found:
        return []
    if AXIS not in dict(plan.mesh.axes if plan.mesh else ()):
        return [
            f"transformers suggests shards over tp for {len(found)} modules; the mesh has no tp"
        ]
    same = sum(hint.agrees is True for hint in found)
    head = f"transformers suggests shards over tp for {len(found)} modules, {same} are so here"
    return [head, *(f"  {hint}" for hint in found if hint.agrees is not True)]


def _hint(model: nn.Module, plan: Plan, modules: str, word: str) -> Hint:
    names = [name for name, _ in model.named_parameters() if _is_of(name, modules)]
    cuts = {name: plan.stored(name).get(AXIS) for name in names}
    here = ", ".join(sorted({_text(cut) for cut in cuts.values()})) or "no such parameter"
    if word not in DIMS or not names:
        return Hint(modules, word, here, None)
    wanted = DIMS[word]
    return Hint(modules, word, here, all(_dim(cut) == wanted for cut in cuts.values()))


def _is_of(parameter: str, modules: str) -> bool:
    """Whether a parameter is the weight that a pattern of transformers speaks of."""
    return fits(f"{modules}.weight", parameter) or fits(modules, parameter)


def _dim(cut: Layout | None) -> int | None:
    return None if cut is None else cut.dim


def _text(cut: Layout | None) -> str:
    return "whole" if cut is None else f"dim {cut.dim}"


def as_json(found: tuple[Hint, ...]) -> list[dict[str, Any]]:
    """The comparison as plain data."""
    return list(_rows(found))


def _rows(found: tuple[Hint, ...]) -> Iterator[dict[str, Any]]:
    for hint in found:
        yield {"modules": hint.modules, "word": hint.word, "here": hint.here, "same": hint.agrees}
