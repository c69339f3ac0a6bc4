"""Writes ATen ops as public torch functions: ``aten.linear(x, w, b) -> F.linear(x, w, b)``.

``SPELLERS`` maps an op's name to a function from a Call to its text. An op that is not in the table
is written ``torch.ops.aten.op(...)``, which is always right: the table is for the reader.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from partc.codegen.calls.arguments import Call
from partc.codegen.calls.reshapes import in_one_step
from partc.codegen.text import (
    AND,
    ATOM,
    COMPARE,
    NONE,
    OR,
    POWER,
    PRODUCT,
    SUM,
    UNARY,
    XOR,
    Text,
)  # fmt: skip
from partc.graph import fake_of
from partc.graph.hooked import HOOKED
from partc.quoting import identifier, literal

Speller = Callable[[Call], Text]
SPELLERS: dict[str, Speller] = {}


def spell(node: fx.Node, operand: Callable[[fx.Node], Text], device: str) -> Text:
    """The text of a call of an ATen op or of ``operator.getitem``.

    ``operand`` gives the text of a node, ``device`` that of the device for new tensors.
    """
    if node.target is operator.getitem:
        whole, index = node.args
        assert isinstance(whole, fx.Node)
        return Text(f"{operand(whole).at(ATOM)}[{literal(index)}]")
    if node.target is HOOKED:
        return Text(f"hooks.{identifier(str(node.args[1]))}({operand(node.all_input_nodes[0])})")
    call = Call.of(node, operand, device)
    speller = SPELLERS.get(call.name) if call.node.target.namespace == "aten" else None  # type: ignore[union-attr]
    return (speller or _aten)(call)


def spells(*names: str) -> Callable[[Speller], Speller]:
    """Register a function that writes the ops with these names; a later one replaces it."""

    def add(speller: Speller) -> Speller:
        SPELLERS.update(dict.fromkeys(names, speller))
        return speller

    return add


def _aten(call: Call) -> Text:
    """``aten.foo.Tensor(x)`` is ``torch.ops.aten.foo.Tensor(x)``."""
    target: Any = call.node.target
    overload = "" if target._overloadname == "default" else f".{target._overloadname}"
    arguments = call.arguments(place=_is_factory(call), named=True)
    return Text(f"torch.ops.{target.namespace}.{call.name}{overload}({arguments})")


IN_PLACE = ("torch.scatter", "torch.scatter_add", "torch.index_add", "torch.index_copy",
            "torch.index_put")  # fmt: skip
ADDED_AT = "torch.ops.aten.index_put"  # with dims that no index picks from


def written_over(call: Text, into: Text) -> str:
    """A call that gives the gradient of an activation, written over the tensor ``into``.

    ``torch.ops.aten.gelu_backward(d_y, x)`` becomes
    ``torch.ops.aten.gelu_backward.grad_input(d_y, x, grad_input=d_y)``, and what writes entries,
    ``torch.scatter(d_y, 1, i, x)``, becomes ``d_y.scatter_(1, i, x)``.
    """
    name, _, given = call.code.partition(f"({into}, ")
    if name in IN_PLACE:
        return f"{into}.{name.removeprefix('torch.')}_({given}"
    if name == ADDED_AT:
        return f"{name}_({into}, {given}"
    return f"{call.code.replace('(', '.grad_input(', 1)[:-1]}, grad_input={into})"


def _is_factory(call: Call) -> bool:
    """Whether a call makes a tensor from no other tensor, so that it has to name the device."""
    names = [arg.name for arg in call.node.target._schema.arguments]  # type: ignore[union-attr]
    return "device" in names and not call.node.all_input_nodes


def share_of(node: fx.Node, operand: Callable[[fx.Node], Text]) -> Text | None:
    """``ones_like(loss) / count`` as ``1 / count``, and ``ones_like(loss) / 128`` as
    ``full_like(loss, 1 / 128)``: with that the backward of a mean begins. None for another call.
    """
    ones = node.args[0] if node.target is torch.ops.aten.div.Tensor else None
    if not isinstance(ones, fx.Node) or ones.target is not torch.ops.aten.ones_like.default:
        return None
    call = Call.of(node, operand, "")
    if fake_of(ones).shape != () or set(call.given) != {"self", "other"}:
        return None
    if not str(call.text("self")).startswith("torch.ones_like("):
        return None  # its line stands, as others read it
    num = call.get("other")
    if not isinstance(num, fx.Node):
        return Text(f"torch.full_like({call.operand(ones.all_input_nodes[0])}, 1 / {literal(num)})")
    alike = fake_of(num).shape == () and fake_of(num).dtype == fake_of(ones).dtype
    return Text(f"1 / {call.text('other').at(PRODUCT + 1)}", PRODUCT) if alike else None


# names that torch, torch.nn.functional and Tensor share with ATen ---------------------------------
IN_TORCH = """
abs acos addbmm addcdiv addcmul addmm addmv amax amin arange argmax argmin argsort asin atan
atan2 baddbmm bernoulli bincount bitwise_left_shift bucketize cat ceil clamp clamp_max
clamp_min conj_physical cos cosh count_nonzero cross cumprod cumsum diagonal div dot empty
empty_like erf erfc erfinv exp exp2 expm1 eye flip floor floor_divide fmod full full_like
gather histc index_add index_copy index_select isfinite isinf isnan kron lerp lgamma linspace
log log10 log1p log2 logical_and logical_not logical_or logical_xor logsumexp masked_fill
masked_scatter maximum minimum mv nan_to_num native_batch_norm native_dropout
native_group_norm native_layer_norm nonzero norm ones ones_like outer pixel_shuffle polar
pow prod rand rand_like randint randn randn_like reciprocal relu remainder
roll round rsqrt scatter scatter_add searchsorted sigmoid sign sin sinh softmax sort
special_erf sqrt square stack std tan tanh topk tril triu trunc unfold_copy var var_mean
vdot view_as_complex view_as_real where zeros zeros_like
""".split()  # noqa: SIM905 - a table of words
METHODS = """
all any clone contiguous expand expand_as flatten index_fill mean narrow new_empty new_full
new_ones new_zeros permute repeat repeat_interleave reshape split split_with_sizes squeeze sum
transpose unbind unflatten unfold unsqueeze view
""".split()  # noqa: SIM905 - a table of words
STARRED = ("expand", "permute", "repeat", "reshape", "view")
FUNCTIONAL = {"elu": "elu", "gelu": "gelu", "hardtanh": "hardtanh", "leaky_relu": "leaky_relu",
              "linear": "linear", "silu": "silu", "softplus": "softplus", "mish": "mish",
              "hardswish": "hardswish", "hardsigmoid": "hardsigmoid", "log_sigmoid": "logsigmoid",
              "avg_pool2d": "avg_pool2d", "glu": "glu", "relu6": "relu6"}  # fmt: skip


@spells(*IN_TORCH)
def _in_torch(call: Call) -> Text:
    """``aten.exp(x)`` is ``torch.exp(x)``."""
    return Text(f"torch.{call.name}({call.arguments(place=_is_factory(call))})")


FIRST = {  # the same, with the first result alone
    "torch.native_layer_norm(": "F.layer_norm(",
    "F.group_norm(": "F.group_norm(",
    "F.nll_loss(": "F.nll_loss(",
}


def first_result(call: Text) -> str:
    """A call's first result: ``F.layer_norm(...)`` of a layer norm, ``call[0]`` of any other."""
    text = call.at(ATOM)
    known = next((name for name in FIRST if text.startswith(name)), "")
    return f"{FIRST[known]}{text.removeprefix(known)}" if known else f"{text}[0]"


