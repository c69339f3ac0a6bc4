"""The seconds of all calls of a scaling model at given axis sizes, by the roofline model.

The formulas are those of ``cost/roofline.py`` for one call, here for arrays of calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partc.cost.products import busy_share
from partc.machines.devices import Device
from partc.passes.search.plans.scaling_model import Calls, Floats

ARITHMETIC, TRAFFIC = ("attention", "matmul"), ("functions", "pointwise")


def call_seconds(calls: Calls, device: Device, dp: int, tp: int) -> Floats:
    """Seconds of every call's shard on one rank; ``dp`` counts microbatches too.

    The larger of arithmetic and memory traffic, at least the launch of a kernel, plus the call.
    """
    cuts = np.array([dp, tp])
    flops = calls.flops / np.where(calls.cut, cuts, 1).prod(axis=-1)
    shares = np.array([1.0, 1 / tp, 1 / dp, 1 / (dp * tp)])
    moved, written = calls.bytes @ shares, calls.written @ shares
    peaks = np.array([device.peak(dtype) for dtype in calls.dtype])
    sizes = calls.product / np.where(calls.product_cut, cuts, 1).prod(axis=-1)
    busy = busy_share(device.processors, *sizes.T)
    computing = flops / (peaks * _reached(calls.work, device, flops, ARITHMETIC) * busy)
    writing = written / (device.memory_bytes_per_s * _fractions(device, "pointwise", written))
    arithmetic = computing + (1 - device.hidden_writes) * writing
    memory = moved / (device.memory_bytes_per_s * _reached(calls.work, device, moved, TRAFFIC))
    seconds: Floats = np.maximum(np.maximum(arithmetic, memory), device.launch_s)
    return seconds + device.call_s


def _reached(
    work: NDArray[np.str_], device: Device, amounts: Floats, kinds: tuple[str, str]
) -> Floats:
    """``Device.fraction`` (the share of the peak) per call, for its kind of work in ``kinds``."""
    first, other = (_fractions(device, kind, amounts) for kind in kinds)
    found: Floats = np.where(work == kinds[0], first, other)
    return found


def _fractions(device: Device, work: str, amounts: Floats) -> Floats:
    """``Device.fraction`` of an array of FLOPs or bytes, for one kind of work."""
    like = "pointwise" if work == "functions" else work
    points = device.efficiency.get(work) or device.efficiency.get(like) or ((1.0, 1.0),)
    at = np.array([amount for amount, _ in points])
    seconds = at / np.array([fraction for _, fraction in points])
    inside: Floats = np.clip(amounts, at[0], at[-1])
    between = inside / np.interp(inside, at, seconds)
    fractions: Floats = between
    return fractions
