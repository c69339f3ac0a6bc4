"""Replaces what PyTorch calls on a CPU alone by helper functions that run on every device.

Models are traced on fake CPU tensors, so a call of fused attention is recorded as the CPU's kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from partc.codegen.calls.arguments import Call
from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import Text
from partc.graph import fake_of

CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
FLASH_HEAD = 256  # the flash kernel's limit of elements in a head
REGISTER_BYTES = 16  # fused kernels need heads of a multiple of so many bytes


def for_any_device(
    node: fx.Node, operand: Callable[[fx.Node], Text], device: str, helpers: Helpers
) -> Text | None:
    """The text of a call of fused attention; None for a call that runs on every device."""
    if not str(node.target).startswith(f"aten.{CPU_ATTENTION}"):
        return None
    call = Call.of(node, operand, device)
    backward = "_backward" if call.name.endswith("_backward") else ""
    kernel = _kernel(call)
    tensors = ("query", "key", "value")
    operands = ("grad_out", *tensors, "out", "logsumexp") if backward else tensors
    texts = [str(call.text(operand)) for operand in operands]
    if backward and kernel != "flash":  # these helpers take sums however they lie in memory
        texts[-1] = texts[-1].removesuffix(".contiguous()")
    texts += [f"is_causal={call.get('is_causal')}"] if backward or call.get("is_causal") else []
    scale, usual = call.get("scale"), fake_of(call.get("query")).shape[-1] ** -0.5
    texts += [f"scale={call.text('scale')}"] if scale not in (None, usual) else []
    if call.get("attn_mask") is not None:
        mask = str(call.text("attn_mask"))
        if kernel == "efficient":
            mask = f"{helpers.use('of_heads')}({mask}, {call.text('query')})"
        texts.append(f"mask={mask}")
    return Text(f"{helpers.use(f'{kernel}_attention{backward}')}({', '.join(texts)})")


def _kernel(call: Call) -> str:
    """Which GPU kernel computes an attention: flash, efficient, or plain matrix products.

    Under a causal mask the flash kernel lets the last query see the last key, the CPU's kernel the
    first query the first key: they agree only for as many queries as keys.
    """
    query, key = fake_of(call.get("query")), fake_of(call.get("key"))
    head, item_bytes = query.shape[-1], query.element_size()
    if item_bytes > 4 or head * item_bytes % REGISTER_BYTES:  # float64, say: no fused kernel
        return "plain"
    square = query.shape[-2] == key.shape[-2] or not call.get("is_causal")
    if item_bytes < 4 and call.get("attn_mask") is None and square and head <= FLASH_HEAD:
        return "flash"
    return "efficient"
