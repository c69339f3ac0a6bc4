"""What scripts do around a step out of habit, and wait for in vain: told once in a process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from partc.plan import Plan
from partc.trace.input_grads import BY_INPUTS
from partc.trace.record import Kind
from partc.users_line import warn

LOG = logging.getLogger("partc")
TOLD: set[str] = set()  # of what this process was told already


def once(what: str) -> bool:
    """Whether this process is told of something for the first time."""
    new = what not in TOLD
    TOLD.add(what)
    return new


def tell_first(text: str, *values: object) -> None:
    """Tell the user, on the first rank; others tell those who listen."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    LOG.log(logging.WARNING if first else logging.DEBUG, text, *values)


@contextmanager
def without_inference() -> Iterator[None]:
    """Run a step outside of ``torch.inference_mode()``, whose gradients nothing could be added to;
    whether gradients are kept stays as it is.
    """
    keeps = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(keeps):
        yield


def tell_of_input_grads(
    plan: Plan, kind: Kind, names: Sequence[str], inputs: Sequence[Tensor]
) -> None:
    """Warn where an input waits for a gradient, unless the step itself takes derivatives by it."""
    waits = [i for i, x in enumerate(inputs) if x.requires_grad and kind == "step"]
    if not waits or BY_INPUTS in plan.notes or not once("input grads"):
        return
    name = names[waits[0]] if waits[0] < len(names) else "x"
    if inputs[waits[0]].is_leaf:
        begins = f"the input {name} has requires_grad, and {name}.grad stays as it is"
        do = f"begin the loss that is compiled with {name} = {name}.detach().requires_grad_(), and "
        do += (
            f"let it return torch.autograd.grad(loss, {name}, retain_graph=True)[0] beside the loss"
        )
    else:
        begins = f"the input {name} was computed by what has requires_grad, and gets no gradient"
        do = "let the model that is compiled compute it, too"
    warn(
        f"partc: {begins}: a step gives the gradients of its own parameters. Where it is needed "
        f"{do}; else pass {name}.detach()"
    )  # fmt: skip


def tell_of_no_grad(*, trains: bool) -> None:
    """Tell who calls a model in train mode under ``torch.no_grad()``: its loss has no backward."""
    if trains and not torch.is_grad_enabled() and once("results under no_grad"):
        tell_first(
            "partc: the model is called in train mode under torch.no_grad(), so that a loss of its "
            "results has no backward. To train call it outside of that; to evaluate call "
            "model.eval() before."
        )


class Reseeded:
    """Notices that a script seeds torch's generator between steps, whose draws do not follow it."""

    def __init__(self) -> None:
        self._seeds: tuple[int, int] | None = None  # torch's, and the stage's
        self._was_fresh, self._fresh = False, torch.empty(0, dtype=torch.uint8)

    def look(self, seed: int, *, trains: bool) -> None:
        """Look before a step that draws; ``seed``: the stage's. Evaluations may be seeded."""
        if "seed" in TOLD or not trains:
            return
        before, self._seeds = self._seeds, (torch.initial_seed(), seed)
        if before is None or before[0] != self._seeds[0]:
            self._fresh = torch.Generator().manual_seed(self._seeds[0]).get_state()
        was_fresh, self._was_fresh = self._was_fresh, self._is_fresh()
        if before is None or before[1] != seed:
            return  # the first step, or the stage was seeded as well
        again = before[0] != self._seeds[0] or (self._was_fresh and not was_fresh)
        if again and once("seed"):
            LOG.warning(
                "partc: torch's generator was seeded between two steps, whose own draws (dropout) "
                "do not follow it: stage.seed(seed) sets them, alike on all ranks"
            )

    def _is_fresh(self) -> bool:
        """Whether nothing was drawn since the generator was seeded."""
        return torch.equal(torch.get_rng_state(), self._fresh)