@spells(*METHODS)
def _method(call: Call) -> Text:
    """``aten.view(x, [2, 3])`` is ``x.view(2, 3)``."""
    if "self" not in call.given:  # as torch.repeat_interleave(counts)
        return _in_torch(call)
    arguments = call.arguments(skip=1)
    if call.name in STARRED:
        arguments = _without_brackets(arguments)
    return Text(f"{call.text('self').at(ATOM)}.{call.name}({arguments})")


@spells("reshape")
def _reshape(call: Call) -> Text:
    """``x.reshape(...)`` as the step that it is: ``x.flatten(1)``, ``x.unflatten(0, (4, 16))``,
    ``x.unsqueeze(1)``; then sizes that it keeps, such as a rank's batch, need not stand there.
    """
    old, new = [*fake_of(call.get("self")).shape], [*call.get("shape")]
    known = all(type(size) is int and size >= 0 for size in new) and math.prod(new) > 0
    step = in_one_step(old, new) if known else ""
    return Text(f"{call.text('self').at(ATOM)}.{step}") if step else _method(call)


def _without_brackets(sizes: str) -> str:
    """``(2, 3)`` is ``2, 3``; ``()`` stays, as ``x.view()`` is no call that torch knows."""
    if not (sizes.startswith("(") and sizes.endswith(")")):
        return sizes
    return sizes[1:-1].removesuffix(",") or "()"


