"""Predict a training step's time on the mesh's machines: by phase, by mesh axis, and as rates.

The times are those of the roofline model (``partc/cost/roofline.py``); a pipeline's are those of
its simulated schedule (``pipeline_prediction.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from partc.amounts import Row, amount, table, time_text
from partc.cost.flops import node_flops, total_flops
from partc.cost.record_events import record_step
from partc.cost.roofline import Spent, dtype_of
from partc.cost.step_walk import step_times
from partc.cost.storage import Replay
from partc.graph import Graph, fake_of, value
from partc.machines.devices import Device
from partc.machines.objective import Batch
from partc.plan.mesh import Mesh

# How many bytes a fused optimizer step moves per byte of a parameter: parameter, gradient and
# states are read, parameter and states are written (adam has 2 states: 4 reads, 3 writes).
OPTIMIZER_TRAFFIC = {
    "none": 0, "sgd": 3, "momentum": 5, "adagrad": 5, "rmsprop": 5, "adam": 7, "adamw": 7,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The work of a step on the global batch, whatever the plan: the model's FLOPs, and the batch.

    ``dtype`` is the precision of most FLOPs. ``tokens`` is 0 where the first input has no tokens.
    """

    flops: int
    dtype: str
    samples: int
    tokens: int

    @property
    def batch(self) -> Batch:
        """The batch counted in tokens if the inputs are tokens, otherwise in samples."""
        return Batch(self.tokens, "tokens") if self.tokens else Batch(self.samples, "samples")

    @classmethod
    def of(cls, graph: Graph) -> Work:
        """The work of a joint graph, at whole shapes; a first input of 2-d integers is tokens."""
        by_dtype: Counter[str] = Counter()
        for node in graph.calls():
            if flops := node_flops(node):
                by_dtype[dtype_of(node)] += graph.times(node) * flops
        first = next(iter(graph.inputs.values()), None)
        shape = () if first is None else value(first).shape
        of_tokens = first is not None and len(shape) == 2 and not fake_of(first).is_floating_point()
        return cls(
            flops=total_flops(graph),
            dtype=max(by_dtype, key=by_dtype.__getitem__, default="f32"),
            samples=shape[0] if shape else 1,
            tokens=shape[0] * shape[1] if of_tokens else 0,
        )


@dataclass(frozen=True)
class PhaseTime:
    """The seconds of one phase of a step (``forward``), on the rank that computes most.

    ``parts``: the seconds by what bounds them, as in ``Spent.parts``; ``bound``: the largest part.
    """

    name: str
    seconds: float
    bound: str
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class AxisTime:
    """Seconds of one axis's transfers in a step: hidden beside computing, or exposed."""

    axis: str
    hidden_s: float
    exposed_s: float


