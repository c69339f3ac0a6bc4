"""Look at each step before the optimizer takes it: NaN, infinity, a loss that jumps."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.errors import RunError, UsageError
from partc.failures.first_bad import has_nan, is_finite, numbers, search
from partc.program.checkpoints.checkpoint_call import stage_of
from partc.program.checkpoints.checkpoints import Checkpoints
from partc.program.model.habits import LOG
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.ranks.together import Together
from partc.program.stage.runtime import Stage
from partc.wrong_calls import check_whole_number, known_arguments, quoted

RULES = ("raise", "skip", "rollback")
_OF_GRADIENTS = 2  # what is bad is known by its gradient alone
_ASK = "pass the batch, guard.passes(step, loss, *batch), and what is not finite first is named"
FIRST_CALLS = 3  # before which ranks are asked whether all of them make it
FEWEST = 10  # accepted losses before one can be a spike
Spike = float | Callable[[float, Sequence[float]], bool]
Optimizer = torch.optim.Optimizer


class StepGuard:
    """Says of each step whether the optimizer may take it; all ranks are told the same.

    Between a step and the optimizer's, ``passes`` looks at the loss and at this rank's gradients,
    and asks the other ranks by one all_reduce of two numbers. A bad step is told of by name: the
    step, the rank, and the first module whose result is not finite, for which the step is run once
    more. Then its gradients are dropped, and what it has written to buffers is undone.

    Args:
        stage: what ``Program.module()`` gave, or ``parallelize``.
        nonfinite: what follows where the loss or a gradient is NaN or infinite: ``"raise"``;
            ``"skip"`` this step; or ``"rollback"`` to the newest step of ``checkpoints``, from
            where the run goes on with the data that come next.
        spike: a loss is a spike if it is above so many medians of the last ``window`` accepted
            losses; or a function of a loss and those, oldest first, that says whether it is. None
            looks for none.
        on_spike: what follows then: one of the same words.
        window: of how many accepted losses the median is.
        in_a_row: so many bad steps behind each other raise in any case.
        checkpoints, optimizer, states: what a rollback loads, as ``Checkpoints.load_latest``.

    Example::

        guard = partc.StepGuard(stage, spike=3.0)
        for step, batch in enumerate(loader, start + 1):
            loss = stage.step(*batch)
            if guard.passes(step, loss, *batch):
                optimizer.step()
            optimizer.zero_grad()
    """

    @known_arguments
    def __init__(
        self, stage: nn.Module, *, nonfinite: str = "skip", spike: Spike | None = None,
        on_spike: str = "skip", window: int = 50, in_a_row: int = 5,
        checkpoints: Checkpoints | None = None, optimizer: Optimizer | None = None,
        states: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        _check_rules(nonfinite, on_spike, checkpoints)
        _check_spike(spike)
        self.rules = {"nonfinite": nonfinite, "spike": on_spike}
        self.spike, self.in_a_row = (
            spike,
            check_whole_number(in_a_row, "StepGuard(in_a_row=...)", 1),
        )
        check_whole_number(window, "StepGuard(window=...)", FEWEST)
        self.losses = deque[float](maxlen=window)
        self.told: list[str] = []  # of each bad step, on every rank
        self._stage, self._bad_in_a_row = stage, 0
        self._load = (checkpoints, optimizer, states)
        self._buffers: dict[str, Tensor] = {}
        if isinstance(stage, Stage):
            self._keep_buffers(_allowed(stage))

    @of_other_ranks("StepGuard.passes")
    def passes(self, step: int, loss: Tensor, *batch: Any, **named: Any) -> bool:
        """Whether the optimizer may take the step; all ranks call this together.

        Args:
            step: its number, to name it.
            loss: ``f32[]``, as the step gave it.
            batch: what the step was given, by which the first bad module is found. Without it a
                parameter whose gradient is not finite is named.
            named: those that the step was given by name.

        Returns:
            True where nothing is wrong. False where the gradients were dropped.

        Raises:
            RunError: on all ranks, by the rule ``"raise"``, behind too many bad steps in a row, or
                where there is no step to go back to.
        """
        stage = _allowed(stage_of("StepGuard.passes", self._stage))
        stage.check_together("StepGuard.passes", FIRST_CALLS)
        check_whole_number(step, "StepGuard.passes(step)")
        value = float(_number(loss))
        kind = self._judged(stage, value)
        if kind is None:
            self._bad_in_a_row = 0
            self.losses.append(value)
            self._keep_buffers(stage)
            return True
        what = f"the loss is {value:.6g}" + (
            f", beside a median of {median(self.losses):.6g}" if kind == "spike" else ""
        )
        why = "" if kind == "spike" else self._origin(stage, batch, named)
        self._drop(stage)
        self._act(kind, step, what, why)
        return False

    # inside ----------------------------------------------------------------------------------
    def _judged(self, stage: Stage, loss: float) -> str | None:
        """What is wrong with a step on any rank; the same answer on all."""
        largest = torch.nn.utils.get_total_norm(_gradients(stage).values(), math.inf)
        finite = largest.isfinite().to(stage.device) & math.isfinite(loss)
        spike = math.isfinite(loss) and self._is_spike(loss)
        flags = torch.stack([~finite, torch.tensor(spike, device=stage.device)]).int()
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        is_bad, is_spike = flags.tolist()
        return "nonfinite" if is_bad else "spike" if is_spike else None

    def _is_spike(self, loss: float) -> bool:
        if self.spike is None or len(self.losses) < FEWEST:
            return False
        if callable(self.spike):
            return bool(self.spike(loss, tuple(self.losses)))
        middle = median(self.losses)
        return loss > middle + (self.spike - 1) * abs(middle)

    def _origin(self, stage: Stage, batch: Sequence[Any], named: Mapping[str, Any]) -> str:
        """Where the first bad number comes from, of all ranks; the same text on all."""
        mine = self._own_origin(stage, batch, named)
        ranks = Together("StepGuard.passes", stage.device, RunError)
        each = [
            (*found, rank) for rank, found in enumerate(ranks.exchange(mine)) if found is not None
        ]
        if not each and not (batch or named):
            return _ASK
        if not each:
            return "it was finite when it was computed again"
        level, _, text, rank = min(each)
        ask = f"; {_ASK}" if level == _OF_GRADIENTS and not (batch or named) else ""
        return f"rank {rank}: {text}{ask}"

    def _own_origin(
        self, stage: Stage, batch: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[int, int, str] | None:
        """What this rank can say, and how much that explains: the smallest numbers the most."""
        gradient = next((n for n, x in _gradients(stage).items() if not is_finite(x)), None)
        self._drop(stage)
        found = self._again(stage, batch, named) if batch or named else None
        before = _bad_before(stage, (batch, named))
        if before is not None:
            return (0, 0, f"{before} itself is not finite")
        if found is not None:
            return (1, found.order, found.text)
        return (
            None
            if gradient is None
            else (_OF_GRADIENTS, 0, f"the gradient of {gradient} is not finite")
        )

    def _again(self, stage: Stage, batch: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run the step once more with the same random numbers; where it goes wrong on this rank."""
        seed, taken = stage.seeded
        stage.seed(seed, taken - 1)
        try:
            return search(stage, lambda: stage.step(*batch, **dict(named)))
        finally:
            stage.seed(seed, taken)
            self._drop(stage)

    def _drop(self, stage: Stage) -> None:
        """Undo what the step has done: gradients, and what it wrote to buffers."""
        stage.zero_grad()
        with torch.no_grad():
            for name, buffer in _buffers(stage).items():
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])

    def _keep_buffers(self, stage: Stage) -> None:
        """Copy the buffers as they are behind a good step: no count tells which of them it wrote,
        as batch norms do so inside of a kernel.
        """
        for name, buffer in _buffers(stage).items():
            if name in self._buffers:
                self._buffers[name].copy_(buffer)
            else:
                self._buffers[name] = buffer.clone()

    def _act(self, kind: str, step: int, what: str, why: str) -> None:
        rule = self.rules[kind]
        self._bad_in_a_row += 1
        text = f"step {step}: {what}" + (f"; {why}" if why else "")
        self.told.append(text)
        if rule == "raise":
            _raise(text, "its gradients are dropped, and parameters are as they were")
        if self._bad_in_a_row >= self.in_a_row:
            _raise(text, f"it is the bad step number {self._bad_in_a_row} in a row")
        done = "the optimizer does not take it"
        if rule == "rollback":
            done = f"the run goes on from step {self._roll_back(text)}, with the data that follow"
        if dist.get_rank() == 0:
            LOG.warning("partc: %s. %s.", text, done.capitalize())

    def _roll_back(self, text: str) -> int:
        checkpoints, optimizer, states = self._load
        assert checkpoints is not None
        found = checkpoints.roll_back(stage_of("StepGuard", self._stage), optimizer, states=states)
        if found is None:
            _raise(text, "there is no saved step to go back to")
        self._buffers = {}
        self._keep_buffers(stage_of("StepGuard", self._stage))
        return found