@spells(*FUNCTIONAL)
def _functional(call: Call) -> Text:
    """``aten.silu(x)`` is ``F.silu(x)``."""
    return Text(f"F.{FUNCTIONAL[call.name]}({call.arguments()})")


@spells("elu")
def _elu(call: Call) -> Text:
    """``F.elu`` has no argument ``scale``, which a SELU needs: that is written as the ATen op."""
    return (_functional if set(call.given) <= {"self", "alpha"} else _aten)(call)


# operators ----------------------------------------------------------------------------------------
OPERATORS = {
    "add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT),
    "true_divide": ("/", PRODUCT), "matmul": ("@", PRODUCT), "mm": ("@", PRODUCT),
    "bmm": ("@", PRODUCT),
    "bitwise_and": ("&", AND), "__and__": ("&", AND), "bitwise_or": ("|", OR), "__or__": ("|", OR),
    "bitwise_xor": ("^", XOR), "__xor__": ("^", XOR), "eq": ("==", COMPARE), "ne": ("!=", COMPARE),
    "lt": ("<", COMPARE), "le": ("<=", COMPARE), "gt": (">", COMPARE), "ge": (">=", COMPARE),
}  # fmt: skip


@spells(*OPERATORS)
def _operator(call: Call) -> Text:
    """``aten.add(a, b)`` is ``a + b``."""
    sign, level = OPERATORS[call.name]
    left, right = list(call.node.target._schema.arguments)[:2]  # type: ignore[union-attr]
    if set(call.given) - {left.name, right.name}:  # alpha, rounding_mode
        return _in_torch(call)
    # comparisons do not chain, and floating sums and products are not associative
    first = level + 1 if level == COMPARE else level
    return Text(
        f"{call.text(left.name).at(first)} {sign} {call.text(right.name).at(level + 1)}", level
    )


@spells("rsub")
def _rsub(call: Call) -> Text:
    if "alpha" in call.given:
        return _in_torch(call)
    return Text(f"{call.text('other').at(SUM)} - {call.text('self').at(SUM + 1)}", SUM)


@spells("pow")
def _pow(call: Call) -> Text:
    base, exponent = (call.text(n) for n in ("self", "exponent"))
    return Text(f"{base.at(ATOM)} ** {exponent.at(UNARY)}", POWER)


@spells("neg")
def _neg(call: Call) -> Text:
    return Text(f"-{call.text('self').at(UNARY)}", UNARY)


@spells("bitwise_not")
def _not(call: Call) -> Text:
    return Text(f"~{call.text('self').at(UNARY)}", UNARY)


