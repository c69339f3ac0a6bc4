"""What to do where Python code asks for the value of a tensor, by the line that asks for it."""

from __future__ import annotations

import ast
import linecache
import re
from itertools import islice
from types import TracebackType

from partc.trace.source_lines import is_users

BESIDE = (
    "to print or log it, return the tensor itself beside the loss, (loss, extras): return loss, "
    '{"norm": norm}; the step gives both, and .item() is asked for behind it.'
)
_SIZE = (
    "A size is part of a program, and a tensor has its value when a step runs: keep the whole size "
    "and mask what is too much, torch.where(torch.arange(y.shape[1]) < n, y, 0); or give the step "
    "a number, n.item(), or a batch that was cut before, as each size has a program of its own."
)
_INDEX = (
    "Which entry of a list is taken is part of a program: give the step a number, n.item(). Of the "
    "rows of a tensor take x.index_select(0, n.reshape(1)), which reads n when a step runs."
)
# Functions and methods that make a tensor of a size that they are given.
_OF_SIZES = {
    "arange", "broadcast_to", "chunk", "empty", "expand", "eye", "full", "interpolate", "linspace",
    "narrow", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "pad",
    "rand", "randint", "randn", "randperm", "range", "repeat", "reshape", "resize_", "roll",
    "split", "tensor_split", "tile", "topk", "tril", "tril_indices", "triu", "triu_indices",
    "unflatten", "unfold", "view", "zeros",
}  # fmt: skip
# By the line that asks for a value, what to do there. The first that fits counts.
_ASKED = (
    (r"^\s*return\b.*\.item\(\)\)?\s*$|lambda[^:]*:.*\.item\(\)\)?\s*$",
     f"If this is the loss, return the tensor itself, without .item(); {BESIDE}"),
    (r"\bprint\(|\b(log|logger|logging|LOG|self|wandb|run)\.\w*(log|info|debug|warning)\w*\(|"
     r"\badd_scalar|\bf[\"']", f"Leave it out of the step; {BESIDE}"),
    (r"\[[^\]]*:[^\]]*\b(max|sum|item|int)\(|topk\(|range\(|narrow\(|"
     r"\b(split|zeros|ones|expand|repeat|reshape|view)\w*\(.*\b(tolist|item|int)\(", _SIZE),
    (r"numpy\(|\bnp\.|\bmath\.\w+\(|\.tolist\(",
     "Write it with functions of torch; or compute it outside of the step, and give the result as "
     "an input."),
    (r"^\s*assert\b|isnan|isfinite|isinf|anomaly",
     "Leave the check out, and look at the loss behind the step, loss.isfinite(); or return the "
     "tensor that is checked beside the loss, (loss, extras). A value is chosen by torch.where."),
    (r"^\s*while\b",
     "Repeat a fixed number of times, and keep what is done by then: torch.where(done, x, new)."),
    (r"^(?!.*\b(if|elif|for|while|range)\b).*(\.item\(\)|\bfloat\()",
     "Compute with the tensor itself, without .item() or float(), and decide by torch.where; "
     f"{BESIDE}"),
    (r"^(?!.*\b(if|elif|while)\b).*\bint\(", _SIZE),
)  # fmt: skip


def instead(error: Exception, line: str) -> str:
    """What to do at the user's line that asked for a value; "" where nothing special is known."""
    by_words = next((do for words, do in _ASKED if re.search(words, line)), "")
    return _of_expression(_asking(error.__traceback__)) or by_words


def _of_expression(asking: ast.expr | None) -> str:
    """What to do about an expression that reads a tensor for a size or a place."""
    if isinstance(asking, ast.Subscript):
        return _SIZE if any(isinstance(x, ast.Slice) for x in ast.walk(asking.slice)) else _INDEX
    if isinstance(asking, ast.Call):
        called = asking.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name == "one_hot":
            return "Say how many classes there are: F.one_hot(y, num_classes=10)."
        return _SIZE if name in _OF_SIZES else ""
    return ""


def _asking(at: TracebackType | None) -> ast.expr | None:
    """The innermost expression of the user's code that was running, as Python notes its place."""
    found = None
    while at is not None:
        if is_users(at.tb_frame.f_code.co_filename):
            found = at
        at = at.tb_next
    return None if found is None else _expression(found)


def _expression(at: TracebackType) -> ast.expr | None:
    code = at.tb_frame.f_code
    place = next(islice(code.co_positions(), at.tb_lasti // 2, None))
    first, last, begin, end = place
    if first is None or last is None or begin is None or end is None:
        return None
    lines = [linecache.getline(code.co_filename, i).encode() for i in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # before the first, which may be the same line
    lines[0] = lines[0][begin:]
    try:
        return ast.parse(f"({b''.join(lines).decode()})", mode="eval").body
    except (SyntaxError, ValueError):
        return None