def _gradients(stage: Stage) -> dict[str, Tensor]:
    """This rank's pieces of gradients, by the parameter's name."""
    found = {}
    for name, param in stage.named_parameters():
        grad: Any = param.grad
        if grad is not None:
            found[name] = grad.to_local() if hasattr(grad, "to_local") else grad
    return found


def _buffers(stage: Stage) -> dict[str, Tensor]:
    """This rank's pieces of buffers, by name."""
    pieces = {name: piece for name, (_, piece) in stage.pieces().items()}
    return {n: x.detach() for n, x in pieces.items() if not isinstance(x, nn.Parameter)}


def _bad_before(stage: Stage, batch: Any) -> str | None:
    """What was not finite before the step began. Infinity may be meant, but in a parameter."""
    for name, (_, piece) in stage.pieces().items():
        x = piece.detach()
        if isinstance(piece, nn.Parameter) and not is_finite(x):
            return name
        if has_nan(numbers(x)):
            return name
    return "the batch" if has_nan(numbers(batch)) else None


def _allowed(stage: Any) -> Stage:
    """The stage; UsageError for one whose steps change more than gradients and buffers."""
    if not isinstance(stage, Stage):
        raise UsageError(
            where="StepGuard", what=f"the stage is {quoted(stage)}",
            why="it looks at the gradients that this rank has",
            do="Pass what program.module() gave.",
        )  # fmt: skip
    if stage.islands or stage.owners or stage.is_served:
        raise UsageError(
            where="StepGuard", what="the program has islands, or servers",
            why="their steps send and change parameters before the optimizer's step",
            do="Look at the loss yourself, and go back to a checkpoint where it is not finite.",
        )  # fmt: skip
    return stage


