"""A LightningModule as a model that partc compiles, and as one that shows a stage's parameters.

In: a LightningModule. Out: the same object without its trainer, for ``partc.compile``; and with the
parameters of a stage, while its modules compute by the stage's programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partc.errors import RunError, TraceError
from partc.program.step.results import Results

Call = Callable[..., Any]
Tables = dict[nn.Module, dict[str, Any]]
OF_TENSORS = ("_parameters", "_buffers")


class Compiled:
    """A LightningModule in ``Trainer.fit``: what partc compiles of it, and what then computes it.

    In ``compiling()`` it has parameters of its own, once it shows a stage without values, and no
    trainer. Outside of it it has the stage's parameters.
    """

    def __init__(self, module: Any, autocast: Call) -> None:
        self.module, self.autocast = module, autocast
        self._trainer, self._own = _NoTrainer(type(module).__name__), _tables(module)
        self._modes, self._part = (
            _modes(module),
            self._forward,
        )  # one object, as programs look at it
        self._paths = {part: path for path, part in module.named_modules() if _holds(part)}

    # compiled --------------------------------------------------------------------------------
    @contextmanager
    def compiling(self, **changed: Any) -> Iterator[Any]:
        """The module as it is compiled; ``changed``: attributes that it has meanwhile."""
        attributes, shown = vars(self.module), _tables(self.module)
        changed["_trainer"] = self._trainer
        before = {name: attributes[name] for name in changed if name in attributes}
        _set_tables(self._own)
        attributes.update(changed)
        try:
            yield self.module
        finally:
            for name in changed:
                del attributes[name]
            attributes.update(before)
            _set_tables(shown)

    def _forward(self, part: str, *args: Any, **kwargs: Any) -> Any:
        """What a part of the module computes; for no path the module itself."""
        with self.autocast():
            if part:
                return self.module.get_submodule(part)(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    # shown -----------------------------------------------------------------------------------
    def show(self, like: nn.Module) -> None:
        """Give the module the parameters and buffers of a stage, and free its own parameters."""
        parts = dict(like.named_modules(remove_duplicate=False))
        self._own = _with_params(self._own, lambda p: torch.empty_like(p, device="meta"))
        for path, part in self.module.named_modules(remove_duplicate=False):
            vars(part).update({table: vars(parts[path])[table] for table in OF_TENSORS})

    def give_back(self, state: Mapping[str, Tensor] | None) -> None:
        """Let the module have tensors of its own again, with these values; None: without any."""
        if state is not None:
            self._own = _with_params(self._own, lambda p: torch.empty_like(p, device="cpu"))
        _set_tables(self._own)
        with torch.no_grad():
            for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
                if state is not None and name in state:
                    tensor.copy_(state[name])

    def check_modes(self) -> None:
        """RunError if the script has changed the mode of a module since it was compiled."""
        if (now := _modes(self.module)) != self._modes:
            raise _other_mode(next(name for name in now if now[name] != self._modes.get(name)))

    @contextmanager
    def computing(self, run: Call) -> Iterator[None]:
        """Parts that have tensors compute by ``run(path, *args)``, the outermost alone."""
        plain, inside = nn.Module.__call__, [False]

        def call(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if inside[0] or part not in self._paths:
                return plain(part, *args, **kwargs)
            inside[0] = True
            try:
                plainly = torch.autocast(self.module.device.type, enabled=False)
                with plainly, self.compiling(forward=self._part):
                    return _as_returned(run(self._paths[part], *args, **kwargs))
            finally:
                inside[0] = False

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = plain  # type: ignore[method-assign]


@contextmanager
def logging(module: Any, *, of_all: bool) -> Iterator[None]:
    """What the module logs meanwhile are whole tensors; ``of_all``: that of all ranks' rows."""
    log = module.log

    def log_whole(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if of_all and not kwargs.get("rank_zero_only"):
            kwargs["sync_dist"] = True
        log(name, value.full_tensor() if isinstance(value, DTensor) else value, *args, **kwargs)

    vars(module)["log"] = log_whole
    try:
        yield
    finally:
        del vars(module)["log"]


class _NoTrainer:
    """Stands for the trainer while a step is compiled: what a step reads of it would be frozen."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceError(
            where=f"{self._model}, trainer.{name}",
            what="a step reads it of the trainer (as self.global_step, self.current_epoch, "
            "self.logger or self.optimizers() do)",
            why="a program has the values of the step that was compiled, not those of later steps",
            do="Do it in on_train_batch_start or on_train_batch_end, or put the number into the "
            "batch as a tensor.",
        )


def _holds(part: nn.Module) -> bool:
    return any(True for _ in part.parameters()) or any(True for _ in part.buffers())


def _modes(module: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in module.named_modules()}


def _tables(module: nn.Module) -> Tables:
    return {part: {name: vars(part)[name] for name in OF_TENSORS} for part in module.modules()}


def _set_tables(tables: Tables) -> None:
    for part, each in tables.items():
        vars(part).update(each)


def _with_params(tables: Tables, new: Callable[[Tensor], Tensor]) -> Tables:
    """The tables with new parameters; one that stands at several places stays one."""
    made: dict[int, Any] = {id(None): None}

    def of(param: Any) -> Any:
        if id(param) not in made:
            made[id(param)] = nn.Parameter(new(param.detach()), param.requires_grad)
        return made[id(param)]

    return {
        part: {**each, "_parameters": {name: of(p) for name, p in each["_parameters"].items()}}
        for part, each in tables.items()
    }


def _as_returned(results: Any) -> Any:
    """Several results as the tuple that the module returned; those with names as they are."""
    by_place = isinstance(results, Results) and all(name.isdigit() for name in results)
    return tuple(results.values()) if by_place else results


def _other_mode(name: str) -> RunError:
    return RunError(
        where=f"training_step, {name or 'the LightningModule'}",
        what="its train() or eval() was called since the step was compiled",
        why="a program has the mode of every module as it was",
        do="Set modes in __init__ or configure_model.",
    )
