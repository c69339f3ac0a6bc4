"""``torch.autocast("cuda")`` on CPU tensors: the casts that a GPU would do, recorded without one.

A trace runs on fake CPU tensors, where torch's own kernels for this autocast cast nothing, and
torch switches it off where there is no GPU. While ``cuda_autocast_on_cpu`` is open, kernels in
Python stand in their place; they cast as ``ATen/autocast_mode.h`` says, whose lists of ops the
tables below repeat (a test compares them).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import Tensor
from torch.amp import autocast_mode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from partc.errors import TraceError
from partc.trace.source_lines import source_here

# The ops that run in autocast's dtype; in float32; in float32 if nobody asks for another dtype of
# the result; in the widest dtype among their operands; not at all.
LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
"""
FLOAT32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
FLOAT32_NORMS = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
UNSAFE = "binary_cross_entropy"
_KEY = torch._C.DispatchKey.AutocastCUDA


@dataclass
class _Casts:
    """The Python kernels, and autocast's cache: one cast of a float32 parameter serves all."""

    library: torch.library.Library | None = None
    cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def register(self) -> None:
        """Put the kernels in the place of torch's own, until ``close``."""
        if self.library is not None:
            return
        self.library = torch.library.Library("aten", "IMPL")
        kernels: dict[str, Callable[..., Any]] = {}
        for names, kernel in (
            (LOWER_PRECISION, self._lower),
            (FLOAT32, self._float32),
            (FLOAT32_RESULT, self._float32_result),
            (" ".join(FLOAT32_NORMS), self._float32_norm),
            (WIDEST, self._widest),
            (UNSAFE, _refused),
        ):
            kernels |= {name: kernel(_overload(name)) for name in names.split()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its kernels are replaced
            for name, kernel in kernels.items():
                self.library.impl(_overload(name), kernel, "AutocastCUDA")

    def close(self) -> None:
        if self.library is not None:
            self.library._destroy()
        self.cache.clear()

    def _lower(self, op: Any) -> Callable[..., Any]:
        return self._casting(op, lambda args: torch.get_autocast_dtype("cuda"))

    def _float32(self, op: Any) -> Callable[..., Any]:
        return self._casting(op, lambda args: torch.float32)

    def _widest(self, op: Any) -> Callable[..., Any]:
        return self._casting(op, _widest_dtype)

    def _casting(self, op: Any, dtype_for: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
        """The kernel that casts all operands to one dtype."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = dtype_for((args, kwargs))
            cast = pytree.tree_map_only(Tensor, lambda x: self._cast(x, dtype), (args, kwargs))
            return _below(op, *cast[0], **cast[1])

        return kernel

    def _float32_result(self, op: Any) -> Callable[..., Any]:
        names = [argument.name for argument in op._schema.arguments]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("dtype") is None and _is_eligible(args[0]):
                given["dtype"] = torch.float32
            return _below(op, *[given.pop("self")], **given)

        return kernel

    def _float32_norm(self, op: Any) -> Callable[..., Any]:
        with_dtype = _overload(FLOAT32_NORMS[f"{op._opname}.{op._overloadname}"])

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
            args = (args[0], args[1] if len(args) > 1 else 2, *args[2:])
            return _below(with_dtype, *args, **kwargs, dtype=dtype)

        return kernel

    def _cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A cast of an operand; that of a float32 parameter to autocast's dtype is kept."""
        if not _is_eligible(x) or x.dtype == dtype:
            return x
        kept = x.dtype == torch.float32 and dtype == torch.get_autocast_dtype("cuda")
        kept = kept and x.is_leaf and x.requires_grad and not x._is_view()
        if not kept or not torch.is_autocast_cache_enabled():
            return x.to(dtype)
        if id(x) not in self.cache:
            self.cache[id(x)] = x, x.to(dtype)
        return self.cache[id(x)][1]


def _overload(name: str) -> Any:
    word, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, word), overload or "default")


def _refused(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise TraceError(
            where=source_here(),
            what=f'{op._opname} is unsafe under torch.autocast("cuda")',
            why="torch refuses it on a GPU: its gradient needs float32",
            do="Use binary_cross_entropy_with_logits, which takes what is before the sigmoid.",
        )

    return kernel


def _below(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op without autocast's kernels, as torch's own do."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
        return op(*args, **kwargs)


def _is_eligible(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _widest_dtype(args: Any) -> torch.dtype:
    """float32 if any operand is, else autocast's dtype."""
    tensors = filter(_is_eligible, pytree.tree_leaves(args))
    wide = any(x.dtype == torch.float32 for x in tensors)
    return torch.float32 if wide else torch.get_autocast_dtype("cuda")


@contextmanager
def cuda_autocast_on_cpu() -> Iterator[None]:
    """While this is open, ``torch.autocast("cuda")`` casts CPU tensors as a GPU would.

    TraceError where autocast of another device is entered, or where a decorator's was made before
    on a machine without a GPU, which switched it off.
    """
    casts, made = _Casts(), WeakSet[Any]()
    begin: Any = autocast_mode.autocast.__init__
    enter: Any = autocast_mode.autocast.__enter__
    clear: Any = torch.clear_autocast_cache
    cast: Any = autocast_mode._cast
    # whose autocast a recomputation enters again
    device_type: Any = checkpoint._infer_device_type

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made.add(self)
        with (
            patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            patch.object(torch.cuda, "is_bf16_supported", lambda *_: True),
        ):
            begin(self, *args, **kwargs)

    def entered(self: Any) -> Any:
        _check(self, self in made)
        if self.device == "cuda" and self._enabled:
            casts.register()
        return enter(self)

    def cleared() -> None:
        casts.cache.clear()
        clear()

    def cast_input(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    def recomputed_on(*args: Any) -> str:
        return "cuda" if torch.is_autocast_enabled("cuda") else str(device_type(*args))

    if torch.is_autocast_enabled("cuda"):
        casts.register()
    try:
        with (
            torch._C._IncludeDispatchKeyGuard(_KEY),  # tensors on the CPU do not have the key
            patch.object(autocast_mode.autocast, "__init__", init),
            patch.object(autocast_mode.autocast, "__enter__", entered),
            patch.object(torch, "clear_autocast_cache", cleared),
            patch.object(autocast_mode, "_cast", cast_input),
            patch.object(checkpoint, "_infer_device_type", recomputed_on),
        ):
            yield
    finally:
        casts.close()


def _check(entered: Any, is_new: bool) -> None:
    """TraceError for an autocast that cannot be recorded as it is meant."""
    device = entered.device
    if device not in ("cpu", "cuda") and entered._enabled:
        raise TraceError(
            where=source_here(),
            what=f'torch.autocast("{device}") cannot be recorded',
            why="on the CPU tensors of a trace only the casts of cpu and cuda are known",
            do='Use torch.autocast("cuda") or torch.autocast("cpu"), or cast by .to(dtype).',
        )
    if device == "cuda" and not (is_new or entered._enabled or torch.cuda.is_available()):
        raise TraceError(
            where=source_here(),
            what='this torch.autocast("cuda") was made before the trace, as a decorator is',
            why="torch saw no GPU and switched it off then, whether or not it was meant to be on",
            do='Write `with torch.autocast("cuda", ...)` inside of the function.',
        )
