"""Measure the rates of a device (FLOP/s, bytes/s of memory), on all ranks at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from partc.measure.measured import Measured
from partc.measure.stopwatch import Stopwatch

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
SIDES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
OTHER_SIDE = {"cpu": 256, "cuda": 4096}  # of matrices in other precisions than f32
HEADS = {  # batch, heads, sequence, size of a head
    "cpu": ((1, 4, 32, 32), (1, 8, 128, 32), (2, 8, 256, 64), (2, 8, 512, 64)),
    "cuda": ((1, 16, 256, 64), (4, 16, 1024, 64), (4, 32, 2048, 128)),
}
KIB, MIB = 2**10, 2**20
SUMS = (4 * KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB)  # bytes read and written
KEPT_BYTES, MOST_KEPT = 64 * MIB, 256  # bytes, and number, of results that are kept alive
LARGE_BYTES = 32 * MIB  # an allocation that glibc returns to the system, the first time only
PARAMETERS = (256 * KIB, 4 * MIB, 32 * MIB)  # bytes, in NUM_PARAMETERS tensors
NUM_PARAMETERS = 8


def measure_compute(watch: Stopwatch) -> list[Measured]:
    """Measure products, attention, sums, functions, the optimizer and a launch, on each rank."""
    watch = watch.of_each()
    parts = (_launch, _matmuls, _attention, _sums, _functions, _optimizer)
    with torch.no_grad():
        watch.rand(LARGE_BYTES // 4)  # from here on glibc keeps what is freed, as after a step
        return [measured for part in parts for measured in part(watch)]


def _launch(watch: Stopwatch) -> Iterator[Measured]:
    x, y = watch.rand(16), watch.rand(16)
    yield watch.time("launch", "f32[16] + f32[16]", 0, lambda: x + y)


def _matmuls(watch: Stopwatch) -> Iterator[Measured]:
    """Matrix products. As in a step, one operand was just made, the other long ago."""
    kind = watch.device.type
    sides = [("f32", n) for n in SIDES[kind]]
    for dtype, n in [*sides, *((other, OTHER_SIDE[kind]) for other in DTYPES if other != "f32")]:
        kept = deque(x.view(n, n) for x in kept_results(watch, n * n, DTYPES[dtype]))

        def product(kept=kept) -> None:  # type: ignore[no-untyped-def]
            kept.append(kept[-1] @ kept.popleft())

        what = f"{dtype}[{n},{n}] @ {dtype}[{n},{n}]"
        yield watch.time(f"matmul {dtype}", what, 2 * n**3, product)


def _attention(watch: Stopwatch) -> Iterator[Measured]:
    """Causal attention, forward and backward: two calls, so half of the FLOPs and seconds each."""
    for batch, heads, seq, size in HEADS[watch.device.type]:
        q, k, v = (watch.rand(batch, heads, seq, size).requires_grad_() for _ in range(3))
        d_y = torch.ones_like(q)

        def both(q=q, k=k, v=v, d_y=d_y) -> None:  # type: ignore[no-untyped-def]
            with torch.enable_grad():
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(y, (q, k, v), d_y)

        flops = (4 + 10) * batch * heads * seq**2 * size
        measured = watch.time("attention", f"f32[{batch},{heads},{seq},{size}]", flops, both)
        half = tuple(seconds / 2 for seconds in measured.samples)
        yield Measured("attention", measured.what, flops / 2, half)


def _sums(watch: Stopwatch) -> Iterator[Measured]:
    """Element-wise sums, of one operand that was just made and one made long ago."""
    for num_bytes in SUMS:
        n = num_bytes // 12
        kept = kept_results(watch, n)

        def add(kept=kept) -> None:  # type: ignore[no-untyped-def]
            kept.append(kept[-1] + kept[0])

        yield watch.time("pointwise", f"f32[{n}] + f32[{n}]", 12 * n, add)


def _functions(watch: Stopwatch) -> Iterator[Measured]:
    for num_bytes in SUMS:
        n = num_bytes // 8
        kept = kept_results(watch, n)

        def silu(kept=kept) -> None:  # type: ignore[no-untyped-def]
            kept.append(F.silu(kept[-1]))

        yield watch.time("functions", f"silu(f32[{n}])", 8 * n, silu)


def kept_results(watch: Stopwatch, n: int, dtype: torch.dtype = torch.float32) -> deque[Tensor]:
    """Tensors of ``n`` elements to keep results in, so many that the oldest is in no cache."""
    num = max(2, min(MOST_KEPT, KEPT_BYTES // (4 * n)))
    return deque((watch.rand(n, dtype=dtype) for _ in range(num)), maxlen=num)


def _optimizer(watch: Stopwatch) -> Iterator[Measured]:
    for num_bytes in PARAMETERS:
        n = num_bytes // 4 // NUM_PARAMETERS
        params = [torch.nn.Parameter(watch.rand(n)) for _ in range(NUM_PARAMETERS)]
        for param in params:
            param.grad = torch.ones_like(param)
        adamw = torch.optim.AdamW(params, lr=1e-3, fused=True)
        what = f"AdamW, {NUM_PARAMETERS} of f32[{n}]"
        yield watch.time("optimizer", what, 7 * 4 * n * NUM_PARAMETERS, adamw.step)