@dataclass(frozen=True)
class Prediction:
    """The predicted time of one training step, its phases, its transfers and its rates.

    ``device_flops``: FLOPs that one device executes, including recomputation and calls that several
    devices all execute. ``peak``: peak FLOP/s of a device at the dtype of ``work``.
    """

    hardware: str
    devices: int
    seconds: float
    compute_s: float
    phases: tuple[PhaseTime, ...]
    axes: tuple[AxisTime, ...]
    work: Work
    device_flops: float
    peak: float

    @property
    def samples_per_s(self) -> float:
        return self.work.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.work.tokens / self.seconds if self.seconds else 0.0

    @property
    def model_flops_per_s(self) -> float:
        """FLOPs of the model per second and device; recomputation does not count."""
        return self.work.flops / self.devices / self.seconds if self.seconds else 0.0

    @property
    def model_share(self) -> float:
        """Model FLOPs utilization (MFU): ``model_flops_per_s`` over the device's peak."""
        return self.model_flops_per_s / self.peak

    @property
    def hardware_share(self) -> float:
        """Hardware FLOPs utilization (HFU): all FLOPs that a device executes, over its peak."""
        return self.device_flops / self.seconds / self.peak if self.seconds else 0.0

    def __str__(self) -> str:
        return "\n".join(table(self.rows())) + "\n"

    def rows(self) -> list[Row]:
        """The prediction as rows of a table: the step, its phases, its axes, a device's rate."""
        rates = [f"{self.samples_per_s:.4g} samples/s"]
        rates += [f"{self.tokens_per_s:.4g} tokens/s"] if self.work.tokens else []
        rows = [("predicted step", time_text(self.seconds), f"{', '.join(rates)}, {self.hardware}")]
        rows += [
            (f"  {phase.name}", time_text(phase.seconds), f"most of it {phase.bound}")
            for phase in self.phases
        ]
        rows += [
            (f"  over {each.axis}", time_text(each.exposed_s + each.hidden_s),
             f"{time_text(each.exposed_s)} exposed")
            for each in self.axes
        ]  # fmt: skip
        speed = amount(round(self.model_flops_per_s), "FLOP/s")
        shares = f"{self.model_share:.1%} of its {self.work.dtype} peak, with what is computed "
        return [*rows, ("  a device", speed, f"{shares}more than once {self.hardware_share:.1%}")]

    def as_json(self) -> dict[str, Any]:
        """The numbers as plain data."""
        names = ("samples_per_s", "tokens_per_s", "model_flops_per_s", "model_share")
        parts = {"phases": list(map(asdict, self.phases)), "axes": list(map(asdict, self.axes))}
        return asdict(self) | parts | {n: getattr(self, n) for n in (*names, "hardware_share")}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Prediction:
        """A prediction from what ``as_json`` gave."""
        own = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**own | {
            "phases": tuple(PhaseTime(**phase) for phase in own["phases"]),
            "axes": tuple(AxisTime(**each) for each in own["axes"]),
            "work": Work(**own["work"]),
        })  # fmt: skip


def predict(
    local: Graph, ran: Replay, work: Work, mesh: Mesh, *, optimizer: str = "adamw",
    prefetch: int = 1,
) -> Prediction:  # fmt: skip
    """The predicted step of a plan without pipeline stages; ``local`` is the scheduled graph."""
    spent = step_times(record_step(local, ran, prefetch), mesh)
    spent["optimizer"] = optimizer_time(trained_bytes(local), mesh.hardware.device, optimizer)
    return prediction(spent, work, mesh, total_flops(local))


def trained_bytes(local: Graph) -> int:
    """Bytes of one rank's trained parameters, counted on their gradients."""
    params = local.params
    return sum(local.times(params[n]) * fake_of(d).nbytes for n, d in local.grads.items())


def prediction(
    spent: Mapping[str, Spent], work: Work, mesh: Mesh, device_flops: float
) -> Prediction:
    """A Prediction from the time of each phase, in order; phases of 0 seconds are left out."""
    whole = Spent()
    for each in spent.values():
        whole.add(each)
    moved = {**whole.hidden, **whole.exposed}
    axes = [axis for axis in mesh.names if moved.get(axis)]
    hardware = mesh.hardware
    return Prediction(
        hardware=f"{hardware.name}: {hardware.kinds}",
        devices=mesh.num_ranks,
        seconds=whole.seconds,
        compute_s=sum(whole.computing.values()),
        phases=tuple(
            PhaseTime(name, each.seconds, each.bound, each.parts)
            for name, each in spent.items()
            if each.seconds
        ),
        axes=tuple(
            AxisTime(axis, whole.hidden.get(axis, 0.0), whole.exposed.get(axis, 0.0))
            for axis in axes
        ),
        work=work,
        device_flops=device_flops,
        peak=hardware.mean(lambda device: device.peak(work.dtype)),
    )


def optimizer_time(param_bytes: int, device: Device, optimizer: str) -> Spent:
    """The time of one rank's fused optimizer step, from the bytes it reads and writes."""
    num_bytes = OPTIMIZER_TRAFFIC[optimizer] * param_bytes
    if not num_bytes:
        return Spent()
    updating = max(device.launch_s, device.memory_seconds(num_bytes, "optimizer"))
    return Spent({"memory": updating + device.call_s})
