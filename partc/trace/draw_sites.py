"""Name every random draw of a run by its *site*: the module that draws, and which draw it is there.

The tracer runs a model on fake tensors, and ``verify`` on real ones; both name the draws with this
class, and so give one draw one name. Two draws that start from the same state of torch's generator
draw the same numbers (``torch.utils.checkpoint`` resets the state before it computes again), so
they have the same site.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from partc.errors import TraceError
from partc.graph.draws import DRAWABLE, word_of
from partc.trace.source_lines import source_here

START = 0x7A6E64  # of the generator while a model runs, whatever the process has seeded


class Sites:
    """The draws of one run, in order; ``inside`` watches which module runs."""

    def __init__(self) -> None:
        self.paths = [("", "")]  # of the modules that run: as called from, and as registered
        self.known: set[str] = set()  # every state that the generator was in
        self.found: dict[tuple[str, str], str] = {}  # state and op -> site
        self.counts: Counter[str] = Counter()

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Watch the modules of ``model`` while they run, from a fixed state of the generator.

        The generator of the process has its own state again afterwards.
        """
        before = torch.default_generator.get_state()
        with ExitStack() as stack:
            stack.callback(torch.default_generator.set_state, before)
            for path, module in model.named_modules():
                entered = module.register_forward_pre_hook(self._enter(path), prepend=True)
                stack.callback(entered.remove)
                left = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(left.remove)
            torch.default_generator.manual_seed(START)
            self.known.add(_state())
            yield

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            called, registered = self.paths[-1]
            # A module that several others share is named after the one that calls it.
            inner = not registered or f"{path}.".startswith(f"{registered}.")
            rest = path.removeprefix(registered) if inner else f".{path.rpartition('.')[2]}"
            self.paths.append(((called + rest).lstrip("."), path))

        return hook

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self.paths.pop()

    def of(self, target: Any, kwargs: Mapping[str, Any]) -> str:
        """The site of a draw that is about to happen.

        Raises:
            TraceError: the op takes no generator, or one of the user's own; or the model has set
                the state of torch's generator itself.
        """
        _check(target, kwargs)
        with _disable_current_modes():
            state = _state()
            if state not in self.known:
                raise _moved()
            site = self.found.get((state, word_of(target)))
            torch.rand(())  # a run on fakes draws nothing
            self.known.add(_state())
        if site is None:
            site = self.found[state, word_of(target)] = self._fresh(word_of(target))
        return site

    def _fresh(self, word: str) -> str:
        path = self.paths[-1][0]
        # A block's own draw is named as if it were inside of the block: `h.3.rand`.
        alone = path and not path.rpartition(".")[2].isdigit()
        base = path if alone else f"{path}.{word}".lstrip(".")
        self.counts[base] += 1
        return base if self.counts[base] == 1 else f"{base}#{self.counts[base] - 1}"


@contextmanager
def unmoved_generator() -> Iterator[None]:
    """Give the generator afterwards the state that it has now."""
    with _disable_current_modes():
        before = torch.default_generator.get_state()
    yield
    with _disable_current_modes():
        torch.default_generator.set_state(before)


def _state() -> str:
    return hashlib.sha256(torch.default_generator.get_state().numpy().tobytes()).hexdigest()


def _check(target: Any, kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("generator") is not None:
        raise TraceError(
            where=source_here(),
            what=f"{word_of(target)} draws from a torch.Generator of the model's own",
            why="the numbers of a program follow from stage.seed() on every rank, and the state of "
            "such a generator from the process",
            do="Leave out generator=...",
        )
    if word_of(target) not in DRAWABLE or not str(target).startswith("aten."):
        raise TraceError(
            where=source_here(),
            what=f"{target} draws random numbers inside",
            why="it takes no generator, so that ranks and recomputations would draw as they like",
            do="Draw with torch.rand, torch.bernoulli, F.dropout or the like, and compute with "
            "that; or set its dropout to 0.",
        )


def _moved() -> TraceError:
    return TraceError(
        where=source_here(),
        what="torch's random generator was set while the model ran",
        why="the numbers of a program follow from stage.seed(), the step and the place in the "
        "model; manual_seed, set_rng_state and fork_rng would be without effect",
        do="Leave that call out, and give the number to stage.seed().",
    )
