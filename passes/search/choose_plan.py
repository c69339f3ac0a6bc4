"""``plan="auto"``: the fastest way to train a traced model on a mesh that fits its memory.

In: a joint graph and a mesh, open or with axes, and the user's pins. Out: the mesh with its axes
and a partial plan, and the candidates that came next. Everything is estimated from one profile per
tensor preset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partc.errors import PlanError
from partc.graph import Graph
from partc.mesh import Mesh
from partc.passes.search.candidates import Space, names_axes
from partc.passes.search.estimate import Candidate, Estimate, Estimator
from partc.passes.search.profile import Profile, profile
from partc.plan import Plan

AUTO_PLAN = "auto"
KEPT = 5  # candidates that a report names
SPARE = 0.92  # of a device's memory: the rest is for the allocator, the library's buffers, kernels


@dataclass(frozen=True)
class Ranked:
    """A candidate and what it is estimated to cost."""

    candidate: Candidate
    estimate: Estimate


@dataclass(frozen=True)
class Choice:
    """What the search found: the best first, then the next best of ``all_of`` candidates."""

    ranked: tuple[Ranked, ...]
    all_of: int
    limit: float  # bytes of a rank

    def ways(self, mesh: Mesh, plan: Plan) -> list[tuple[Mesh, Plan]]:
        """Mesh and plan of each candidate, the best first; what the plan pins stays."""
        limit = plan.memory_bytes or (round(self.limit) if mesh.topology else 0)
        found = []
        for each in self.ranked:
            one = each.candidate
            more: dict[str, Any] = (
                {"schedule": one.schedule, "chunks": one.chunks} if one.pp > 1 else {}
            )
            found.append((
                one.mesh(mesh.topology),
                plan.changed(
                    preset=one.preset, microbatches=one.microbatches, memory_bytes=limit,
                    recompute=one.recompute if plan.recompute == "cheap" else plan.recompute,
                    notes=(*plan.notes, self.note()), **more,
                ),
            ))  # fmt: skip
        return found

    def note(self) -> str:
        """One line for the plan: how it was chosen."""
        best = self.ranked[0].estimate.step_s
        others = (
            f"{each.candidate} +{each.estimate.step_s / best - 1:.0%}" for each in self.ranked[1:3]
        )
        then = "; ".join(others)
        return f"auto: best of {self.all_of} candidates" + (f"; next: {then}" if then else "")


def can_search(mesh: Mesh, plan: Plan) -> bool:
    """Whether there is something to choose, every axis is one that the search knows, and the plan
    does not cut the stages itself.
    """
    if plan.stages or plan.order or plan.chunks:
        return False
    return mesh.is_open or (names_axes(mesh) and mesh.num_ranks > 1)


def choose_plan(graph: Graph, mesh: Mesh, plan: Plan, microbatches: int | None = None) -> Choice:
    """The best candidates for one training step; PlanError if none fits the memory.

    ``microbatches`` pins their number, as does a plan that names more than one.
    """
    pinned = microbatches or (plan.microbatches if plan.microbatches > 1 else None)
    topology = mesh.hardware
    devices = mesh.num_ranks if mesh.axes else topology.num_devices
    profiles = _profiles(graph, devices, mesh)
    space = Space(
        mesh=mesh, microbatches=pinned, schedule=plan.schedule, devices=devices,
        recompute=("cheap", "block") if plan.recompute == "cheap" else ("cheap",),
        dp_divides=profiles[""].dp_divides,
        tp_divides={word: found.tp_divides for word, found in profiles.items() if word},
        units=len(profiles[""].chain),
    )  # fmt: skip
    limit = plan.memory_bytes or SPARE * topology.memory_bytes
    estimators = {word: Estimator(found, topology) for word, found in profiles.items()}
    return _search(space, estimators, limit)


def _profiles(graph: Graph, devices: int, mesh: Mesh) -> dict[str, Profile]:
    """One per tensor preset that the mesh may use."""
    words = [""]
    if not mesh.axes or "tp" in mesh.names:
        words += ["megatron-sp", "megatron"]
    return {word: profile(graph, word) for word in words}


def _search(space: Space, estimators: dict[str, Estimator], limit: float) -> Choice:
    """Estimate candidates in the order of their bounds, until none left can be among the best."""
    bounds = [
        (_of(one, estimators).bound_s(one), i, one) for i, one in enumerate(space.candidates())
    ]
    found: list[Ranked] = []
    too_large: list[Ranked] = []
    for bound, _, one in sorted(bounds, key=lambda entry: entry[:2]):
        if len(found) == KEPT and bound >= found[-1].estimate.step_s:
            break
        each = Ranked(one, _of(one, estimators).estimate(one))
        if each.estimate.peak_bytes > limit:
            too_large.append(each)
            continue
        found.append(each)
        found.sort(key=lambda each: (each.estimate.step_s, each.estimate.peak_bytes))
        del found[KEPT:]
    if not found:
        raise _nothing_fits(too_large, limit, space)
    return Choice(tuple(found), len(bounds), limit)


def _of(one: Candidate, estimators: dict[str, Estimator]) -> Estimator:
    return estimators[one.word if one.tp > 1 else ""]


def _nothing_fits(tried: list[Ranked], limit: float, space: Space) -> PlanError:
    if not tried:
        return PlanError(
            where=f"mesh {space.mesh}",
            what="no way to cut the step fits the axes",
            why=f"data ranks times microbatches have to divide {space.dp_divides}",
            do="Change the batch size or the number of devices.",
        )
    least = min(tried, key=lambda each: each.estimate.peak_bytes)
    holders = sorted(least.estimate.bytes.items(), key=lambda item: -item[1])
    held = ", ".join(f"{what} {size / 1e9:.1f} GB" for what, size in holders[:3])
    return PlanError(
        where=f"plan 'auto' on {space.mesh}",
        what=f"nothing fits {limit / 1e9:.1f} GB on a device",
        why=f"the least is {least.estimate.peak_bytes / 1e9:.1f} GB: {least.candidate} ({held})",
        do="Take more devices, a smaller batch, or raise memory_bytes.",
    )
