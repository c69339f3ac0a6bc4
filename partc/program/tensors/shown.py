"""The parameters that a user of a stage sees: DTensors over the memory of the program's own.

The program's text reads and writes plain tensors, this rank's pieces. Each shown parameter is a
DTensor of the same memory, and so is its gradient after a step. What a user does to a shown
gradient (sets it to None, scales it, writes another) is read before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from partc.errors import RunError
from partc.program.role import Shard
from partc.program.tensors.homes import Follower, HomeTensor, lie_alike
from partc.program.tensors.outside import Outside, check_in_pipeline


@dataclass(frozen=True)
class Layouts:
    """Turns a plain piece into what a user sees, and back.

    ``parameter`` and ``gradient`` give a DTensor over the piece's memory. ``piece`` gives this
    rank's piece of a DTensor of any layout, or of a whole tensor.
    """

    parameter: Callable[[Shard, Tensor], Tensor]
    gradient: Callable[[Shard, Tensor], Tensor]
    piece: Callable[[Shard, Tensor], Tensor]


class Shown:
    """One parameter of the program, ``piece``, and the DTensor that shows it, ``param``."""

    def __init__(self, shard: Shard, piece: nn.Parameter, layouts: Layouts) -> None:
        self.shard, self.piece, self.layouts = shard, piece, layouts
        self.trained = piece.requires_grad  # whether the program computes its gradient
        self._own_hooks: set[int] = set()
        self.param = self._made()
        self._grads: tuple[Tensor | None, Tensor | None] = (None, None)  # as last seen
        self._outside = Outside()
        self._storage = self.param.untyped_storage()
        self._aside: Tensor | None = None  # the gradient of one that was frozen since
        self.was_assigned = False  # to its data, since the last step

    @property
    def is_frozen(self) -> bool:
        """Whether the user froze it: it then keeps the gradient that it has."""
        return not (self.param.requires_grad and self.piece.requires_grad)

    def train(self) -> None:
        """Another program of the stage computes its gradient."""
        if not self.trained:
            self.trained = True
            self.piece.requires_grad_(True)
            self.param.requires_grad_(True)
            self._watch(self.param)

    # gradients -------------------------------------------------------------------------------
    def read(self) -> None:
        """Give the program what the user did to the gradient; RunError if it cannot be known."""
        shown, piece = self.param.grad, self.piece.grad
        last_shown, last_piece = self._grads
        both = shown is not last_shown and piece is not last_piece
        if both and not (shown is None and piece is None):
            raise _two_gradients(self.shard)
        if shown is not last_shown:
            self._take(shown)
        elif piece is not None and piece is last_piece and self._outside.is_at(shown):
            if self._outside.misses(piece):
                raise _two_gradients(self.shard)
            self._outside.read(self._over(piece), piece)
        self.show()

    @torch.no_grad()
    def _take(self, shown: Tensor | None) -> None:
        """Take a gradient that the user has set: its memory, if that is as the program's own."""
        self._outside = Outside()
        if shown is None or self._lies_as_own(shown):
            self.piece.grad = None if shown is None else self.layouts.piece(self.shard, shown)
            return
        if isinstance(self.param, HomeTensor) and self.param.home.in_pipeline:
            check_in_pipeline(shown, self.shard.name)
        self._outside = Outside(shown)
        piece = self.piece.grad = torch.empty_like(self.piece, dtype=shown.dtype)
        self._outside.read(self._over(piece), piece)
        self._grads = shown, piece

    def _lies_as_own(self, shown: Tensor) -> bool:
        if isinstance(self.param, HomeTensor):
            return lie_alike(self.param, shown)
        return shown.stride() == self.piece.stride()

    def _over(self, piece: Tensor) -> Tensor:
        return self.layouts.gradient(self.shard, piece)

    def write_back(self) -> None:
        """Write the program's gradient into the tensor that the user has set as the gradient."""
        shown, piece = self.param.grad, self.piece.grad
        if piece is not None and self._outside.is_at(shown):
            self._outside.write(self._over(piece), piece)
            self._grads = shown, piece

    @torch.no_grad()
    def show(self) -> None:
        """Show the program's gradient to the user."""
        shown, piece = self.param.grad, self.piece.grad
        if piece is not None and self._outside.is_at(shown) and self._outside.misses(piece):
            self.write_back()
        if piece is None:
            self.param.grad = None
        elif piece is not self._grads[1] or shown is not self._grads[0]:
            if (
                piece.stride() != self.piece.stride()
            ):  # as autograd sees to; fused kernels rely on it
                piece = self.piece.grad = torch.empty_like(self.piece).copy_(piece)
            shown = self.param.grad = self._over(piece)
            if isinstance(shown, HomeTensor):
                shown.follower, shown.is_own = Follower(self._grad_moved), True
        self._grads = self.param.grad, piece

    def _grad_moved(self, shown: Tensor, piece: Tensor) -> None:
        """The user has assigned other memory to the data of a gradient that was shown."""
        if self.param.grad is shown:
            self.piece.grad = piece
            self._grads = shown, self.piece.grad

    @torch.no_grad()
    def _accumulated(self) -> None:
        """Autograd has added to the gradient, perhaps in a tensor of its own making."""
        made, before = self.param.grad, self._grads[0]
        if made is None or made is before or made.requires_grad:
            self.read()
        elif before is not None:  # which the user may hold
            self.param.grad = before.copy_(made)
            self.read()
        else:
            self._take(made)
            self._outside, self._grads = Outside(), (None, None)
            self.show()

    def begin(self) -> None:
        """Before a step: read the gradient, and set that of a frozen parameter aside."""
        self._check_data()
        if self.trained:
            self.read()
            if self.is_frozen:
                self._aside, self.piece.grad = self.piece.grad, None
        elif self.param.requires_grad:
            raise _never_trained(self.shard)

    def end(self) -> None:
        """After a step: show the gradient; a frozen parameter has what it had."""
        if self.trained:
            if self.is_frozen:
                self._aside, self.piece.grad = None, self._aside
            self.write_back()
            self.show()

    def like_param(self, grad: Tensor) -> Tensor:
        """A piece of a gradient as autograd hands it to the shown parameter."""
        return self.layouts.parameter(self.shard, grad)

    def _check_data(self) -> None:
        """RunError if what the user assigned to ``.data`` does not reach the program."""
        value, version = getattr(self.param, "assigned", None) or (self.param, None)
        if version not in (None, value._version):
            raise _data_changed(self.shard)
        if self.param.untyped_storage() is not self._storage:
            raise _data_assigned(self.shard)

    # memory ----------------------------------------------------------------------------------
    def _moved(self, param: Tensor, piece: Tensor) -> None:
        """The user has assigned other memory to the parameter's data."""
        if param is self.param:
            self.piece.data = self._local = piece
            torch.autograd.graph.increment_version(self.piece)  # as any write
            self.was_assigned = True

    def renew(self, piece: nn.Parameter) -> None:
        """Show another piece (``.to()`` may have moved it) by the same nn.Parameter as before."""
        if piece is self.piece and _memory(piece) == _memory(self._local):
            return
        self.piece = piece
        made = self._made().requires_grad_(self.param.requires_grad)
        torch.utils.swap_tensors(self.param, made)
        self._storage = self.param.untyped_storage()
        self.show()

    def _made(self) -> nn.Parameter:
        self._local = self.piece.detach()
        param = nn.Parameter(self.layouts.parameter(self.shard, self._local), self.trained)
        if isinstance(param, HomeTensor):
            param.follower, param.is_own = Follower(self._moved), True
        if self.trained:
            self._watch(param)
        return param

    def _watch(self, param: nn.Parameter) -> None:
        """Follow what autograd adds to the shown gradient.

        The hooks hold no stage: torch keeps them where the garbage collector does not look, so that
        weights and process groups of a stage that nobody has any more would stay.
        """
        read, accumulated = WeakMethod(self.read), WeakMethod(self._accumulated)
        before = param.register_hook(partial(_call, read))  # what is added to it comes next
        behind = param.register_post_accumulate_grad_hook(partial(_call, accumulated))
        self._own_hooks |= {before.id, behind.id}  # also where another tensor was swapped in

    def check_no_hooks(self) -> None:
        """RunError in ``step`` for hooks of the user's, which ``backward`` alone runs."""
        tables = (self.param._backward_hooks, self.param._post_accumulate_grad_hooks)
        if any(key not in self._own_hooks for table in tables for key in table or ()):
            raise RunError(
                where=self.shard.name, what="it has a gradient hook, which step does not run",
                why="step computes gradients in the program, without autograd",
                do="Write loss = stage(...) and loss.backward(), which run it; or change .grad "
                "between stage.step(...) and optimizer.step().",
            )  # fmt: skip


