"""What is said where ranks do not hold alike what they must: which ranks and which tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from partc.data.same_rows import DO as OF_ROWS
from partc.errors import RunError
from partc.plan.mesh import ISLAND
from partc.program.optimizer.beside import DO as OF_BESIDE
from partc.program.optimizer.beside import TOGETHER
from partc.program.optimizer.same_steps import NONE, SET
from partc.program.role import Role

MOST = 4  # tensors that are named

_DO = {
    "batch": "Give every rank the same whole batch (loaders and generators seeded alike and drawn "
    "from alike, also where one rank alone evaluates); or, where each rank loads samples of its "
    'own, compile with batch="local".',
    "rows": "A step takes each rank's own rows, and ranks that differ along another axis than "
    "those of data have the same: deal out by the place among data ranks, "
    "DistributedSampler(dataset, num_replicas=model.data_world, rank=model.data_rank), which are "
    "program.data_world and program.data_rank(rank) of a program, or take stage.loader(dataset).",
    "piece": "Ranks that are not apart along {axes} are given the same piece: let the sampler deal "
    "out samples by the rank's place on {axes}, not by its number.",
    "parameter": "Load the same weights on all ranks (stage.load_full, stage.load_state_dict), and "
    "let all take the same optimizer steps.",
    "frozen": "Freeze and unfreeze the same parameters on all ranks: call requires_grad_(...) on "
    "every rank, also where one rank alone decides on it.",
    "gradient": "Clear, set and change gradients alike on all ranks: `p.grad = None` or "
    "`p.grad.mul_(...)` behind `if rank == 0` lets each rank train another model.",
    "source": "Load the same weights on all ranks: each takes its piece of the model or state dict "
    "that it is given (stage.load_full, stage.load_state_dict).",
    "buffer": "Load the same buffers on all ranks (stage.load_full, stage.load_state_dict). One "
    "with rows of the batch, as a hidden state, is the same whole of all ranks' rows on each.",
    "outside": "Compute tensors that a loss or a model takes from outside (class weights, masks) "
    "alike on all ranks, of the whole data set; or make them inputs of the step.",
    "optimizer": "Make the optimizer alike on all ranks, and step it and its scheduler alike: a "
    "learning rate that follows a loss takes that of all ranks (stage.eval_step).",
    "write": "Let all ranks write to parameters, gradients and optimizers alike, and none alone, "
    "behind `if rank == 0` or by a number of its own rows: optimizer.step, load_state_dict, "
    "p.grad = None, p.mul_. A script that steps itself, p.data.add_(p.grad, alpha=-lr), takes the "
    "same lr on all ranks.",
    TOGETHER: OF_BESIDE + " Where each rank is to train its own, give it an optimizer of its own.",
    "dataset": OF_ROWS,
    "random": "Call stage.seed with the same numbers on all ranks, and take the same steps on all.",
}


@dataclass(frozen=True)
class Found:
    """One thing that differs: ``odd`` ranks have another one than rank ``usual``.

    ``kind``: input, parameter, frozen, gradient, buffer, source, optimizer, write or random.
    ``values`` of the two, where they say something.
    """

    kind: str
    name: str
    odd: tuple[int, ...]
    usual: int
    values: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.kind == "gradient" and self.values is not None:
            there, here = map(_of_gradient, self.values)
            found = f"{_ranks(self.odd)}: the {self.name} in optimizer.step() {here}"
            return f"{found}, and on rank {self.usual} it {there}"
        if self.kind == "dataset":
            its = "its sampler deals" if len(self.odd) == 1 else "their samplers deal"
            there = f"another order of them, than that of rank {self.usual}"
            return f"{_ranks(self.odd)}: {its} out other rows of the dataset, or {there}"
        outside = ", a tensor that the loss or the model takes from outside," * _is_outside(self)
        known = outside if self.values is None else f" ({self.values[1]}, not {self.values[0]})"
        return f"{_ranks(self.odd)}: another {self.name}{known} than rank {self.usual}"


def disagreement(found: Sequence[Found], role: Role, *, own_rows: bool) -> RunError:
    """The error that every rank raises; ``own_rows``: a step takes each rank's own."""
    more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
    cut = {axis for each in role.batch for axis, *_ in each.cuts}
    axes = " and ".join(axis for axis in role.mesh.names if axis in cut)
    kinds = dict.fromkeys(
        "piece" if (x.kind, bool(cut)) == ("input", True) else x.kind for x in found
    )
    kinds = dict.fromkeys("batch" if kind == "input" else kind for kind in kinds)
    if any(map(_is_outside, found)):
        kinds = {"outside": None, **{kind: None for kind in kinds if kind != "buffer"}}
    if own_rows:
        kinds = dict.fromkeys("rows" if kind in ("batch", "piece") else kind for kind in kinds)
    return RunError(
        where="forward" if role.is_inference else "step",
        what="; ".join(map(str, found[:MOST])) + more,
        why="these have to be alike, or the ranks train on losses that mean nothing",
        do=" ".join(_DO[kind].format(axes=axes) for kind in kinds),
    )


def refused_elsewhere(ranks: Sequence[int]) -> RunError:
    """The error of ranks whose own inputs are right while others were given wrong ones."""
    return RunError(
        where="step",
        what=f"{_ranks(ranks)} refused to begin",
        why="a step is of all ranks together",
        do="Look at what these ranks raised.",
    )


def equal_pieces(ranks: Sequence[int], axes: Sequence[str]) -> str:
    """The warning where ranks with samples of their own were all given the same."""
    along = " and ".join(axes)
    if axes == [ISLAND]:
        return (
            f"step: {_ranks(ranks)} were given the same samples, byte for byte, and each island "
            "trains on batches of its own: islands that see the same train the same. "
            "stage.loader(dataset) gives each island rows of its own; of your own sampler "
            "num_replicas is program.data_world, and rank is program.data_rank(rank)"
        )
    return (
        f"step: {_ranks(ranks)} were given the same samples, byte for byte, and the program takes "
        f'another piece of the batch from each rank along {along} (batch="local"): the loss '
        "counts these samples several times. Is the loader's sampler missing "
        "(torch.utils.data.DistributedSampler; with Accelerate, accelerator.prepare(loader)), "
        'or is the whole batch meant (batch="global")?'
    )


def equal_input(name: str, ranks: Sequence[int], axes: Sequence[str]) -> str:
    """The warning where ranks were given samples of their own, and one input all alike."""
    return (
        f"step: {_ranks(ranks)} were given the same {name}, byte for byte, and other samples. The "
        f"program takes its rows for samples, another piece from each rank along "
        f'{" and ".join(axes)} (batch="local"), so that it has each of them several times. If '
        f"{name} is one table for all ranks, the plan has to say so: "
        f"""plan='preset = "ddp"\\n[inputs]\\n"{name}" = {{}}'"""
    )


def _is_outside(found: Found) -> bool:
    """Whether it is a constant of the program, and no buffer of the model."""
    return found.kind == "buffer" and bool(re.fullmatch(r"constant_\d+", found.name))


def _of_gradient(how: int) -> str:
    """How a gradient was in an optimizer's step, in words."""
    if how <= NONE:
        return "was None" if how == NONE else "was in no step"
    times = f"changed in place {(how - 1) % SET} times"
    return f"was set by the script, and {times}" if how >= SET else f"was {times}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
