"""State dicts that are of copies: what a script writes into them is loaded, or noticed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import RunError
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo


class Attention(nn.Module):
    """Its first weight has three parts, each of which tp shards by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        each = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in each)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def loss_of(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().mean()


def stage_of(mesh: str, plan: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 6, 16)
    return partc.compile(model, mesh, (x,), loss=loss_of, plan=plan).module(), x


def averaged() -> None:
    """An average of weights, as timm writes it: through the state dicts of both."""
    stage, x = stage_of("tp=2", "megatron")
    mean = copy.deepcopy(stage)
    before = mean.full_state_dict()
    with torch.no_grad():
        for its, now in zip(mean.state_dict().values(), stage.state_dict().values(), strict=True):
            its.copy_(0.5 * its + now)
    for use in (mean.state_dict, mean.full_state_dict, lambda: mean.eval_step(x)):
        with pytest.raises(RunError, match=r"state_dict\(\)\['qkv.weight'\]: copy_ has written"):
            use()
    stage.step(x)  # what was read alone goes on
    with torch.no_grad():
        mean.load_full({name: 1.5 * tensor for name, tensor in before.items()})
        state = mean.state_dict()
        for tensor in state.values():
            tensor.mul_(2.0)
        mean.load_state_dict(state)
    for name, tensor in mean.full_state_dict().items():
        torch.testing.assert_close(tensor, 3 * before[name])


def test_an_average_through_state_dicts_is_noticed(world: Processes) -> None:
    world.run(averaged, num=2)


def written() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 16)
    model = partc.parallelize(Attention(), "dp=2", loss=loss_of, plan="fsdp", batch="global")
    model.step(x)
    before, state = model.full_state_dict(), model.state_dict()
    with torch.no_grad():
        state["out.weight"].view(-1)[0] = 7.0
        state["out.bias"] += 1.0
    with pytest.raises(RunError, match=r"state_dict\(\)\['out.weight'\]: __setitem__ has"):
        model.step(x)
    model.load_state_dict(state)
    model.step(x)
    after = model.full_state_dict()
    assert after["out.weight"].view(-1)[0] == 7.0
    torch.testing.assert_close(after["out.bias"], before["out.bias"] + 1.0)
    assert type(copy.deepcopy(state["out.bias"])) is Tensor
    assert type(state["out.bias"] * 2) is Tensor


def test_what_is_written_is_loaded_or_noticed(world: Processes) -> None:
    world.run(written, num=2)