def _call(method: WeakMethod[Callable[[], None]], _: Tensor) -> None:
    if (bound := method()) is not None:
        bound()


def begin_all(shown: Collection[Shown]) -> None:
    """Before a step: read all gradients."""
    if any(each.was_assigned for each in shown):
        _check_memory(shown)
    for each in shown:
        each.begin()


def end_all(shown: Iterable[Shown]) -> None:
    """After a step: show all gradients."""
    for each in shown:
        each.end()


def register_at(root: nn.Module, name: str, tensor: Tensor, saved: bool) -> None:
    """Register a tensor at a dotted name of a module.

    Written into the tables directly, since ``register_parameter`` refuses names that Stage has as
    attributes (``step``).
    """
    *path, leaf = name.split(".")
    for part in path:
        child = root._modules.get(part)
        root._modules[part] = root = child if child is not None else nn.Module()
    if isinstance(tensor, nn.Parameter):
        root._parameters[leaf] = tensor
        return
    root._buffers[leaf] = tensor
    if not saved:
        root._non_persistent_buffers_set.add(leaf)


def _check_memory(shown: Iterable[Shown]) -> None:
    """RunError if two parameters have the same memory, after assignments to their data."""
    last, end = None, 0
    for each in sorted(shown, key=lambda each: each.piece.data_ptr()):
        begin = each.piece.data_ptr()
        if last is not None and begin < end and each.piece.numel():
            raise _shared_memory(last.shard, each.shard)
        last, end = each, begin + each.piece.numel() * each.piece.element_size()
        each.was_assigned = False


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _two_gradients(shard: Shard) -> RunError:
    return RunError(
        where=f"{shard.name}.grad",
        what="was changed in stage.parameters() and in stage.pieces() since the last step",
        why="both are one gradient, and partc cannot know which of the two is meant",
        do="Set the gradients of stage.parameters() alone.",
    )


