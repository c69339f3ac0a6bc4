"""Ops of torch on a stage's tensors give one device's numbers, and what they write arrives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import vector_to_parameters

from partc.errors import RunError
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.example_program import example_batch, example_model, example_program
from tests.program.training import batch_of, model_of, save_program, stage_of

pytestmark = pytest.mark.gloo
Op = Callable[[Any], Any]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "sharded"
    return save_program(path, "dp=2", "fsdp")


@pytest.fixture(scope="module")
def sharded_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "sharded-twice"
    return save_program(path, "dp=2,tp=2", "fsdp+megatron")


def counted(like: Tensor) -> Tensor:
    """A whole plain tensor, the same on all ranks."""
    return torch.arange(like.numel(), dtype=like.dtype).view(like.shape)


def seeded(op: Op) -> Op:
    def run(x: Tensor) -> Any:
        torch.manual_seed(3)
        return op(x)

    return run


ROWS = torch.tensor([1, 5, 2])
READS: dict[str, Op] = {
    "norm": lambda x: x.norm().item(),
    "sum": lambda x: float(x.sum()),
    "mean": lambda x: int(x.mean() * 1e6),
    "largest": lambda x: x.abs().max().item(),
    "count": lambda x: torch.count_nonzero(x > 0).item(),
    "branch": lambda x: "large" if (x > 0.3).any() else "small",
    "compared": lambda x: max(x.norm(), x.abs().sum()).item(),
    "text": lambda x: f"{x.norm():.6f}",
    "row": lambda x: x[3].sum().item(),
    "element": lambda x: x.view(-1)[7].item(),
    "columns": lambda x: x.mean(0),
    "sorted": lambda x: x.flatten().sort()[0].tolist(),
    "histogram": lambda x: torch.histc(x, 10),
    "quantile": lambda x: torch.quantile(x, 0.3),
    "masked": lambda x: x[x > 0.1],
    "with a whole": lambda x: x + counted(x),
    "equal": lambda x: (torch.equal(x, x.clone()), torch.equal(x, x * 2), torch.allclose(x, x)),
    "inference": torch.inference_mode()(lambda x: x[3].sum().item() + x.norm().item()),
    "copied row": lambda x: copy.deepcopy(x.detach()[3]),
    "array": lambda x: x.detach().numpy().tolist(),
    "a view, later": lambda x: (x[3], x.mul_(2))[0].sum().item(),
}
WRITES: dict[str, Op] = {
    "row": lambda x: x[3].zero_(),
    "rows": lambda x: x[5:7].mul_(2),
    "element": lambda x: x.__setitem__((0,) * x.dim(), 5.0),
    "row set": lambda x: x.__setitem__(3, 0.0),
    "narrow": lambda x: x.narrow(0, 2, 5).add_(1),
    "chunk": lambda x: x.chunk(2)[1].zero_(),
    "flat": lambda x: x.view(-1)[3:9].zero_(),
    "diagonal": lambda x: x[:, : x.shape[1]].diagonal().zero_(),
    "of data": lambda x: x.data[2].zero_(),
    "transposed": lambda x: x.t()[2].zero_(),
    "column": lambda x: x.__setitem__((slice(None), 2), 0.05),
    "masked": lambda x: x.__setitem__(x.abs() < 0.1, 0),
    "filled": lambda x: x.masked_fill_(counted(x) % 3 == 0, 0.7),
    "indexed": lambda x: x.index_fill_(0, ROWS, 0.0),
    "lists": lambda x: torch._foreach_copy_([x], [counted(x)]),
    "views in lists": lambda x: torch._foreach_mul_(list(x.chunk(3)), 2.0),
    "whole": lambda x: x.copy_(counted(x)),
    "a number": lambda x: x.fill_(torch.tensor(3.0)),
    "averaged": lambda x: x.copy_(counted(x).lerp_(x, 0.5)),
    "centred": lambda x: x.sub_(x.mean(-1, keepdim=True)),
    "unfinished": lambda x: x.copy_(x * x.sum(0, keepdim=True).add_(1)),
    "eye": lambda x: nn.init.eye_(x),
    "out": lambda x: torch.mul(x.clone(), 2, out=x),
    "drawn": seeded(lambda x: nn.init.normal_(x)),
    "orthogonal": seeded(lambda x: nn.init.orthogonal_(x)),
    "noise": seeded(lambda x: x.add_(torch.randn_like(x))),
    "assigned": lambda x: setattr(x, "data", x * 0.5),
    "of a vector": lambda x: vector_to_parameters(counted(x).view(-1), [x]),
}


def pairs(path: Path) -> Iterator[tuple[Stage, nn.Module, str]]:
    """A stage, its model, and a matrix: sharded by rows, or each of its two parts by itself."""
    stage, model = stage_of(path), model_of()
    stage.step(*batch_of())
    yield stage.double(), model.double(), "blocks.0.up.weight"
    stage, other = example_program(1, 2).module(), example_model()
    stage.load_full(other)
    stage.step(*example_batch())
    yield stage.double(), other.double(), "up.weight"


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def compared(path: Path) -> None:
    for stage, model, name in pairs(path):
        param, theirs = stage.get_parameter(name), model.get_parameter(name)
        assert param.grad is not None
        begin, piece = theirs.detach().clone(), stage.pieces()[name][1]
        for ours in (param, param.grad):
            for ops in (READS, WRITES):
                for why, op in ops.items():
                    theirs.copy_(begin)
                    ours.copy_(begin)
                    found, expected = whole(op(ours)), op(theirs)
                    if isinstance(expected, str):
                        assert found == expected
                    elif ops is READS:
                        torch.testing.assert_close(found, expected, msg=f"{why} of {name}")
                    after = whole(ours), theirs.detach()
                    torch.testing.assert_close(*after, msg=f"{why} of {name}")
        assert isinstance(param, DTensor)
        assert torch.equal(piece, param.to_local())


@pytest.mark.exhaustive
def test_reads_and_writes_are_those_of_one_device(world: Processes, sharded: Path) -> None:
    world.run(compared, sharded, num=2)


HALF: dict[str, Op] = {
    "gram": lambda x: x @ x.T,
    "other gram": lambda x: x.T @ x,
    "product": lambda x: torch.addmm(x.T @ x, x.T, x, beta=0.5, alpha=2.0),
    "norm": lambda x: x.norm(),
    "norm, rounded": lambda x: torch.linalg.vector_norm(x.float(), dtype=torch.float32).bfloat16(),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "columns": lambda x: x.sum(0),
    "number": lambda x: x.sum().item(),
}


@torch.no_grad()
def in_half_precision(path: Path) -> None:
    for stage, model, name in pairs(path):
        for dtype in (torch.bfloat16, torch.float16):
            ours, theirs = (m.get_parameter(name).to(dtype) for m in (stage, model))
            for why, op in HALF.items():
                found, expected = whole(op(ours)), op(theirs)
                if isinstance(found, Tensor):
                    assert found.dtype == expected.dtype, why
                torch.testing.assert_close(found, expected, msg=why, rtol=1e-5, atol=0)
        optimizers, names = [], [n for n, p in model.named_parameters() if p.dim() == 2]
        for module in (stage, model):
            for each in names:
                grad = module.get_parameter(each) * 0.3 + 0.1
                module.get_parameter(each).grad = grad.sin()
            optimizers.append(torch.optim.Muon([module.get_parameter(n) for n in names], lr=0.1))
            optimizers[-1].step()
        for each in names:
            found, expected = (whole(m.get_parameter(each)).detach() for m in (stage, model))
            torch.testing.assert_close(found, expected, msg=f"Muon on {each}")


@pytest.mark.exhaustive
def test_half_precision_is_rounded_as_on_one_device(world: Processes, sharded: Path) -> None:
    world.run(in_half_precision, sharded, num=2)


@torch.no_grad()
def refused(path: Path) -> None:
    stage = stage_of(path)
    param = stage.get_parameter("blocks.0.up.weight")
    before = whole(param).clone()
    other = torch.full(param.shape, float(dist.get_rank()))
    uses: dict[str, Callable[[], object]] = {
        "plain tensor beside it is not the same on all ranks": lambda: param.add_(other),
        "changes the shape of a tensor in place": lambda: torch.eye(3, out=param),
        "eye.out changes": lambda: torch.eye(3, out=param.detach()),
        "t_.default changes": lambda: param.t_(),
        r"data: was assigned torch.float32\[3\]": lambda: setattr(param, "data", param[0, :3]),
    }
    for why, use in uses.items():
        with pytest.raises(RunError, match=why):
            use()
    assert torch.equal(whole(param), before)
    for name in ("row", "flat", "masked", "noise"):  # over two mesh axes
        param.copy_(before)
        WRITES[name](param)
        WRITES[name](expected := before.clone())
        torch.testing.assert_close(whole(param), expected, msg=name)
    assigned = before * 2
    param.data = assigned
    stage.step(*batch_of())
    assigned.zero_()  # which does not reach the ranks' pieces
    with pytest.raises(RunError, match="was assigned a tensor that was changed since"):
        stage.step(*batch_of())


@pytest.mark.exhaustive
def test_what_would_damage_or_part_is_refused(world: Processes, sharded_twice: Path) -> None:
    world.run(refused, sharded_twice)


# the gradients of a script's own terms -------------------------------------------------------
PENALTIES: dict[str, Op] = {
    "L1": lambda w: w.abs().sum(),
    "rows": lambda w: w.norm(dim=1).sum(),
    "columns": lambda w: w.square().mean(0).sqrt().sum(),
    "some": lambda w: w[3:9].square().sum(),
    "orthogonal": lambda w: (w.T @ w - torch.eye(w.shape[1], dtype=w.dtype)).square().sum(),
}


def penalized(path: Path) -> None:
    for stage, model, name in pairs(path):
        ours, theirs = stage.get_parameter(name), model.get_parameter(name)
        with torch.no_grad():
            ours.copy_(theirs)
        for why, penalty in PENALTIES.items():
            for param in (ours, theirs):
                param.grad = None
                penalty(param).backward()
                penalty(param).backward()  # adds to what is there
            torch.testing.assert_close(whole(ours.grad), theirs.grad, msg=f"{why} of {name}")
            piece = stage.pieces()[name][1].grad
            assert isinstance(ours.grad, DTensor)
            assert piece is not None
            assert torch.equal(piece, ours.grad.to_local())


def test_penalties_of_weights_have_their_gradients(world: Processes, sharded: Path) -> None:
    world.run(penalized, sharded, num=2)
