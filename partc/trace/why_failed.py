"""What a user can do about an error that was raised while the model was recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from partc.errors import TraceError
from partc.plan.sharding import dtype_name
from partc.trace.asked_values import instead
from partc.trace.class_weights import of_class_weights
from partc.trace.distribution_checks import is_wanted_check
from partc.trace.forward_lines import forward_of
from partc.trace.loss_targets import of_targets
from partc.trace.odd_tensors import INSTEAD
from partc.trace.op_words import OPS, of_name, of_shapes
from partc.trace.returned_tuples import returner_of
from partc.trace.source_lines import module_of, source_of

_VALUE = "Python code asks for the value of a tensor"
_SIZE = "the size of a result depends on the values of a tensor"
_OWN_GRADIENTS = "the loss computes gradients by itself"
# By what torch says, or by its class: what happened, and what to do. The first that fits counts.
_KNOWN = (
    (r"(?i)nested_?tensor|nestedint|shape_env must not be None", "the step makes a nested tensor",
     "Programs compute with dense tensors: " + INSTEAD["nested"]),
    (r"(?i)OpaqueTensor|mkldnn", "the step makes a tensor of mkldnn, which has an order of its own",
     "Leave to_mkldnn out: a program takes the kernels of its device."),
    (r"Sparse\w* tensors|Sparse(Meta|CPU|Csr|Coo)|sparse_coo|sparse_csr",
     "the step makes a sparse tensor", "Programs compute with dense tensors. " + INSTEAD["sparse"]),
    ("'(generator|coroutine|async_generator)' object|not (generator|coroutine|async_generator)",
     "a function with yield or async gives no tensor when it is called",
     "Write an ordinary function: return in place of yield, and def without async."),
    (r"no autograd formula was registered", "a custom op has no derivative",
     "Register one, torch.library.register_autograd(name, backward, setup_context=...); or give it "
     "what needs no gradient, x.detach()."),
    (r"item\(\)|numpy|DataDependentOutputException", _VALUE,
     "Use torch.where instead of a branch; to print or log it, return the tensor itself beside the "
     "loss, (loss, extras), and do that behind the step; or move this code out of the step."),
    ("DynamicOutputShapeException", _SIZE,
     "Keep the shape, and count with a mask: (loss * mask).sum() / mask.sum() in place of "
     "loss[mask].mean(), or torch.where(mask, x, 0); of rows that are picked take a fixed number, "
     "x.topk(k)."),
    (r"Cannot view a tensor|view size is not compatible",
     "a tensor is viewed whose numbers lie in another order than its dims, as behind transpose, "
     "permute or a slice",
     "Write .reshape(...) in place of .view(...), which copies where it has to; or .contiguous() "
     "before it."),
    ("cannot resize variables that require grad",
     "resize_ is called on what a gradient flows through, which torch refuses without partc too",
     "Take a tensor of the other shape in its place: y = x.reshape(4, 6) of as many numbers, "
     "y = x.flatten()[:n] of fewer; F.pad or torch.cat make a longer one."),
    ("use_reentrant", "a reentrant checkpoint cannot be traced",
     "Call torch.utils.checkpoint.checkpoint with use_reentrant=False."),
    ("UnsupportedOperatorException|no fake impl", "an op has no shape function",
     "Register one with torch.library.register_fake: a function of the same arguments, which "
     "returns empty tensors of the results' shapes, torch.empty_like(x)."),
    ('missing the required "forward"', "the model is no module that is called",
     "Give it a forward, or pass nn.Sequential(*layers)."),
    ("backward through the graph a second time", _OWN_GRADIENTS,
     "Return the loss alone, without loss.backward() and optimizer.step(): a step computes the "
     "gradients."),
    ("[Dd]efault process group",
     "the code asks for the ranks of a process group, and there is none yet",
     "Leave torch.distributed out of the model and its loss: they compute the whole batch, as one "
     "process does, and the program does what ranks have to do together. Else start the process "
     "group before compiling, and the number of ranks becomes part of the program."),
    (r"linked with support for \w+ devices|not compiled with CUDA|No CUDA GPUs|NVIDIA driver",
     "the code asks for a device that this machine has not got",
     "Leave devices out of the model and its loss, or take that of a tensor at hand "
     "(x.to(y.device)): program.module(device=...) says where ranks compute."),
    (r"'(Fake)?Tensor' object is not callable", "a tensor is called as a function",
     "The model comes first in a loss: def loss(model, x, y), which is called as "
     "loss(model, *inputs)."),
    ("Expected all tensors to be on the same device", "tensors lie on several devices",
     "Make new tensors on the device of one at hand, torch.zeros(4, device=x.device), and pass "
     "model and inputs on one device: program.module(device=...) says where ranks compute."),
    (r"must be Tensor, not (str|list|tuple|dict)|'(str|list)' object has no attribute",
     "a text or a list stands where a tensor is needed",
     "Give tensors for what is computed with: of a loader's batch, which is a list, its entries "
     "(x, y = batch), of a dict **batch; of texts the ids that the tokenizer gives "
     '(return_tensors="pt").'),
    (r"'(tuple|dict|list|\w+Output\w*)' object has no attribute",
     "a tuple, dict or output of a model stands where a tensor is needed",
     "Take the tensor out of it: model(x)[0], or model(x)['logits']."),
    (r"(missing \d+ required|unexpected keyword|takes \d+ positional|takes from \d+)",
     "a call does not fit the arguments of the function that it calls",
     "Correct this call; where it is that of the model or the loss, give inputs that these take, "
     "by place or by their names."),
    ("Inference tensors",
     "the model or its inputs were made under torch.inference_mode()",
     "Make and compile them outside of it: what is made there cannot be trained."),
    (r"Expected (dtype|tensor).*(int64|Long)|scalar type Long", "whole numbers are needed",
     "Give class numbers and indices as whole numbers: labels.long()."),
)  # fmt: skip
# By the op whose result has such a size, what to write in its place; of others a mask helps.
_SIZED = (
    (r"unique",
     "Number the groups outside of the step, torch.unique(..., return_inverse=True) in the loader, "
     "and give the numbers as an input. A fixed number of groups is summed by "
     "x.new_zeros(groups, x.shape[1]).index_add(0, numbers, x)."),
    (r"pack_padded_sequence",
     "Give the padded batch to the RNN, out, _ = rnn(x), and take the last word of each row: "
     "out[torch.arange(len(lengths)), lengths - 1]; other words behind it are masked."),
    (r"bincount", "Count a fixed number of classes: F.one_hot(y, classes).sum(0)."),
    (r"repeat_interleave",
     "Make the indices outside of the step, torch.arange(len(n)).repeat_interleave(n) in the "
     "loader, and give them as an input: x[indices]."),
)  # fmt: skip
_OF_PYTHON = ("AttributeError", "NameError", "KeyError", "UnboundLocalError", "ImportError")
_SHAPES = re.compile(
    r"size|shape|dim\b|dimension|broadcast|expand|channels|must match|numel|elements", re.I
)


def explained(
    error: Exception, model: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]
) -> TraceError:
    """An error raised while recording as a TraceError: the user's line, and what to do.

    ``names`` of the ``inputs`` that the loss was given.
    """
    path, source = forward_of(error)
    path, source = path or module_of(error, model), source or source_of(error)
    path = path or type(model).__name__
    kind = type(error).__name__
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    what, do = (
        of_targets(error, reason)
        or _known(f"{kind}: {reason}")
        or of_class_weights(error, reason)
        or _shapes(kind, reason, names, inputs)
    )
    if path in dict(model.named_modules()) and "do not fit" in what:
        do += "" if of_shapes(reason) else _weights_of(path, model)
    if _is_model_for_tensor(reason, type(model).__name__):
        what = "the model stands where its result is needed"
        do = (
            "Let the loss call it: loss=lambda model, x, y: F.cross_entropy(model(x), y). A loss "
            "is given the model and the inputs, and no predictions."
        )
    if returner := returner_of(error):
        what, do = returner.what, returner.do
    if isinstance(error, AttributeError):
        do = of_name(error) or do
    if what == _VALUE:
        reason = reason.rstrip(".") + ": while tracing, tensors have shapes but no values"
        line = (source or "").partition(": ")[2]
        do = instead(error, line) or do
        if is_wanted_check(error):
            what = "a distribution checks the values of its arguments"
            do = "Leave validate_args=True out: while tracing, the check is off by default."
    if what == _SIZE:
        do = next((each for op, each in _SIZED if re.search(op, reason)), do)
    if what == _OWN_GRADIENTS:  # torch's words advise retain_graph=True
        reason = "the step computes them from the loss that it returns"
    return TraceError(where=f"{path} ({source})" if source else path, what=what, why=reason, do=do)


def _weights_of(path: str, model: nn.Module) -> str:
    """The weights of the module that failed: no inputs fit two layers that do not fit each other.

    "" for a module without weights of its own.
    """
    own = model.get_submodule(path).named_parameters(recurse=False)
    told = ", ".join(f"{name} {list(each.shape)}" for name, each in own)
    told = told and f" {path or 'The model'} has {told}"
    return told and f"{told}: where its input comes from another layer, correct one of the two."


def _is_model_for_tensor(reason: str, model: str) -> bool:
    """Whether torch says that a model, the class of which has this name, was taken for a tensor."""
    if reason.startswith(f"{model!r} object has no attribute"):
        return hasattr(Tensor, reason.rpartition(" ")[2].strip("'"))
    if reason.startswith("unsupported operand type"):
        return f"{model!r}" in reason
    return (
        re.search(rf"must be (Tensor|.* of Tensors), (but got|not) {re.escape(model)}\b", reason)
        is not None
    )


def _known(reason: str) -> tuple[str, str] | None:
    """What happened, and what to do, where torch's words say it."""
    return next(
        ((what, do) for words, what, do in (*_KNOWN, *OPS) if re.search(words, reason)), None
    )


def _shapes(
    kind: str, reason: str, names: Sequence[str], inputs: Sequence[Tensor]
) -> tuple[str, str]:
    """The same of shapes that do not fit each other, and of all that nobody foresaw."""
    given = ", ".join(
        f"{name} {dtype_name(x.dtype)}{list(x.shape)}"
        for name, x in zip(names, inputs, strict=True)
    )
    if kind not in _OF_PYTHON and _SHAPES.search(reason):
        return (
            "the shapes do not fit each other",
            of_shapes(reason)
            or f"Compare the inputs, {given}, with what the model takes, and give others.",
        )
    if kind in _OF_PYTHON:
        return (
            f"the code fails with {kind}, also without partc",
            "Correct this line: the name in it is not there.",
        )
    if kind != "RuntimeError":  # of Python, or raised by the code itself
        return (
            f"the code fails with {kind}",
            f"Correct this line, or what it is given, {given or 'no inputs'}; if the model runs "
            "without partc, report it.",
        )
    return (
        "tracing failed",
        f"Run the model once without partc, on {given or 'its inputs'}; if that works, simplify "
        "this line.",
    )
