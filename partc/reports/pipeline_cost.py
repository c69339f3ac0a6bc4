"""The cost of a pipeline's step: FLOPs and bytes per stage, memory per rank, the step's time.

Times are predicted (``roofline.py``). Memory is counted: state and activations on the stages'
graphs, the peak by a dry run of each rank's program on fakes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import fx

from partc.amounts import amount, table, time_text
from partc.cost.memory import STATE_COPIES
from partc.cost.memory_limit import Holders, Peak
from partc.cost.pipeline_prediction import predict_pipeline
from partc.cost.pipeline_step import Step, plan_step
from partc.cost.prediction import Prediction, Work
from partc.cost.stage_cost import StageCost, num_bytes, stage_link, stage_of_json, step_costs
from partc.dryrun.run import DryRun, Known, dry_run
from partc.graph import Graph
from partc.plan.mesh import Mesh
from partc.program.role import Role
from partc.program.saved_cost import SeveralNumbers
from partc.reports.cost import TOP
from partc.schedules import Schedule
from partc.schedules.programs import Collective
from partc.schedules.sends import Sends
from partc.schedules.step_costs import Link


@dataclass(frozen=True)
class RankCost:
    """One pipeline rank's memory in bytes, the share of its time in bubbles, and its waits.

    ``in_flight``: activations and messages at the peak of the simulated step. ``live``: the peak of
    the dry run, with gradients, without parameters, buffers and inputs. ``holders``: the largest
    parts of ``live``.
    """

    stages: tuple[int, ...]
    params: int
    grads: int
    optimizer: int
    buffers_and_inputs: int
    in_flight: int
    live: int
    holders: Holders
    bubble: float
    exposed_s: float

    @property
    def peak_bytes(self) -> int:
        """The peak of the rank's memory: state, optimizer states included, and live bytes."""
        return self.params + self.optimizer + self.buffers_and_inputs + self.live


@dataclass(frozen=True)
class Closing:
    """A collective of pipeline ranks after all microbatches, with its members and seconds."""

    name: str
    members: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class PipelineCost(SeveralNumbers):
    """The costs of a pipeline's step: by stage, by rank, and of the step as a whole."""

    model: str
    mesh: str
    schedule: str
    microbatches: int
    optimizer: str
    device: str
    link: Link
    stages: tuple[StageCost, ...]
    ranks: tuple[RankCost, ...]
    closing: tuple[Closing, ...]
    step_s: float
    prediction: Prediction

    def peaks(self) -> list[Peak]:
        """The peak of every pipeline rank."""
        return [
            Peak(
                f"pipeline rank {number}",
                rank.peak_bytes,
                (
                    ("parameters", rank.params),
                    (f"optimizer {self.optimizer}", rank.optimizer),
                    ("buffers and inputs", rank.buffers_and_inputs),
                ),
                rank.holders,
            )
            for number, rank in enumerate(self.ranks)
        ]

    @property
    def bubble(self) -> float:
        """The mean over all ranks of the share of their time in which they do not compute."""
        return sum(rank.bubble for rank in self.ranks) / len(self.ranks)

    def __str__(self) -> str:
        lines = [f"cost of {self.model}, per rank and step    mesh {self.mesh}", ""]
        for heading, rows in (
            ("per stage and microbatch", self._stage_rows()),
            (f"per pipeline rank, optimizer {self.optimizer}", self._rank_rows()),
        ):
            lines += [f"  {heading}", *_columns(rows), ""]
        lines += [
            f"  {self.schedule}, {self.microbatches} microbatches: {time_text(self.step_s)}, "
            f"bubble {self.bubble:.1%}; then the optimizer",
            *table(self.prediction.rows()),
        ]
        return "\n".join(lines) + "\n"

    def _stage_rows(self) -> list[list[str]]:
        rows = [["stage", "forward", "backward", "weights", "held", "sent", "F", "B", "W"]]
        for number, s in enumerate(self.stages):
            flops = (s.forward_flops, s.backward_flops, s.weight_flops)
            sizes = (s.activation_bytes, s.sent_bytes)
            times = (s.forward_s, s.backward_s, s.weight_s)
            texts = [amount(x, "FLOP") for x in flops] + [amount(x, "B") for x in sizes]
            rows.append([str(number), *texts, *map(time_text, times)])
        return rows

    def _rank_rows(self) -> list[list[str]]:
        heads = ["parameters", "gradients", "optimizer", "in flight", "peak", "bubble", "exposed"]
        rows = [["rank", "stages", *heads]]
        for number, r in enumerate(self.ranks):
            sizes = (r.params, r.grads, r.optimizer, r.in_flight, r.peak_bytes)
            stages = ",".join(map(str, r.stages))
            texts = [amount(x, "B") for x in sizes]
            rows.append([str(number), stages, *texts, f"{r.bubble:.1%}", time_text(r.exposed_s)])
        return rows

    def as_json(self) -> dict[str, Any]:
        """The numbers as plain data."""
        ranks = [asdict(rank) | {"peak_bytes": rank.peak_bytes} for rank in self.ranks]
        return asdict(self) | {"ranks": ranks, "bubble": self.bubble}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> PipelineCost:
        """A PipelineCost from the data of ``as_json``."""
        own = {field.name: data[field.name] for field in fields(cls)}
        ranks = [{**rank, "stages": tuple(rank["stages"])} for rank in own["ranks"]]
        closing = [{**each, "members": tuple(each["members"])} for each in own["closing"]]
        for rank in ranks:
            del rank["peak_bytes"]
            rank["holders"] = tuple((who, size) for who, size in rank["holders"])
        return cls(**own | {
            "link": Link(*own["link"]),
            "stages": tuple(map(stage_of_json, own["stages"])),
            "ranks": tuple(RankCost(**rank) for rank in ranks),
            "closing": tuple(Closing(**each) for each in closing),
            "prediction": Prediction.of_json(own["prediction"]),
        })  # fmt: skip

    def plan_step(self, schedule: Schedule, sends: Sends | None = None) -> Step:
        """Lower, check and simulate a schedule with these costs, in seconds and bytes.

        ``sends``: how many messages the plan lets be under way.
        """
        closing_s = {each.name: each.seconds for each in self.closing}
        costs = step_costs(self.stages, closing_s, self.link)
        closing = [Collective(each.name, (), each.members) for each in self.closing]
        return plan_step(schedule, costs, closing, sends)


