"""Refuse a step that makes a layer with parameters, or a parameter, and computes with it.

``nn.Linear(4, 4)(x)`` in a forward has other random weights in every step, and no optimizer has
them. Layers without parameters (``nn.ReLU()``, ``nn.MSELoss()``) may be made there.
"""

from __future__ import annotations

from torch import Tensor, nn

from partc.errors import TraceError
from partc.plan.sharding import dtype_name
from partc.trace.contents import Contents, memory_of
from partc.trace.swallowed import Refused
from partc.users_line import warn


def check_made(leaf: Tensor, contents: Contents) -> None:
    """TraceError for a parameter that the step made and that its loss depends on.

    A tensor of random numbers with ``requires_grad`` is told of alone, as it may be meant for
    noise. Nothing is said of what the step itself may have taken derivatives by.
    """
    made, source = contents.leaves.get(memory_of(leaf), (None, ""))
    if isinstance(leaf, nn.Parameter) and (made is not None or not Refused.derived):
        raise _made_here(leaf, source)
    if made is not None and contents.is_drawn(made) and contents.run == 1 and not Refused.derived:
        warn(
            f"{source or 'the step'}: it draws {_told(leaf)} anew in every step, and gives it "
            "requires_grad: it is never trained. If it is to be a weight, make it an nn.Parameter "
            "in __init__; of noise leave requires_grad out"
        )  # fmt: skip


def check_none_made(contents: Contents) -> None:
    """The same of a step without gradients: TraceError for any such parameter that it reads."""
    for leaf, source in contents.leaves.values():
        if isinstance(leaf, nn.Parameter):
            raise _made_here(leaf, source)


def _made_here(param: Tensor, source: str) -> TraceError:
    return TraceError(
        where=source or _told(param),
        what=f"the step makes a parameter {_told(param)}, and computes with it",
        why="it is made anew in every step, so that no optimizer trains it: weights of a layer "
        "that forward makes are other random numbers each time",
        do="Make the layer, or the nn.Parameter, in __init__, and call it in forward: "
        "self.fc = nn.Linear(...), then self.fc(x). A norm without parameters has affine=False, or "
        "elementwise_affine=False.",
    )


def _told(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"
