"""Compare a program with its model: loss, gradients, buffers, parameters after optimizer steps.

Each rank's shards are compared with the same shards of the reference, which is the model's step
with eager autograd on one device, in float64 by default. The error of a tensor is the largest
difference divided by the largest value of the whole reference tensor. Some tensors are zero in
exact arithmetic, such as the gradient of a key bias, and have only rounding noise (below
``eps ** (2/3)`` of the largest value of their kind); their error is divided by that largest value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partc.passes.suspects import suspects
from partc.plan import Plan
from partc.plan.coded import Coded
from partc.program import Program
from partc.program import check_model as check_same_model
from partc.program.cpp_compiler import check_compiler
from partc.program.role import RankMesh, Role, Shard
from partc.program.saved_cost import SavedCost
from partc.program.start import device_of
from partc.program.step.given_out import whole_step
from partc.trace.arguments import Given
from partc.trace.default_dtype import float32_default
from partc.trace.no_model import check_model
from partc.verification.asked import (
    check_asked,
    check_carried,
    other_mode,
    other_shapes,
    without_number,
)
from partc.verification.coded_weights import (
    Comparing,
    decoded,
    how_of,
    weights_compared,
    weights_of,
)
from partc.verification.differences import difference, scales
from partc.verification.exact_gathers import classes_of, gather_by, gathering_by
from partc.verification.late_gradients import LateGradients
from partc.verification.lossy import SentError, sent_errors, worst
from partc.verification.meetings import Compared, Meetings, OwnBatches
from partc.verification.narrow_sums import Narrow, sum_exactly
from partc.verification.pieces_of_ranks import own_rows, pieces_of, whole_batch
from partc.verification.precision import Raised, convert, converted, raised_text
from partc.verification.processes import Processes
from partc.verification.reference import (
    OPTIMIZERS,
    Loss,
    Reference,
    Tensors,
    eager,
    take_step,
)
from partc.verification.report import Row, Verification, held_nowhere, merged
from partc.verification.same_draws import SEED, STEP, SameDraws
from partc.verification.threads import ThreadMesh, run_ranks
from partc.wrong_calls import known_arguments


@known_arguments
@float32_default()
@torch.enable_grad()  # where a script has switched gradients off
def verify(
    program: Program,
    model: nn.Module,
    inputs: Any,
    loss: Loss | None = None,
    *,
    processes: bool = False,
    lr: float = 1e-3,
    dtype: torch.dtype | None = torch.float64,
    reference: Reference | None = None,
    timeout: float = 120.0,
    device: str = "cpu",
    lossy: bool = False,
) -> Verification:
    """Run all ranks of a program here, and compare what each gets with the model on one device.

    Compared are the loss and its extras, every gradient, changed buffers, the parameters after a
    step of SGD and of AdamW, and gradients added up over two steps; of an inference program its
    results.

    Args:
        program: what ``compile`` or ``load`` gave; on ``dp=2,tp=2`` four ranks run.
        model: the model that it was compiled from, with weights.
        inputs: the ``inputs`` of ``compile``, the global batch with values. Of a program with
            ``batch="local"`` one rank's piece will do: other ranks' pieces have the same values at
            other places.
        loss: the ``loss`` of ``compile``.
        processes: gloo processes in place of threads of this one.
        lr: learning rate of the two optimizer steps.
        dtype: float64 computes in that whatever model and program were written for, so that a
            right program is off by rounding alone; None leaves both in their own precision.
        reference: what to compare with in place of running the model.
        timeout: seconds after which ranks that wait for each other are given up.
        device: where the ranks compute; on ``"cuda"`` they share one GPU, as threads or as gloo
            processes. The model computes on the CPU in any case.
        lossy: also tell how far gradients that the plan's ``[compress]`` sends in fewer bytes are
            from exact ones, beside the bound of the scheme.

    Returns:
        A Verification with one row per tensor: its largest error over all ranks, divided by the
        largest value of the whole tensor. ``check()`` raises where one is above 1e-9, ``ok()``
        asks, as ``assert`` does. With ``lossy`` also ``sent``, a row per sum with its error and
        bound; both are beside the norm of the exact sum.

    Raises:
        RunError: a rank fails, or ranks call different collectives or wait for ever; there is no
            such device.
        UsageError: ``lossy``, and the plan compresses nothing.

    Example::

        partc.verify(program, model, batch, loss=loss_of).check()
    """
    check_asked(program, lr, dtype, timeout, lossy=lossy)
    check_compiler(program.role(0))
    train = not program.role(0).is_inference
    place = device_of(device, "verify")
    draws = SameDraws(program.draws, program.mesh.names, place)
    check_model(model, "verify")
    inputs = whole_batch(program, Given.of(model, inputs, loss))
    if program.fingerprint.tensors and other_shapes(program, model):
        check_same_model(None, program.fingerprint, model, program.model)
    rounded = weights_of(program) if reference is None else None
    if reference is None:
        pieces = pieces_of(program)
        reference = eager(model, inputs, loss, dtype, train, pieces, draws, rounded)
    sources = program.sources
    if dtype == torch.float64 and program.role(0).compiles:
        sources = {name: raised_text(text) for name, text in sources.items()}
    printed = replace(program, cost=SavedCost())
    job = _Job(
        replace(printed, sources=sources), printed, reference, dtype, lr, place, lossy,
        rounded is not None,
    )  # fmt: skip
    num = program.mesh.num_ranks
    if processes:
        check_carried(program, place)
        with Processes(num, timeout=timeout) as world:
            found = world.run(_in_process, job)
    else:
        found = run_ranks(num, lambda r, dist: _in_thread(job, r, dist), timeout=timeout)
    precision = "its own precision" if dtype is None else str(dtype).removeprefix("torch.")
    how = "processes" if processes else "threads"
    how += "" if place.type == "cpu" else f" on {place}"
    title = f"{program.model} on {program.mesh}: {num} ranks in {how}, {precision}"
    rows = merged([rows for rows, _ in found])
    sent = worst([each for _, each in found])
    theirs = suspects(Plan.parse(program.plan).other_passes)
    rows = (*rows, *held_nowhere(reference.grads, rows))
    mode, without = other_mode(program, model), without_number(inputs, reference)
    return Verification(title, rows, theirs, mode, sent, without)


@dataclass(frozen=True)
class _Job:
    """What a rank needs to compare its results with the reference.

    ``program`` may have float64 in its text in place of narrower floats; ``printed`` is as it was.
    ``with_sent``: the reference computes with weights as they are gathered, not with exact ones.
    """

    program: Program
    printed: Program
    reference: Reference
    dtype: torch.dtype | None
    lr: float
    device: torch.device
    lossy: bool = False
    with_sent: bool = False

    @property
    def coded(self) -> Coded | None:
        """How weights are gathered with fewer bytes; None if they are not."""
        return how_of(self.program.plan)


def _roles(job: _Job, rank: int) -> tuple[Role, Role]:
    """One rank's role in the text that is run, and in the text as it was printed."""
    role = job.program.role(rank)
    same = job.printed.sources is job.program.sources
    return role, role if same else job.printed.role(rank)


