"""What choices write into a plan reads back, and is refused by name where it means nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.errors import PlanError, UsageError
from partc.given_plan import backend_at_hand
from partc.plan import Plan
from partc.plan.decided import check_decided
from partc.plan.mesh import Mesh

DECIDED = """\
microbatches = 1
batch_norm = "global"
recompute = "cheap"
bucket_mb = 0.1234567
backend = "nccl"
schedule = "auto"
order = \"\"\"
0F0,0B0
1F0,1B0
\"\"\"
overlap_pieces = 2
virtual_stages = 1
hierarchical = { dp_shard = { dp_replicate = 0.25 } }
bucket_copy_mb = { dp = { all_gather = 0.3, reduce_scatter = 0 } }
grad_parts = { dp = 2 }
flops_per_byte = { memory = 60, dp = 900.5 }
early_sums = []
sends = { forward = 1, backward = [1, 2, 0] }
"""


def test_what_is_decided_reads_back() -> None:
    plan = Plan.parse(DECIDED)
    assert str(plan) == DECIDED
    assert plan.early_sums == ()
    assert plan.says("early_sums")
    assert not Plan().says("early_sums")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hierarchical = { dp = 1 }", "a table of megabytes for each axis"),
        ("hierarchical = { dp = { tp = inf } }", "a table of megabytes"),
        ("bucket_copy_mb = { dp = { broadcast = 1 } }", "transfers are all_gather"),
        ("grad_parts = { dp = 0 }", "a number from 1 per axis"),
        ('flops_per_byte = { dp = "1" }', "a number of FLOPs"),
        ("early_sums = [true]", "a list of stages"),
        ("sends = { up = 1 }", "forward and backward"),
        ("sends = { forward = [1, -1] }", "a number of messages"),
        ('backend = "mpi"', "one of 'gloo', 'nccl'"),
        ("join_mb = 25", "it is called 'bucket_mb'"),
        ("pieces = 2", "it is called 'overlap_pieces'"),
        ("chunks = 2", "it is called 'virtual_stages'"),
    ],
)
def test_what_means_nothing_is_refused(line: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan.parse(f'preset = "fsdp"\n{line}\n')


def test_axes_and_backends_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="there is no axis 'dp'"):
        check_decided(Plan(grad_parts={"dp": 2}), Mesh.of("dp_shard=2"))
    with pytest.raises(PlanError, match="messages = true, and the backend is nccl"):
        check_decided(Plan(messages=True, backend="nccl"), Mesh.of("dp=2"))


def test_an_old_argument_is_refused_with_the_new_one() -> None:
    with pytest.raises(UsageError, match="It is called 'virtual_stages'"):
        compile(None, "pp=2", chunks=2)  # type: ignore[call-arg, arg-type]


def test_another_order_drops_what_was_decided_for_the_one_before() -> None:
    plan = Plan.parse(DECIDED)
    assert plan.replanned(microbatches=1).order
    for change in ({"microbatches": 2}, {"stages": ("layers.1",)}, {"schedule": "1f1b"}):
        other = plan.replanned(**change)
        assert (other.order, other.sends, other.early_sums) == ("", None, None)


def test_without_a_machine_the_devices_of_a_script_tell_the_backend() -> None:
    model = nn.Linear(2, 2)
    assert backend_at_hand(model, "dp=2") == ""  # no process group: nothing tells
    assert backend_at_hand(model, SimpleNamespace(device_type="cuda")) == "nccl"
    made = compile(
        model, "dp=2", (torch.randn(4, 2),), loss=summed, plan='preset = "ddp"\nbackend = "nccl"'
    )
    assert Plan.parse(made.plan).backend == "nccl"
    made = compile(model, "dp=2", (torch.randn(4, 2),), loss=summed, plan="ddp")
    assert Plan.parse(made.plan).backend == "gloo"


def summed(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    return loss
