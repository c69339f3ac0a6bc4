"""The kernels with which torch computes on any device, chosen in every run of a step alike.

torch chooses some kernels by the device, or by asking whether it is traced. A step runs once under
``make_fx``, where it is recorded, and several times outside of it: to find equal blocks, to see
that two steps are alike, and as the reference of ``partc.verify``. All have to choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.backends import mha, mkldnn

from partc.trace.loss_lengths import lengths_as_tensors
from partc.trace.synced_norm import synced_norm_of_one_device

_PADDING = "src_key_padding_mask"


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Switch mkldnn off: an LSTM is then recorded as matrix products, not as a CPU-only kernel.

    Attention and batch norm are as under ``modules_of_one_device``; ``is_fx_tracing`` says the same
    in every run, and a CTC loss has its lengths as tensors.
    """
    enabled: Any = mkldnn.enabled
    mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with modules_of_one_device(), _told_as_traced(), lengths_as_tensors():
            yield
    finally:
        mkldnn.enabled = enabled


def _told_as_traced() -> AbstractContextManager[Any]:
    """``is_fx_tracing`` says yes: by a flag of a module, and in later torch of a thread."""
    tracer: Any = torch.fx._symbolic_trace
    if hasattr(tracer, "_is_fx_tracing_context"):
        context: AbstractContextManager[Any] = tracer._is_fx_tracing_context(True)
        return context
    return patch.object(tracer, "_is_fx_tracing_flag", True)


@contextmanager
def modules_of_one_device() -> Iterator[None]:
    """torch's modules compute what they say, on any device and whatever process group there is."""
    with attention_in_python(), synced_norm_of_one_device():
        yield


@contextmanager
def attention_in_python() -> Iterator[None]:
    """Switch off the one kernel, without a backward, that torch has for attention in eval mode.

    ``nn.MultiheadAttention`` and the encoder layers take it where they are not traced.
    """
    enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(enabled)


@contextmanager
def noting_padding(model: nn.Module, padded: dict[str, None]) -> Iterator[None]:
    """Add the paths of encoders for whose padded positions torch would give zeros in eval mode."""

    def noting(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            mask = kwargs.get(_PADDING, args[2] if len(args) > 2 else None)
            if mask is not None and not next(iter(module.layers)).training:  # type: ignore[arg-type]
                padded[path] = None

        return hook

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
                hook = module.register_forward_pre_hook(noting(path), with_kwargs=True)
                stack.callback(hook.remove)
        yield


def padding_notes(padded: Mapping[str, None]) -> tuple[str, ...]:
    """Sentences on the encoders that ``noting_padding`` has found."""
    return tuple(
        f"{path or 'the encoder'} computes padded positions as in training; without gradients "
        "torch.nn.TransformerEncoder puts zeros there, and cuts off what all samples lack"
        for path in padded
    )