Found = tuple[list[Row], list[SentError]]  # of one rank


def _in_thread(job: _Job, rank: int, dist: Any) -> Found:
    roles = _roles(job, rank)
    for role in roles:
        role.module.dist = dist  # type: ignore[attr-defined]
    return _check(job, roles, ThreadMesh(job.program.mesh, rank), rank)


def _in_process(job: _Job) -> Found:
    import torch.distributed as dist

    from partc.program.ranks.handshake import device_mesh

    mesh, rank = job.program.mesh, dist.get_rank()
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)  # a DeviceMesh takes the GPU LOCAL_RANK otherwise
    return _check(job, _roles(job, rank), device_mesh(mesh, job.device.type), rank)


def _check(job: _Job, roles: tuple[Role, Role], mesh: RankMesh | None, rank: int) -> Found:
    """Build one rank's module, run its step, and compare all results; return their errors.

    Narrow sums are exact at first; then they are compared with their definition, in the text as it
    was printed (the second one of ``roles``), where torch.compile leaves functions as they are.
    """
    role, printed = roles
    meetings = Meetings.of(job.program, role, rank)
    narrow = Narrow.of(printed, job.program.plan, rank)
    gathers, coded = classes_of(printed), job.coded
    if narrow is not None or coded is not None:
        sum_exactly(role)
    if coded is not None and job.with_sent:
        gather_by(role, partial(decoded, how=coded))
    raised = not role.compiles
    with _raised(job, raised):
        one = _Rank(job, role, _built(job, role, mesh), rank, raised)
    found = [*one.rows()]
    if meetings is not None:
        with _raised(job, raised):
            one = _Rank(job, role, _built(job, role, mesh), rank)
            one._fill()
            met = one.met(meetings)
            found += [Row(error, kind, name, rank) for kind, name, error in met]
    sent: list[SentError] = []
    if coded is not None:
        with gathering_by(printed, gathers):
            seen = _gathered(job, printed, mesh, rank, coded)
        found += [Row(error, kind, name, rank) for kind, name, error in seen.rows()]
        sent += [*seen.errors()] if job.lossy else []
    if narrow is None or role.is_inference:
        return found, sent
    if not narrow.rounds_in_float64 and job.device.type == "cpu":
        job = replace(job, dtype=None)
    with _raised(job):
        one = _Rank(job, printed, _built(job, printed, mesh), rank, raised=True)
    one._fill()
    compared = narrow.rows(one.step, one._run)
    found += [Row(error, kind, name, rank) for kind, name, error in compared]
    return found, [*sent, *sent_errors(narrow, one.step, one._run)] if job.lossy else []


