"""Optimizers and schedulers as ``prepare`` returns them: those of the script, over a stage."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from partc.errors import RunError
from partc.plan.sharding import dtype_name
from partc.program.stage.runtime import Stage
from partc.wrappers.moved import move
from partc.wrappers.prepared import Prepared

DRAWS = "partc"  # in a state dict: the stage's seed, and how many steps it has taken


class Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer of a model's parameters, which becomes one of the stage's.

    Its state dict is whole, as of the optimizer of one process, with the stage's random numbers.
    """

    owner: Prepared | None = None

    def find(self, models: Iterable[Prepared]) -> None:
        """Follow the one of these models whose parameters the optimizer has; RunError if it has
        those of none.
        """
        if self.owner is not None:
            return
        mine = [id(p) for group in self.param_groups for p in group["params"]]
        for prepared in models:
            if {*mine} & {id(p) for p in prepared.parameters()}:
                self.owner = prepared
                names = {id(p): name for name, p in prepared.module.named_parameters()}
                if prepared._stage is not None:
                    self.move(prepared._stage, names)
                else:
                    prepared._moved.append(self.move)
                return
        if mine and any(True for _ in models):
            raise _of_no_model(self.optimizer, set())

    def move(self, stage: Stage, names: Mapping[int, str]) -> None:
        """Take the stage's parameters in the place of the model's, with their states.

        RunError for a parameter that is none of the model's.
        """
        inner = self.optimizer
        if any(id(p) not in names for group in inner.param_groups for p in group["params"]):
            raise _of_no_model(inner, names)
        move(inner, stage, names)

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters, whole; all ranks call this together."""
        stage = self.owner._stage if self.owner is not None else None
        if stage is None:
            return dict(self.optimizer.state_dict())
        return {**stage.full_optim_state_dict(self.optimizer), DRAWS: list(stage.seeded)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a whole state, of this optimizer or that of one process."""
        owner = self.owner
        seed, steps = state_dict.get(DRAWS, (None, None))
        if owner is not None and seed is not None:
            owner._draws = seed, steps
        state = {name: each for name, each in state_dict.items() if name != DRAWS}
        if owner is None or owner._stage is None:
            self.optimizer.load_state_dict(state)
            return
        owner._stage.load_full_optim_state_dict(self.optimizer, state)
        if owner._draws:
            owner._stage.seed(*owner._draws)


class Scheduler(AcceleratedScheduler):  # type: ignore[misc]
    """Steps ``times`` for every step of the optimizer, as often as a batch has pieces."""

    def __init__(self, made: AcceleratedScheduler, times: int) -> None:
        super().__init__(made.scheduler, made.optimizers, made.step_with_optimizer, True)
        self.times = times if made.step_with_optimizer and not made.split_batches else 1

    def check(self, optimizers: Iterable[Optimizer]) -> None:
        """RunError where the scheduler's optimizer is none of these, which were prepared."""
        own = getattr(self.scheduler, "optimizer", None)
        if own is not None and not any(own is x or own is x.optimizer for x in optimizers):
            raise RunError(
                where=type(self.scheduler).__name__,
                what=f"its optimizer, of class {type(own).__name__}, was not prepared",
                why="it would change the learning rate of an optimizer that trains no stage",
                do="Write model, optimizer, scheduler = accelerator.prepare(model, optimizer, "
                "scheduler), of a scheduler that was made over this optimizer.",
            )

    def step(self, *args: Any, **named: Any) -> None:
        for _ in range(self.times):
            total = getattr(self.scheduler, "total_steps", None)
            if self.times == 1 or total is None or self.scheduler._step_count <= total:
                super().step(*args, **named)


def _of_no_model(optimizer: Any, known: Container[int]) -> RunError:
    """The refusal of an optimizer over parameters of which some are not the model's."""
    each = [p for group in optimizer.param_groups for p in group["params"]]
    stray = [p for p in each if id(p) not in known]
    first = f"{dtype_name(stray[0].dtype)}{list(stray[0].shape)}"
    return RunError(
        where=f"the optimizer {type(optimizer).__name__}",
        what=f"{len(stray)} of its {len(each)} parameters are not the model's, the first {first}",
        why="its parameters become the stage's, by their names in the model: these are of another "
        "model, or of this one before its parameters were replaced",
        do="Make the optimizer over model.parameters() of the model that is prepared with it, "
        "behind what makes or changes the model (from_pretrained, adapters, new layers); each "
        "model has its own.",
    )