# views and copies ---------------------------------------------------------------------------------
@spells("t")
def _t(call: Call) -> Text:
    return Text(f"{call.text('self').at(ATOM)}.T")


@spells("_unsafe_view")
def _unsafe_view(call: Call) -> Text:
    size = _without_brackets(str(call.text("size")))
    return Text(f"{call.text('self').at(ATOM)}.view({size})")


@spells("slice")
def _slice(call: Call) -> Text:
    """``aten.slice(x, 3, 16)`` of a 4-d tensor is ``x[..., 16:]``."""
    dim, start, end, step = (call.get(n) for n in ("dim", "start", "end", "step"))
    size = fake_of(call.get("self")).shape[dim]
    first = "" if start in (None, 0) else literal(start)
    last = "" if end is None or end >= size else literal(end)
    stride = "" if step == 1 else f":{step}"
    return Text(f"{call.text('self').at(ATOM)}[{_at_dim(call, dim)}{first}:{last}{stride}]")


@spells("select")
def _select(call: Call) -> Text:
    dim = call.get("dim")
    return Text(f"{call.text('self').at(ATOM)}[{_at_dim(call, dim)}{literal(call.get('index'))}]")


def _at_dim(call: Call, dim: int) -> str:
    """The text before the index of ``dim`` in brackets: nothing, ``:, `` or ``..., ``."""
    ndim = fake_of(call.get("self")).dim()
    dim %= ndim
    return "..., " if dim == ndim - 1 and ndim > 2 else ":, " * dim


@spells("index", "_unsafe_index")
def _index(call: Call) -> Text:
    """``aten.index(x, [None, i])`` is ``x[:, i]``."""
    indices = [":" if i is None else str(call.spell(i)) for i in call.get("indices")]
    return Text(f"{call.text('self').at(ATOM)}[{', '.join(indices)}]")


def put_at(node: fx.Node, operand: Callable[[fx.Node], Text]) -> str:
    """``x[:, i] = y`` for the call that puts ``y`` there; "" for one that adds it, or another."""
    if node.target not in (
        torch.ops.aten.index_put.default,
        torch.ops.aten._unsafe_index_put.default,
    ):
        return ""
    call = Call.of(node, operand, "")
    if call.get("accumulate"):
        return ""
    return f"{_index(call)} = {call.text('values').at(NONE)}"


@spells("index_put", "_unsafe_index_put")
def _index_put(call: Call) -> Text:
    """``torch.index_put`` takes no None among the indices; the op itself does."""
    name = "torch.ops.aten.index_put" if None in call.get("indices") else "torch.index_put"
    return Text(f"{name}({call.arguments()})")


@spells("_to_copy")
def _to_copy(call: Call) -> Text:
    """``x.to(torch.bfloat16)``; ``copy=True`` keeps a copy where the dtype does not change."""
    x = call.text("self").at(ATOM)
    options = [str(call.text("dtype"))] if call.get("dtype") else []
    if call.get("memory_format") not in (None, torch.preserve_format):
        options.append(f"memory_format={call.text('memory_format')}")
    if call.get("dtype") in (None, fake_of(call.get("self")).dtype):
        options.append("copy=True")
    return Text(f"{x}.to({', '.join(options)})")


@spells("copy")
def _copy(call: Call) -> Text:
    """``copy(like, source)``: the source in the shape and dtype of ``like``."""
    fake, source = fake_of(call.node), call.text("src").at(ATOM)
    text = (
        f"{source}.to({literal(fake.dtype)})"
        if fake_of(call.get("src")).dtype != fake.dtype
        else source
    )
    if fake_of(call.get("src")).shape != fake.shape:
        text += f".expand({_without_brackets(literal(tuple(fake.shape)))})"
    return Text(f"{text}.clone()")


@spells("lift_fresh_copy", "lift_fresh", "lift")
def _lift(call: Call) -> Text:
    return Text(f"{call.text('self').at(ATOM)}.clone()")


