"""Functions that generated programs carry: those a program calls are printed as they stand here.

Where backends differ, these are gloo's; ``nccl.py`` has NCCL's.
They may use torch, one another and the tables of the program, nothing else.
"""
# mypy: disable-error-code="override, assignment, arg-type, call-overload"
# (what programs wait for, they wait for without a limit)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

MESH: dict[str, int] = {}  # stand for the tables of a program
DTYPES: dict[str, torch.dtype] = {}


def empty(shape: tuple[int, ...], dtype: str, cuts: tuple[tuple[str, int, int], ...]) -> Tensor:
    """Memory for this rank's piece of a parameter or buffer."""
    for axis, dim, _ in cuts:
        shape = *shape[:dim], shape[dim] // MESH[axis], *shape[dim + 1 :]
    return torch.empty(shape, dtype=DTYPES[dtype])


def rows_within(table: dict[str, tuple[object, ...]], inner: str) -> dict[str, tuple[object, ...]]:
    """The rows of a table of a block's parameters or buffers that a block inside of it has."""
    rows = ((name.partition("."), row) for name, row in table.items())
    return {rest: row for (first, _, rest), row in rows if first == inner}


def add_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Add to a parameter's gradient, as autograd does."""
    param.grad = grad if param.grad is None else param.grad.add_(grad)


def add_weight_grad(weight: nn.Parameter, d_y: Tensor, x: Tensor) -> None:
    """Add the gradient of the weight in ``y = x @ weight.T``."""
    d_y, x = d_y.flatten(0, -2), x.flatten(0, -2)
    if weight.grad is None:
        weight.grad = d_y.T @ x
    else:
        weight.grad.addmm_(d_y.T, x)


class Sums(dict[nn.Parameter, Tensor]):
    """Gradients to which several calls of a module add."""

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        self[param] = self[param].add_(grad) if param in self else grad

    def add_product(self, weight: nn.Parameter, d_y: Tensor, x: Tensor) -> None:
        """Add the gradient of the weight in `y = x @ weight.T`."""
        d_y, x = d_y.flatten(0, -2), x.flatten(0, -2)
        if weight in self:
            self[weight].addmm_(d_y.T, x)
        else:
            self[weight] = d_y.T @ x


def room(params: list[nn.Parameter]) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    """Memory for gradients that leave in one transfer, and the part of it that each has."""
    sizes = [p.numel() for p in params]
    flat = params[0].new_empty(sum(sizes))
    return flat, {p: x.view(p.shape) for p, x in zip(params, flat.split(sizes), strict=True)}


class Reduced(list[tuple[dict[nn.Parameter, Tensor], dist.Work]]):
    def finish(self) -> None:
        """Wait for gradients that ranks are summing, and add them to those of the parameters."""
        while self:
            self[0][1].wait()
            for param, grad in self.pop(0)[0].items():  # the handle holds what was sent
                grad = grad.sum(0) if grad.dim() > param.dim() else grad  # all ranks' pieces
                param.grad = grad if param.grad is None else param.grad.add_(grad)


