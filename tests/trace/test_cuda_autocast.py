"""``torch.autocast("cuda")`` without a GPU: recorded as a GPU would cast, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import partc
from partc.errors import TraceError
from partc.graph import fake_of, op_word
from partc.lowering import trace
from partc.trace import cuda_autocast as casts

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.softmax(self.up(self.norm(x)), -1))
        return x + y


def batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def dtypes(loss: Callable[..., Tensor], word: str) -> set[torch.dtype]:
    """The dtypes in which a step of Small computes the calls of an op."""
    graph = trace(Small(), (batch(),), loss)
    return {fake_of(n).dtype for n in graph.calls() if op_word(n.target) == word}


class Checkpointed(Small):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def in_autocast(**options: Any) -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", **options):
            return model(x).square().mean()  # type: ignore[no-any-return]

    return loss


@pytest.mark.skipif(not HEADER.exists(), reason="this torch has no C++ headers")
def test_the_lists_are_those_of_torch() -> None:
    text = HEADER.read_text()
    ours = {
        "LOWER_PRECISION_FP": casts.LOWER_PRECISION.split(),
        "FP32": casts.FLOAT32.split(),
        "FP32_SET_OPT_DTYPE": casts.FLOAT32_RESULT.split(),
        "PROMOTE": casts.WIDEST.split(),
        "DIFFERENT_REDISPATCH_SIGNATURE": list(casts.FLOAT32_NORMS),
    }
    for name, listed in ours.items():
        macro = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*\n)", text)
        assert macro is not None
        if name.startswith("DIFFERENT"):
            assert re.findall(r'"([\w.]+)"', macro[1]) == listed
            continue
        found = re.findall(r"_\((\w+)(?:, (\w+))?\)", macro[1])
        assert [".".join(filter(None, pair)) for pair in found] == listed


@pytest.mark.exhaustive
def test_ops_run_in_the_dtypes_of_a_gpu() -> None:
    assert dtypes(in_autocast(dtype=BF16), "linear") == {BF16}
    assert dtypes(in_autocast(), "linear") == {F16}
    assert dtypes(in_autocast(dtype=BF16), "softmax") == {F32}  # on a CPU it would be bf16
    assert dtypes(in_autocast(dtype=BF16, enabled=False), "linear") == {F32}


def test_old_names_and_functions_of_their_own_cast_too() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=F16)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert x.dtype == F16
            return 2 * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with pytest.warns(FutureWarning), torch.cuda.amp.autocast(dtype=BF16):
            y = model(x)
        with torch.autocast("cuda"):
            return Double.apply(y).float().mean()  # type: ignore[no-any-return, no-untyped-call]

    assert dtypes(loss, "linear") == {BF16}


@pytest.mark.exhaustive
def test_a_step_is_that_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, model = in_autocast(dtype=BF16), Checkpointed()
    made = partc.compile(model, "dp=2", (batch(),), loss=loss, plan="fsdp")
    assert partc.verify(made, model, (batch(),), loss).check().worst.error < 1e-12
    assert partc.verify(made, model, (batch(),), loss, dtype=None).worst.error < 0.02
    assert torch.autocast("cpu") is not None
    with torch.autocast("cpu", dtype=BF16):
        assert F.linear(batch(), torch.ones(3, 8)).dtype == BF16
    assert not torch.is_autocast_enabled("cuda")


def test_what_cannot_be_recorded_is_refused() -> None:
    def on_xpu(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("xpu", dtype=BF16):
            return model(x).mean()  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match=r'torch.autocast\("xpu"\) cannot be recorded'):
        trace(Small(), (batch(),), on_xpu)
    if torch.cuda.is_available():
        return
    with pytest.warns(UserWarning, match="CUDA is not available"):

        @torch.autocast("cuda", dtype=BF16)  # type: ignore[untyped-decorator]
        def decorated(model: nn.Module, x: Tensor) -> Tensor:
            return model(x).mean()  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match="made before the trace"):
        trace(Small(), (batch(),), decorated)
