"""What a script keeps beside its stage, as a scheduler: its state in a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch.distributed as dist

from partc.errors import UsageError
from partc.program.checkpoints.plain_states import plain, value_of
from partc.program.checkpoints.saved_checkpoint import Saved, refuse
from partc.program.model.habits import LOG
from partc.wrong_calls import did_you_mean, quoted


def check_states(call: str, states: object) -> Mapping[str, Any]:
    """The named objects; UsageError unless each can give its state and take it."""
    if states is None:
        return {}
    if not isinstance(states, Mapping) or not all(isinstance(name, str) for name in states):
        raise UsageError(
            where=f"{call}(states=...)", what=f"it is {quoted(states)}",
            why="each state is kept under a name",
            do='Pass a dict: states={"scheduler": scheduler}.',
        )  # fmt: skip
    for name, each in states.items():
        if isinstance(each, type) or not _has_state(each):
            raise UsageError(
                where=f"{call}(states=...)", what=f"{name!r} is {quoted(each)}",
                why="it has no state_dict() and load_state_dict(state)",
                do="Pass a learning rate scheduler, a GradScaler, or an object of yours with them.",
            )  # fmt: skip
    return states


def states_of(states: Mapping[str, Any]) -> dict[str, Any]:
    """The states of objects as JSON has them; RunError for what is no plain value, by name."""
    return {name: plain(each.state_dict(), f"states[{name!r}]") for name, each in states.items()}


def load_states(saved: Saved, states: Mapping[str, Any]) -> None:
    """Give objects the states that were saved under their names, all of them or none.

    LoadError for a name that was not saved, or a state that the object refuses. A warning on the
    first rank for a state that nobody takes.
    """
    lacking = sorted(states.keys() - saved.states.keys())
    left = sorted(saved.states.keys() - states.keys())
    if lacking:
        refuse(saved.path, f"it was saved without a state of {lacking[0]!r}", _meant(lacking, left))
    if left and dist.get_rank() == 0:
        LOG.warning(
            "partc: %s has the state of %s, which nobody takes: that begins anew. Pass "
            "states={%r: ...} to go on with it.", saved.path, ", ".join(left), left[0],
        )  # fmt: skip
    before = {name: deepcopy(each.state_dict()) for name, each in states.items()}
    for name, each in states.items():
        try:
            each.load_state_dict(value_of(saved.states[name]))
        except Exception as error:  # an object of the user's own may raise anything
            for known, old in before.items():
                states[known].load_state_dict(old)
            refuse(
                saved.path, f"{type(each).__name__} {name!r} does not take its state: {error!r}",
                "Load into an object that was made as the saved one.",
            )  # fmt: skip


# inside --------------------------------------------------------------------------------------
def _meant(lacking: Sequence[str], left: Sequence[str]) -> str:
    """What to do about names that were not saved, where ``left`` are those that nobody takes."""
    if not left:
        return "Leave it out of states=, or load a step that has it: save(..., states={...})."
    near = did_you_mean(lacking[0], left)
    said = f"It has {', '.join(map(repr, left))}: pass states={{{left[0]!r}: ...}}."
    return f"{near} Pass it under the name that was saved." if near else said


def _has_state(each: object) -> bool:
    return all(callable(getattr(each, name, None)) for name in ("state_dict", "load_state_dict"))