def summed(grads: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Gradients that have arrived, pieces of all ranks added up."""
    return {p: x.sum(0) if x.dim() > p.dim() else x for p, x in grads.items()}


class Gathered(list[tuple[list[Tensor], dist.Work]]):
    def take(self) -> list[Tensor]:
        """Wait for weights that ranks are gathering in pieces, and hand them over whole."""
        whole = []
        while self:
            pieces, done = self.pop(0)
            done.wait()
            whole += [x.flatten(0, 1) for x in pieces]
        return whole


def take_cut(gathered: Gathered, cuts: dict[int, tuple[int, int]]) -> list[Tensor]:
    """As ``gathered.take()``; ``cuts`` says which weights are cut elsewhere, at (dim, outer)."""
    nums = [len(x) for pieces, _ in gathered for x in pieces]
    whole = gathered.take()
    for i, cut in cuts.items():
        whole[i] = join(whole[i], nums[i], *cut)
    return whole


def gather(x: Tensor, num: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to gather the pieces of all ranks, one after the other on dim 0."""
    pieces = x.new_empty(num * x.shape[0], *x.shape[1:])
    return pieces, dist.all_gather_single(pieces, x.contiguous(), group=group, async_op=True)


def scatter_sum(x: Tensor, num: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to sum over the group and keep this rank's piece of dim 0."""
    x = x.contiguous()
    total, arrived = torch.empty_like(x[: x.shape[0] // num]), torch.empty_like(x)
    # gloo's reduce_scatter sends twice as much
    done = dist.all_to_all_single(arrived, x, group=group, async_op=True)
    return total, Exchanged(total, arrived.view(num, *total.shape), done)


def all_gather(
    x: Tensor, num: int, group: dist.ProcessGroup, dim: int = 0, outer: int = 1
) -> Tensor:  # fmt: skip
    """The whole of a tensor that is cut on ``dim``."""
    pieces, done = gather(x, num, group)
    done.wait()
    return join(pieces, num, dim, outer)


def reduce_scatter(
    x: Tensor, num: int, group: dist.ProcessGroup, dim: int = 0, outer: int = 1
) -> Tensor:  # fmt: skip
    """This rank's piece of ``dim`` of the sum over the group."""
    total, done = scatter_sum(in_pieces(x, num, dim, outer), num, group)
    done.wait()
    return total


def all_to_all(
    x: Tensor, num: int, group: dist.ProcessGroup, dim: int, to_dim: int, outer: int = 1,
    to_outer: int = 1,
) -> Tensor:  # fmt: skip
    """A tensor that is cut on ``dim``, cut on ``to_dim`` instead."""
    arrived, done = exchange(x, num, group, to_dim, to_outer)
    done.wait()
    return join(arrived, num, dim, outer)


class Exchanged(dist.Work):
    """A sum whose pieces go to the ranks that keep them, to be added up in the ranks' order."""

    def __init__(self, total: Tensor, arrived: Tensor, done: dist.Work) -> None:
        super().__init__()
        self.total, self.arrived, self.done = total, arrived, done

    def wait(self) -> bool:
        self.done.wait()
        torch.sum(self.arrived, 0, out=self.total)
        del self.arrived, self.done  # which holds what was sent
        return True


def cast(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """This rank's pieces of weights in the dtype in which the forward reads the weights."""
    return [weight.to(dtype) for weight in weights]


def gather_weights(shards: list[Tensor], num: int, group: dist.ProcessGroup) -> Gathered:
    """Start one transfer of all ranks' pieces of weights."""
    mine = torch.cat([x.flatten() for x in shards]) if len(shards) > 1 else shards[0].flatten()
    flat = mine.new_empty(num * mine.numel())
    done = dist.all_gather_single(flat, mine, group=group, async_op=True)
    parts = zip(flat.view(num, -1).split([x.numel() for x in shards], 1), shards, strict=True)
    return Gathered([([part.view(num, *x.shape) for part, x in parts], done)])


def sum_grads(
    grads: dict[nn.Parameter, Tensor], group: dist.ProcessGroup
) -> tuple[dict[nn.Parameter, Tensor], dist.Work]:
    """Start to sum gradients over the group in one transfer."""
    parts = [x.flatten() for x in grads.values()]
    flat = torch.cat(parts) if len(parts) > 1 else parts[0]
    done = dist.all_reduce(flat, group=group, async_op=True)
    parts = flat.split([x.numel() for x in grads.values()])
    sums = zip(grads.items(), parts, strict=True)
    return {p: part.view(x.shape) for (p, x), part in sums}, done


def scatter_grads(
    grads: dict[nn.Parameter, Tensor], num: int, group: dist.ProcessGroup
) -> tuple[dict[nn.Parameter, Tensor], dist.Work]:
    """Start to sum gradients in one transfer, of which this rank keeps its pieces."""
    pieces = [x.reshape(num, -1) for x in grads.values()]
    sent = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]
    arrived = torch.empty_like(sent)  # gloo's reduce_scatter sends twice as much
    done = dist.all_to_all_single(arrived, sent, group=group, async_op=True)
    parts = zip(grads.items(), arrived.split([x.shape[1] for x in pieces], 1), strict=True)
    return {p: part.unflatten(1, (len(x) // num, *x.shape[1:])) for (p, x), part in parts}, done


def gather_grads(
    grads: dict[nn.Parameter, Tensor], num: int, group: dist.ProcessGroup
) -> tuple[dict[nn.Parameter, Tensor], dist.Work]:
    """Start to gather the ranks' pieces of summed gradients."""
    [(pieces, done)] = gather_weights([*grads.values()], num, group)
    gathered = GatheredGrads(dict(zip(grads, pieces, strict=True)), done)
    return gathered.grads, gathered


class GatheredGrads(dist.Work):
    """Gradients in pieces; when waited for, ``grads`` has the whole ones."""

    def __init__(self, grads: dict[nn.Parameter, Tensor], done: dist.Work) -> None:
        super().__init__()
        self.grads, self.done = grads, done

    def wait(self) -> bool:
        self.done.wait()
        self.grads |= {p: pieces.flatten(0, 1) for p, pieces in self.grads.items()}
        return True


def move_grads(
    grads: dict[nn.Parameter, Tensor], num: int, group: dist.ProcessGroup, dim: int, to_dim: int,
    outer: int = 1, to_outer: int = 1,
) -> dict[nn.Parameter, Tensor]:  # fmt: skip
    """Gradients that are cut on ``dim``, cut on ``to_dim`` instead."""
    cuts = dim, to_dim, outer, to_outer
    return {p: all_to_all(grad, num, group, *cuts) for p, grad in grads.items()}


def exchange(
    x: Tensor, num: int, group: dist.ProcessGroup, dim: int, outer: int = 1
) -> tuple[Tensor, dist.Work]:
    """Start to send piece ``i`` of ``dim`` to rank ``i``; what arrives lies on dim 0."""
    pieces = in_pieces(x, num, dim, outer)
    arrived = torch.empty_like(pieces)
    return arrived, dist.all_to_all_single(arrived, pieces, group=group, async_op=True)


def in_pieces(x: Tensor, num: int, dim: int, outer: int = 1) -> Tensor:
    """The ``num`` pieces of ``dim``, cut in the rest of (outer, rest), in a row on dim 0."""
    pieces: Tensor = x.unflatten(dim, (outer, num, -1)).movedim(dim + 1, 0)
    return pieces.flatten(dim + 1, dim + 2).flatten(0, 1).contiguous()


def join(pieces: Tensor, num: int, dim: int, outer: int = 1) -> Tensor:
    """The whole from pieces that lie one after the other on dim 0: the inverse of ``in_pieces``."""
    parts: Tensor = pieces.unflatten(0, (num, -1)).unflatten(dim + 1, (outer, -1))
    return parts.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def piece(x: Tensor, num: int, index: int, dim: int, outer: int) -> Tensor:
    """Piece ``index`` of ``num`` of a dim seen as (outer, rest) and cut in rest."""
    pieces: Tensor = x.unflatten(dim, (outer, num, -1))
    return pieces.select(dim + 1, index).flatten(dim, dim + 1)


def weight_grad(d_y: Tensor, x: Tensor) -> Tensor:
    """Gradient of the weight in ``y = x @ weight.T``."""
    return d_y.flatten(0, -2).T @ x.flatten(0, -2)


def write_weight_grad(out: Tensor, d_y: Tensor, x: Tensor) -> None:
    """Write the gradient of the weight in ``y = x @ weight.T``."""
    torch.mm(d_y.flatten(0, -2).T, x.flatten(0, -2), out=out)


def log_softmax_over(x: Tensor) -> Tensor:
    """Log-probabilities by the last dim, written over their logits a few rows at a time."""
    for rows in x.chunk(16):
        rows.copy_(rows.log_softmax(-1))
    return x


def cross_entropy_grad(
    d_loss: Tensor, p: Tensor, target: Tensor, place: Tensor, ignored: int
) -> Tensor:
    """Gradient of a summed cross entropy, over its softmax; ``place`` < 0 is another rank's."""
    scale, place = torch.where(target == ignored, 0, d_loss)[:, None], place[:, None]
    return p.mul_(scale).scatter_add_(1, place.clamp(min=0), torch.where(place < 0, 0, -scale))


def window(
    ids: Tensor, index: int, rows: int, ignore: int | None = None, outside: int = -1, of: int = 0
) -> Tensor:
    """Indices counted from rank ``index``'s first row of ``rows``; others become ``outside``.

    An index is ``ignore`` or one of the ``of`` rows of all ranks. The device checks that, as torch
    does where a table is whole, and nothing waits for it.
    """
    local = ids - index * rows
    mine, known = (local >= 0) & (local < rows), (ids >= 0) & (ids < of)
    if ignore is not None:
        mine, known = mine & (ids != ignore), known | (ids == ignore)
    if of:
        torch._assert_async(known.all(), f"index out of range of {of} rows")
    return torch.where(mine, local, outside)
