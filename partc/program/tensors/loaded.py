"""Which of a rank's tensors have values: those that nobody has loaded cannot be computed with.

New memory is filled with NaN (whole numbers: their type's least), so that nothing that was computed
from it looks right. Whatever writes to a tensor loads it: ``load_full``, a state dict, a
checkpoint, ``nn.init``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from partc.errors import RunError
from partc.program.tensors.holders import exchange_texts

FEW = 4  # names in an error


class Loaded:
    """Watches a rank's tensors, by name, until the first step finds that all of them have values.

    ``read`` are the names of the tensors that a step reads; the others are only saved. Alike on all
    ranks is ``are_there``: whether values were given to all of them together, or found by a step.
    """

    def __init__(self, held: Mapping[str, Tensor], read: Iterable[str]) -> None:
        self._read = set(read)
        self._versions: dict[str, int] = {}  # of the tensors that nobody has written to yet
        self.empty(held)

    def empty(self, held: Mapping[str, Tensor]) -> None:
        """Take all tensors for unwritten, and let them look so."""
        self.are_there = self._found_all = False
        with torch.no_grad():
            for tensor in held.values():
                _spoil(tensor)
        self.watch(held, held)

    def watch(self, held: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Take these tensors for unwritten as they are now, and all others for written."""
        self._versions = {name: held[name]._version for name in names}

    def missing(self, held: Mapping[str, Tensor]) -> list[str]:
        """The names of the tensors that nobody has written to."""
        unchanged = [n for n, version in self._versions.items() if held[n]._version == version]
        self.watch(held, [name for name in unchanged if _is_spoilt(held[name])])
        return list(self._versions)

    def check(self, held: Mapping[str, Tensor], device: torch.device) -> None:
        """RunError on every rank if some rank has a tensor without values that the step reads.

        ``device`` is that of this rank's tensors, of which it may have none. All ranks call this
        together; once all tensors have values it costs nothing.
        """
        if self._found_all:
            return
        missing = [name for name in self.missing(held) if name in self._read]
        any_missing = torch.tensor(int(bool(missing)), device=device)
        dist.all_reduce(any_missing, dist.ReduceOp.MAX)
        if any_missing.item():
            raise _not_loaded(missing, device)
        self.are_there = self._found_all = True


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_spoilt(tensor: Tensor) -> bool:
    """Whether a tensor is as ``_spoil`` left it; a mask of bools tells nothing."""
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return tensor.dtype == torch.bool or bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _not_loaded(missing: list[str], device: torch.device) -> RunError:
    """The error of all ranks, which names the tensors of each."""
    more = f" and {len(missing) - FEW} more" if len(missing) > FEW else ""
    mine = ", ".join(missing[:FEW]) + more
    texts = exchange_texts(mine, dist.group.WORLD, device)
    if len(set(texts)) == 1:
        what = f"{mine} have no values"
    else:
        what = "; ".join(f"rank {r}: {text}" for r, text in enumerate(texts) if text)
        what += " have no values"
    return RunError(
        where="step",
        what=what,
        why="nothing was loaded into them since the stage was made, and no model lent its weights: "
        "that needs one with values on rank 0, which was compiled there or given to partc.load",
        do="Call stage.load_full(model), stage.load_state_dict, partc.load_checkpoint, or "
        "initialise them under torch.no_grad().",
    )
