"""A printed class for sums of gradients as products of thin matrices (PowerSGD)."""
# mypy: disable-error-code="override, assignment, arg-type, call-overload"
# (what programs wait for, they wait for without a limit)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from partc.codegen.helpers.narrow_sums import NarrowSum


class LowRankSum(NarrowSum):
    """A gradient M [a, b] is sent as M @ Q [a, rank], and then as M.T @ P [b, rank] (PowerSGD).

    Q are orthonormal columns made from the last step's M.T @ P, and P those made from the sum of
    M @ Q. The sum of M becomes P @ (sum of M.T @ P).T. Gradients of which this is not less than
    half are summed as they are. `state` has what this rank has not sent, and the last M.T @ P.
    """

    def __init__(
        self, flat: Tensor, grads: list[Tensor], rank: int, state: list[Tensor],
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        super().__init__(flat, state, group)
        self.grads, self.rank = grads, rank
        self.x = self.with_rest(flat.flatten().to(torch.float32))
        thick, others = self.parts(self.x)
        last = state[1].to(torch.float32).split([m.shape[1] for m in thick])
        sent = [m @ self.orthonormal(q) for m, q in zip(thick, last, strict=True)]
        self.sums = torch.cat([m.flatten() for m in (*sent, *others)])
        self.done = dist.all_reduce(self.sums, group=group, async_op=True)

    def parts(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients in `x` that are sent as products, and all others."""
        parts = x.split([grad.numel() for grad in self.grads])
        every = [part.view(len(grad), -1) if grad.dim() > 1 else part.view(1, -1)
                 for part, grad in zip(parts, self.grads, strict=True)]  # fmt: skip
        thick = [m for m in every if 2 * self.rank * sum(m.shape) < m.numel()]
        return thick, [m for m in every if 2 * self.rank * sum(m.shape) >= m.numel()]

    def orthonormal(self, columns: Tensor) -> Tensor:
        """Orthonormal columns that span the given ones; of the two of a direction the one that
        does not depend on how numbers were rounded.
        """
        q, r = torch.linalg.qr(columns)
        found: Tensor = q * torch.where(r.diagonal() < 0, -1, 1)
        return found

    def pass_on(self) -> None:
        """Wait for the sum of M @ Q, and start that of M.T @ P."""
        self.done.wait()
        unsent = self.x.clone()
        thick, others = self.parts(unsent)
        sizes = [self.rank * len(m) for m in thick]
        *sums, self.others = self.sums.split([*sizes, sum(m.numel() for m in others)])
        self.p = [self.orthonormal(each.view(-1, self.rank)) for each in sums]
        sent = [m.T @ p for m, p in zip(thick, self.p, strict=True)]
        for m, p, q in zip(thick, self.p, sent, strict=True):
            m -= p @ q.T
        for m in others:
            m.zero_()
        self.lost = [unsent]
        self.sums = torch.cat(sent)
        self.done = dist.all_reduce(self.sums, group=self.group, async_op=True)
        self.passed = True

    def wait(self) -> bool:
        self.done.wait()
        thick, others = self.parts(self.x)
        q = self.sums.split([m.shape[1] for m in thick])
        summed = self.others.split([m.numel() for m in others])
        for m, p, each in zip(thick, self.p, q, strict=True):
            m.copy_(p @ each.T)
        for m, each in zip(others, summed, strict=True):
            m.copy_(each.view(m.shape))
        self.write(self.x)
        self.lost.append(self.sums)
        del self.x, self.p, self.others, self.done
        return True
