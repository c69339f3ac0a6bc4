"""Which library carries tensors between ranks in the default process group.

A module of its own, since a compile asks it, and needs nothing else of what runs programs.
"""

from __future__ import annotations

import torch.distributed as dist

from partc.plan.decided import BACKENDS


def group_backend(device_type: str) -> str | None:
    """What carries tensors of a kind of device in the default process group, ``gloo`` or ``nccl``.

    None without a group, or where another library carries them.
    """
    kinds = dist.get_backend_config().split(",") if dist.is_initialized() else []
    found = (kind.rpartition(":") for kind in kinds)
    carrying = (library for of, colon, library in found if not colon or of == device_type)
    return next((library for library in carrying if library in BACKENDS), None)
