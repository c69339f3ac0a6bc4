"""Let the single-device model draw the numbers that the pieces of a program draw.

Each draw of the model is found by its site, as the tracer found it. A program cuts what it draws
into pieces, each with numbers of its own (``draws.seed_of``): the whole is put together from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from partc.errors import UsageError
from partc.graph.draws import FILLS, LIKES, SORTED, UNREAD, Draw, seed_of, takes_numbers, word_of
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.sharding import take_piece
from partc.trace.draw_sites import Sites, unmoved_generator
from partc.trace.portable_kernels import portable_kernels

CPU = torch.device("cpu")
SEED, STEP = 0, 1  # of the step that is compared
Make = Callable[[Sequence[Tensor], tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True)
class SameDraws:
    """What a program draws at each site, on the mesh axes ``axes`` in order; on ``device``, as
    equal seeds give other numbers on a GPU than on a CPU.
    """

    draws: Mapping[str, Draw] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    device: torch.device = CPU

    @contextmanager
    def inside(self, model: nn.Module, at: Mapping[str, int] | None = None) -> Iterator[None]:
        """While this is open, ``model`` draws what the program does.

        ``at``: the coordinates of the one piece of the batch that runs, if not all of them do.

        Raises:
            UsageError: the program does not draw where the model does.
        """
        sites = Sites()
        kernels = portable_kernels() if self.draws else nullcontext()  # those that were traced
        with sites.inside(model), kernels, _Mode(self, sites, dict(at or {})):
            yield


class _Mode(TorchDispatchMode):
    def __init__(self, same: SameDraws, sites: Sites, at: dict[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.same, self.sites, self.at = same, sites, at
        self.by_name = {draw.name: (site, draw) for site, draw in same.draws.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not takes_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        name = self.sites.of(func, kwargs)
        if name not in self.by_name:
            raise _unknown(name)
        site, draw = self.by_name[name]
        if draw.kind == SORTED:
            raise _sorted_rows(name)
        if draw.kind == UNREAD:
            with unmoved_generator():
                return func(*args, **kwargs)
        into = kwargs.pop("out", None)
        result = _drawn(func, args, kwargs, _Pieces(site, draw, self.same, self.at))
        return result if into is None else into.copy_(result)


@dataclass(frozen=True)
class _Pieces:
    """The pieces of one draw."""

    site: str
    draw: Draw
    same: SameDraws
    at: Mapping[str, int]

    def whole(self, make: Make, operands: Sequence[Tensor] = ()) -> Tensor:
        """The value with each piece as ``make(pieces of the operands, shape, generator)`` gives it.

        Where one piece of the batch runs, operands and result are of that piece.
        """
        places = torch.arange(prod(self.draw.shape)).view(self.draw.shape)
        fixed = [cut for cut in self.draw.cuts if cut[0] in self.at]
        here = self._taken(places, fixed, self.at)
        found: Tensor | None = None
        for coords in product(*(range(num) for *_, num in self.draw.cuts)):
            index = dict(zip((axis for axis, *_ in self.draw.cuts), coords, strict=True))
            if any(index[axis] != self.at[axis] for axis, *_ in fixed):
                continue
            mine = self._taken(places, self.draw.cuts, index)
            open_cuts = [cut for cut in self.draw.cuts if cut not in fixed]
            given = [self._taken(x, open_cuts, index).contiguous() for x in operands]
            piece = self._made(make, given, tuple(mine.shape), index)
            if found is None:
                found = piece.new_zeros(self.draw.shape)
            found.view(-1)[mine.flatten()] = piece.flatten()
        assert found is not None
        return found.view(-1)[here.flatten()].view(here.shape)

    def _made(
        self, make: Make, operands: Sequence[Tensor], shape: tuple[int, ...],
        index: Mapping[str, int],
    ) -> Tensor:  # fmt: skip
        """One piece, drawn where the program draws it."""
        device = self.same.device
        with device:
            return make([x.to(device) for x in operands], shape, self._generator(index)).cpu()

    def _taken(
        self, x: Tensor, cuts: Sequence[tuple[str, int, int, int]], index: Mapping[str, int]
    ) -> Tensor:
        for axis, dim, outer, num in cuts:
            x = take_piece(x, dim, outer, num, index[axis])
        return x

    def _generator(self, index: Mapping[str, int]) -> torch.Generator:
        """The generator of one piece: a function of seed, step, microbatch, site and place."""
        place = tuple(index[axis] for axis in self.same.axes if axis in index)
        return torch.Generator(self.same.device).manual_seed(
            seed_of(SEED, STEP, index.get(MICROBATCH_AXIS), self.site, place)
        )


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], pieces: _Pieces) -> Any:
    """What a random op gives, on pieces; an in-place op writes it into its tensor."""
    word = word_of(func)
    if word == "native_dropout":
        return _dropout(args[0], args[1], pieces)
    if word == "rrelu_with_noise":
        return _rrelu(*args, pieces=pieces)
    result = pieces.whole(*_call(func, word, args, kwargs))
    return args[0].copy_(result) if _is_in_place(func) else result


def _call(
    func: Any, word: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Make, Sequence[Tensor]]:
    """How a piece is drawn, and the tensors whose pieces it reads."""
    if word in LIKES:
        return _like(word, args, kwargs), ()
    if word == "bernoulli" and func._overloadname == "Tensor":
        return _of("bernoulli", (), {}), [args[1].expand_as(args[0])]
    if _is_in_place(func) or (word in FILLS and func is not torch.ops.aten.bernoulli.default):
        return _fill(word, args, kwargs), ()
    operands = [a for a in args if isinstance(a, Tensor)]
    if not operands:
        return _factory(word, args, kwargs), ()
    if word == "normal":
        return _normal(args), torch.broadcast_tensors(*operands)
    rest = tuple(a for a in args if not isinstance(a, Tensor))
    make = _of(func._schema.name.removeprefix("aten::"), rest, kwargs)
    return make, operands if word == "multinomial" else torch.broadcast_tensors(*operands)


def _is_in_place(func: Any) -> bool:
    return bool(func._schema.name.endswith("_"))


def _fill(word: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Make:
    name = "normal_" if word.startswith("normal") else f"{word}_"

    def make(_: Sequence[Tensor], shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        filled: Tensor = getattr(torch.empty(shape, dtype=args[0].dtype), name)(
            *args[1:], **{**kwargs, "generator": rng}
        )
        return filled

    return make


def _like(word: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Make:
    dtype = kwargs.get("dtype") or args[0].dtype
    draw: Any = getattr(torch, word.removesuffix("_like"))

    def make(_: Sequence[Tensor], shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        made: Tensor = draw(*args[1:], shape, generator=rng, dtype=dtype)
        return made

    return make


def _factory(word: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Make:
    given = {"dtype": kwargs["dtype"]} if kwargs.get("dtype") else {}
    draw: Any = getattr(torch, word)
    sized = word != "randperm"  # whose argument is a number, and whose result is never cut

    def make(_: Sequence[Tensor], shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        plain = [a for a in args if not isinstance(a, list | tuple)]
        made: Tensor = draw(*plain, *([shape] if sized else []), generator=rng, **given)
        return made

    return make


def _normal(args: tuple[Any, ...]) -> Make:
    def make(operands: Sequence[Tensor], _: tuple[int, ...], rng: torch.Generator) -> Tensor:
        left = iter(operands)
        mean, std = (next(left) if isinstance(a, Tensor) else a for a in (*args, 1.0)[:2])
        return torch.normal(mean, std, generator=rng)

    return make


def _of(name: str, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Make:
    draw: Any = getattr(torch, name)
    given = {key: each for key, each in kwargs.items() if key != "generator"}

    def make(operands: Sequence[Tensor], _: tuple[int, ...], rng: torch.Generator) -> Tensor:
        made: Tensor = draw(*operands, *rest, generator=rng, **given)
        return made

    return make


def _dropout(x: Tensor, p: float, pieces: _Pieces) -> tuple[Tensor, Tensor]:
    drawn = pieces.whole(_fill("bernoulli", (x, 1 - p), {}))
    scaled = x * drawn
    return (scaled / (1 - p) if p < 1 else scaled), drawn.bool()


def _rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    *_: Any, pieces: _Pieces,
) -> Tensor:  # fmt: skip
    drawn = pieces.whole(_fill("uniform", (noise, lower, upper), {}))
    return x * noise.copy_(torch.where(x <= 0, drawn, torch.ones_like(drawn)))


def _unknown(name: str) -> UsageError:
    return UsageError(
        where=name,
        what="the model draws random numbers here, and the program does not",
        why="it was compiled from another model, or its list of draws is missing",
        do="Compile the program again from this model.",
    )


def _sorted_rows(name: str) -> UsageError:
    return UsageError(
        where=name,
        what="what the program draws here cannot be compared",
        why="each rank draws for rows that it has sorted by itself, in an order of its own",
        do="Set this dropout to 0, compile that and verify it.",
    )