@spells("constant_pad_nd")
def _pad(call: Call) -> Text:
    """``aten.constant_pad_nd`` is ``F.pad``."""
    x, pad, value = (str(call.text(n)) for n in ("self", "pad", "value"))
    rest = f", value={value}" if "value" in call.given else ""
    return Text(f"F.pad({x}, {pad}{rest})")


@spells("slice_backward")
def _slice_backward(call: Call) -> Text:
    """The gradient of a slice, with zeros around it, is ``F.pad``, unless the slice has a step."""
    dim, start, step = (call.get(n) for n in ("dim", "start", "step"))
    sizes = call.get("input_sizes")
    if step != 1:
        return _aten(call)
    dim %= len(sizes)
    before = min(max(start + sizes[dim] if start < 0 else start, 0), sizes[dim])
    after = sizes[dim] - before - fake_of(call.get("grad_output")).shape[dim]
    pad = (0, 0) * (len(sizes) - 1 - dim) + (before, after)
    return Text(f"F.pad({call.text('grad_output')}, {literal(pad)})")


@spells("scalar_tensor")
def _scalar_tensor(call: Call) -> Text:
    """``torch.full`` fills a number on the device; ``torch.tensor`` would copy it from the host."""
    dtype = literal(fake_of(call.node).dtype)
    return Text(f"torch.full((), {call.text('s')}, dtype={dtype}, device={call.device})")


@spells("slice_scatter")
def _slice_scatter(call: Call) -> Text:
    end = call.get("end")
    if isinstance(end, int) and end >= fake_of(call.get("self")).shape[call.get("dim")]:
        call.given.pop("end", None)  # up to the last one
    return Text(f"torch.slice_scatter({call.arguments(named=True)})")


# nn.functional with another order or name ---------------------------------------------------------
@spells("embedding")
def _embedding(call: Call) -> Text:
    """``F.embedding(indices, weight)``; the op's other arguments matter to its gradient alone."""
    return Text(f"F.embedding({call.text('indices')}, {call.text('weight')})")


@spells("convolution")
def _convolution(call: Call) -> Text:
    """``F.conv2d(x, weight, bias, stride, padding, dilation, groups)`` and its siblings."""
    if call.get("transposed"):
        return _aten(call)
    dims = fake_of(call.get("input")).dim() - 2
    options = [
        f"{name}={literal(_one(call.get(name)))}"
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))
        if _one(call.get(name)) != default
    ]
    operands = [str(call.text(n)) for n in ("input", "weight", "bias") if call.get(n) is not None]
    return Text(f"F.conv{dims}d({', '.join(operands + options)})")


def _one(sizes: Any) -> Any:
    """One number for sizes that are all equal: ``(2, 2)`` is ``2``."""
    if isinstance(sizes, list | tuple):  # by their texts: a block's own number equals no other
        return sizes[0] if len({*map(literal, sizes)}) == 1 else tuple(sizes)
    return sizes


@spells("_softmax", "_log_softmax", "_safe_softmax")
def _softmax(call: Call) -> Text:
    """``aten._log_softmax(x, -1, False)`` is ``torch.log_softmax(x, -1)``."""
    if call.name == "_safe_softmax":
        return _aten(call)
    single = ", dtype=torch.float32" if call.get("half_to_float") else ""
    return Text(f"torch.{call.name[1:]}({call.text('self')}, {call.text('dim')}{single})")


@spells("linalg_vector_norm")
def _vector_norm(call: Call) -> Text:
    return Text(f"torch.linalg.vector_norm({call.arguments()})")


@spells("max", "min")
def _extreme(call: Call) -> Text:
    return Text(f"torch.{call.name}({call.arguments()})")


@spells("where")
def _where(call: Call) -> Text:
    return Text(f"torch.where({', '.join(str(call.spell(a)) for a in call.node.args)})")