def _shared_memory(one: Shard, other: Shard) -> RunError:
    return RunError(
        where=f"{other.name}.data",
        what=f"is the memory of {one.name}",
        why="the program was compiled for two parameters, each with memory of its own",
        do=f"Write parameter.copy_(values) under torch.no_grad(), or tie {one.name} and "
        f"{other.name} in the model and compile again.",
    )


def _data_assigned(shard: Shard) -> RunError:
    return RunError(
        where=f"{shard.name}.data",
        what="was assigned another tensor",
        why="a program without a mesh keeps the memory that it had",
        do="Write parameter.copy_(values) under torch.no_grad().",
    )


def _data_changed(shard: Shard) -> RunError:
    return RunError(
        where=f"{shard.name}.data",
        what="was assigned a tensor that was changed since",
        why="its values were copied when they were assigned: each rank holds its piece of them",
        do="Write to the parameter itself under torch.no_grad().",
    )


def _never_trained(shard: Shard) -> RunError:
    return RunError(
        where=f"{shard.name}.requires_grad",
        what="is True, but the program computes no gradient for it",
        why="it was frozen when the model was compiled",
        do="Freeze behind the compile what is to be trained later: leave requires_grad=True until "
        "then (model.compile_for(*batch) of parallelize, .module() of a program, on_train_start of "
        "a Lightning callback), and call requires_grad_(False) after it.",
    )