def _gathered(job: _Job, role: Role, mesh: RankMesh | None, rank: int, how: Coded) -> Comparing:
    """What the classes of one rank's text make of weights in a step, whose sums are exact."""
    if not how.code.has_blocks:  # casts are none in float64
        job = replace(job, dtype=None)
    with _raised(job):
        one = _Rank(job, role, _built(job, role, mesh), rank, raised=True)
        one._fill()
        return weights_compared(role, how, one.step, one._run)


def _built(job: _Job, role: Role, mesh: RankMesh | None) -> nn.Module:
    """One rank's module in the precision that was asked for."""
    step = role.build(mesh, job.device)
    return step if job.dtype is None else convert(step, job.dtype)


def _raised(job: _Job, raised: bool = True) -> AbstractContextManager[Any]:
    return Raised() if raised and job.dtype == torch.float64 else nullcontext()


@dataclass(frozen=True)
class _Rank:
    """One rank that runs its step and compares the results.

    ``raised``: whether each step runs in float64 where that was asked for. What is compared is so
    anyway, and takes longer to compare under a mode.
    """

    job: _Job
    role: Role
    step: nn.Module
    rank: int
    raised: bool = False

    def rows(self) -> Iterator[Row]:
        """The errors of a forward program's results, or of a step's loss, gradients and tensors."""
        reference, role = self.job.reference, self.role
        self._fill()
        before = {s.name: self._held()[s.name].detach().clone() for s in role.params}
        loss, results = self._run()
        yield from self._changed(before)
        kind, wanted = "result" if loss is None else "extra", self._rows(reference.results)
        yield from self._whole(kind, results, wanted)
        if loss is None:
            yield from self._buffers()
            return
        assert reference.loss is not None
        yield from self._whole("loss", {"loss": loss}, {"loss": reference.loss})
        yield from self._pieces("gradient", self._grads(), reference.grads, role.params)
        yield from self._buffers()
        for optimizer in OPTIMIZERS:
            yield from self._optimized(optimizer)
        self._fill()
        self._run()
        twice = {name: 2 * grad for name, grad in reference.grads.items()}
        yield from self._pieces("accumulated gradient", self._grads(), twice, role.params)

    @torch.no_grad()
    def _fill(self) -> None:
        """Set this rank's shards to the model's weights, else to constants, else to 0."""
        held, known = self._held(), self.job.program.constants
        for param in self.step.parameters():
            param.zero_()  # a parameter missing in the program's table has arbitrary values
        given = {**known, **self.job.reference.weights}
        for shard in self.role.shards:
            whole = given.get(shard.name, torch.zeros(shard.shape))
            held[shard.name].copy_(self._take(shard, converted(whole, held[shard.name].dtype)))

    def _seed(self, number: int = STEP) -> None:
        """Let the next step draw the numbers of the reference, or of a step by its number."""
        step: Any = self.step
        alone = self.role.alone(step)
        if hasattr(alone, "seed"):
            alone.seed(step, SEED, number - 1)

    def met(self, meetings: Meetings | LateGradients | OwnBatches) -> Iterable[Compared]:
        """What islands make together, compared with its definition."""
        if not isinstance(meetings, OwnBatches):
            return meetings.rows(self.step, self._run_with_others, self._run)

        def alone(inputs: list[Tensor], number: int) -> Tensor | None:
            self._seed(STEP + number)
            return self.role.run(self.step, inputs)[0]

        return meetings.rows(self.step, self._inputs(), self._run_with_others, alone)

    def _run(self, number: int = STEP) -> tuple[Tensor | None, Tensors]:
        with _raised(self.job, self.raised):
            self._seed(number)
            return self.role.run(self.step, self._inputs())

    def _run_with_others(self, inputs: list[Tensor] | None = None) -> Any:
        """A step of an island among others, which have nothing to do before it."""
        step: Any = self.step
        if hasattr(step, "meet"):
            step.met = step.taken
        self._seed()
        return whole_step(step, step.step, self._inputs() if inputs is None else inputs)

    def _inputs(self) -> list[Tensor]:
        """What this rank is given of the batch."""
        coords = self.job.program.mesh.coords(self.rank)
        pieces = self.role.pieces(self.job.reference.inputs, coords)
        if self.job.dtype is None:  # the reference may be in float64 all the same
            dtypes = [each.dtype for each in self.role.batch]
            pieces = [x.to(dtype) for x, dtype in zip(pieces, dtypes, strict=True)]
        return [x.contiguous().to(self.job.device) for x in pieces]

    def _optimized(self, optimizer: str) -> Iterator[Row]:
        """The errors of the parameters after one optimizer step from the reference's weights."""
        after = self.job.reference.stepped(optimizer, self.job.lr)
        self._fill()
        held = self._held()
        every = {s.name: held[s.name] for s in self.role.params if s.name in after}
        stepped = {n: x for n, x in every.items() if x.requires_grad and x.grad is not None}
        if stepped:
            take_step(stepped, optimizer, self.job.lr, self.job.reference.eps)
        shards = [s for s in self.role.params if s.name in every]
        yield from self._pieces(f"after {optimizer}", every, after, shards)

    def _changed(self, before: Tensors) -> Iterator[Row]:
        """A parameter that a step has written is wrong; where islands meet, they write all."""
        held = {} if hasattr(self.step, "meet") else self._held()
        for name in (name for name in before if name in held):
            if not torch.equal(held[name], before[name]):
                yield Row(float("inf"), "changed parameter", name, self.rank)

    def _buffers(self) -> Iterator[Row]:
        expected = self.job.reference.buffers
        ours = [s for s in self.role.buffers if s.name in expected]
        yield from self._pieces("buffer", self._held(), expected, ours)

    def _pieces(
        self, kind: str, found: Tensors, expected: Tensors, shards: Sequence[Shard]
    ) -> Iterator[Row]:
        """The errors of this rank's shards; infinite for a tensor that only one side has."""
        scale_of = scales(expected)
        for shard in shards:
            ours, whole = found.get(shard.name), expected.get(shard.name)
            if ours is None and whole is None:
                continue
            error, noise = float("inf"), False
            if ours is not None and whole is not None:
                scale, noise = scale_of[shard.name]
                error = difference(ours, self._take(shard, whole)) / scale
            yield Row(error, kind, shard.name, self.rank, noise)

    def _whole(self, kind: str, found: Tensors, expected: Tensors) -> Iterator[Row]:
        """The errors of tensors that every rank has whole."""
        scale_of = scales(expected)
        for name in sorted({*found, *expected}):
            if name not in found or name not in expected:
                yield Row(float("inf"), kind, name, self.rank)
                continue
            scale, noise = scale_of[name]
            yield Row(difference(found[name], expected[name]) / scale, kind, name, self.rank, noise)

    def _rows(self, results: Tensors) -> dict[str, Tensor]:
        """The results as this rank gets them: its own rows, or all of them."""
        cuts = {n: own_rows(self.job.program, n, x.shape) for n, x in results.items()}
        return {
            name: self._take(Shard("", name, tuple(x.shape), x.dtype, cuts[name]), x)
            for name, x in results.items()
        }

    def _held(self) -> dict[str, Tensor]:
        return self.role.tensors(self.step)

    def _grads(self) -> dict[str, Tensor]:
        return {name: t.grad for name, t in self._held().items() if t.grad is not None}

    def _take(self, shard: Shard, whole: Tensor) -> Tensor:
        mesh = self.job.program.mesh
        return shard.take(whole, mesh, mesh.coords(self.rank))
