"""How a script says that its models are compiled: the arguments of a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from partc.given_plan import read_plan
from partc.passes.search.plans.choose_plan import AUTO_PLAN
from partc.plan.mesh import Mesh, MeshLike
from partc.wrappers.longest import inputs_of


@dataclass
class How:
    """How models are compiled.

    Attributes:
        mesh: the axes of ranks, as for ``partc.compile``.
        plan: as for ``partc.compile``.
        loss: ``loss(model, *inputs)``; None: the model returns it, as models of transformers do
            that are given labels.
        outputs: what training steps return of the model's results beside the loss.
        pad: the numbers that fill up inputs to the longest of all ranks, by the input's name.
        options: further arguments of ``partc.compile``.
        inputs: the names of all inputs of the models and losses that are known by now.
    """

    mesh: MeshLike
    plan: Any = "auto"
    loss: Callable[..., Any] | None = None
    outputs: Sequence[str] = ()
    pad: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)

    def know(self, call: Callable[..., Any], *, of_loss: bool) -> None:
        """Take the names of its inputs for names that ``pad`` may have."""
        self.inputs |= {*inputs_of(call, of_loss=of_loss)}

    def of_forwards(self) -> Self:
        """The same for forwards before the first step. A search chooses axes by what a step takes,
        so until then ranks share the batch and the parameters along one axis.
        """
        mesh, plan = Mesh.of(self.mesh), read_plan(self.plan)
        if not mesh.is_open or plan.mesh is not None or plan.preset != AUTO_PLAN:
            return self
        one_axis = mesh.settled(Mesh.parse(f"dp={mesh.hardware.num_devices}"))
        options = {name: x for name, x in self.options.items() if name != "objective"}
        return replace(self, mesh=one_axis, plan=plan.changed(preset="fsdp"), options=options)