def pipeline_cost(
    graphs: Sequence[Graph],
    stages: Sequence[StageCost],
    step: Step,
    roles: Sequence[Role],
    mesh: Mesh,
    *,
    work: Work,
    optimizer: str = "adamw",
) -> PipelineCost:
    """The costs of a simulated step; ``roles``: the programs of pipeline ranks 0, 1, ..."""
    trained = [trained_bytes_of(graphs, step.schedule.stages_of(r)) for r in range(len(roles))]
    return PipelineCost(
        model=graphs[0].model,
        mesh=str(mesh),
        schedule=step.schedule.name,
        microbatches=step.schedule.microbatches,
        optimizer=optimizer,
        device=f"{mesh.hardware.name}: {mesh.hardware.kinds}",
        link=stage_link(stages, mesh),
        stages=tuple(stages),
        ranks=_rank_costs(graphs, step, roles, optimizer, mesh.hardware.library),
        closing=tuple(
            Closing(each.name, each.members, step.simulated.costs.collectives[each.name])
            for each in step.wiring.collectives
        ),
        step_s=step.simulated.makespan,
        prediction=predict_pipeline(
            [stage.spent for stage in stages], step, trained, work, mesh, optimizer=optimizer,
            flops=sum(s.forward_flops + s.backward_flops + s.weight_flops for s in stages),
        ),
    )  # fmt: skip


# ranks --------------------------------------------------------------------------------------------
def _rank_costs(
    graphs: Sequence[Graph], step: Step, roles: Sequence[Role], optimizer: str, library: str
) -> tuple[RankCost, ...]:
    """The costs of every rank; a dry run reuses the turns of earlier ranks' equal stages.

    CheckError where a program, however long its schedule, uses memory of a transfer under way.
    """
    known: Known = {}
    found = []
    for rank, role in enumerate(roles):
        ran = dry_run(role, role.mesh.first_rank(rank), known, library)
        found.append(_rank_cost(graphs, step, rank, ran, optimizer))
    return tuple(found)


def _rank_cost(
    graphs: Sequence[Graph], step: Step, rank: int, ran: DryRun, optimizer: str
) -> RankCost:
    schedule, simulated = step.schedule, step.simulated
    stages = schedule.stages_of(rank)
    state = state_of_rank(graphs, stages, optimizer)
    return RankCost(
        stages=stages,
        params=state.params,
        grads=state.grads,
        optimizer=state.optimizer,
        buffers_and_inputs=state.buffers_and_inputs,
        in_flight=int(simulated.peaks[rank]),
        live=ran.peak_bytes,
        holders=tuple((str(each), each.num_bytes) for each in ran.holders[:TOP]),
        bubble=simulated.bubbles[rank],
        exposed_s=simulated.exposed[rank],
    )


@dataclass(frozen=True)
class RankState:
    """The bytes that a pipeline rank keeps from step to step."""

    params: int
    grads: int
    optimizer: int
    buffers_and_inputs: int


def state_of_rank(
    graphs: Sequence[Graph], stages: Sequence[int], optimizer: str = "adamw"
) -> RankState:
    """The state of a rank that runs some stages."""
    mine = [graphs[stage] for stage in stages]
    # a parameter of several of the rank's stages is there once
    params = {name: size for graph in mine for name, size in _sizes(graph, graph.params).items()}
    grads = {name: params[name] for graph in mine for name in graph.trained_elsewhere}
    grads |= {name: size for graph in mine for name, size in _sizes(graph, graph.grads).items()}
    buffers = {name: size for graph in mine for name, size in _sizes(graph, graph.buffers).items()}
    return RankState(
        params=sum(params.values()),
        grads=sum(grads.values()),
        optimizer=STATE_COPIES[optimizer] * trained_bytes_of(graphs, stages),
        buffers_and_inputs=sum(buffers.values()) + sum(map(num_bytes, graphs[0].inputs.values())),
    )


def trained_bytes_of(graphs: Sequence[Graph], stages: Sequence[int]) -> int:
    """Bytes of the trained parameters of some stages; a tied parameter counts once."""
    mine = [graphs[stage] for stage in stages]
    params = {name: size for graph in mine for name, size in _sizes(graph, graph.params).items()}
    trained = {name for graph in mine for name in graph.trained}
    return sum(size for name, size in params.items() if name in trained)


def _sizes(graph: Graph, named: Mapping[str, fx.Node]) -> dict[str, int]:
    """Bytes of parameters, gradients or buffers by name, times the equal blocks they stand for."""
    places = {**graph.params, **graph.buffers}
    return {name: graph.times(places[name]) * num_bytes(node) for name, node in named.items()}


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned, indented lines; all columns are right-aligned."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{t:>{w}}" for t, w in zip(row, wide, strict=True)) for row in rows]