def _number(loss: Any) -> Any:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach()
    raise UsageError(
        where="StepGuard.passes(loss)", what=f"it is {quoted(loss)}", why="a loss is one number",
        do="Pass what stage.step(...) returned; of (loss, extras) the first.",
    )  # fmt: skip


def _check_rules(nonfinite: str, on_spike: str, checkpoints: object) -> None:
    for name, rule in (("nonfinite", nonfinite), ("on_spike", on_spike)):
        if rule not in RULES:
            raise UsageError(
                where=f"StepGuard({name}=...)", what=f"it is {quoted(rule)}",
                why="it says what follows on a bad step",
                do=f"Pass one of {json.dumps(RULES)}.",
            )  # fmt: skip
        if rule == "rollback" and not isinstance(checkpoints, Checkpoints):
            raise UsageError(
                where=f'StepGuard({name}="rollback")', what="it has no checkpoints",
                why="it goes back to the newest saved step",
                do="Pass checkpoints=, the partc.Checkpoints of the run, and optimizer=.",
            )  # fmt: skip


def _check_spike(spike: object) -> None:
    is_factor = isinstance(spike, int | float) and not isinstance(spike, bool) and spike > 1
    if spike is not None and not callable(spike) and not is_factor:
        raise UsageError(
            where="StepGuard(spike=...)", what=f"it is {quoted(spike)}",
            why="a loss is compared with so many medians of those before",
            do="Pass a number above 1, a function of (loss, losses), or None.",
        )  # fmt: skip


def _raise(text: str, why: str) -> NoReturn:
    raise RunError(
        where="StepGuard", what=text, why=why,
        do="Mend the module or the batch; lower the learning rate; or go on from a checkpoint.",
    )  # fmt: skip
