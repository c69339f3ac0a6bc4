"""Stand-ins for torch.distributed refuse what c10d refuses, and take what it takes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from partc.audit.following_dist import FollowingDist
from partc.audit.recording import RecordingDist
from partc.dryrun.alone import LoneDist
from partc.dryrun.as_c10d_takes import KINDS, as_c10d_takes
from partc.verification.threads import ThreadDist

STAND_INS = (LoneDist, RecordingDist, FollowingDist, ThreadDist)


@as_c10d_takes
class OfAny:
    def all_reduce(
        self, tensor: Any, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> str:
        return "taken"

    def irecv(self, tensor: Any, src: Any = None, group: Any = None, tag: Any = 0) -> str:
        return "taken"


@pytest.mark.parametrize(("name", "option", "value"), [
    ("async_op", "asyncOp", len), ("async_op", "asyncOp", "yes"),
    ("op", "reduceOp", "sum"), ("op", "reduceOp", len), ("op", "reduceOp", None),
])  # fmt: skip
def test_a_sum_of_the_wrong_kind_is_refused(name: str, option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"all_reduce takes no {name}="):
        OfAny().all_reduce(torch.zeros(1), **{name: value})
    with pytest.raises(TypeError):  # so does what c10d puts its arguments into
        setattr(c10d.AllreduceOptions(), option, value)


def test_what_c10d_takes_is_taken() -> None:
    assert OfAny().all_reduce(torch.zeros(1), c10d.ReduceOp.MAX, async_op=True) == "taken"
    assert OfAny().all_reduce(torch.zeros(1), async_op=1) == "taken"  # type: ignore[arg-type]
    assert OfAny().irecv(torch.zeros(1), 1, tag=3) == "taken"
    with pytest.raises(TypeError, match="irecv takes no tag="):
        OfAny().irecv(torch.zeros(1), 1, tag=None)


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_every_argument_but_the_group_has_kinds(stand_in: type) -> None:
    """A method that is added later checks its arguments too, or its names are told here."""
    splits = {"output_split_sizes", "input_split_sizes"}  # refused unless they are None
    for name in ("all_reduce", "all_gather_single", "all_to_all_single", "isend", "irecv"):
        method = getattr(stand_in, name)
        assert hasattr(method, "__wrapped__"), name
        taken = set(inspect.signature(method).parameters) - {"self", "group"} - splits
        assert taken <= KINDS.keys(), name
