"""The model from which a stage was compiled, where it is in the same process.

A stage takes its weights, and what scripts do to the model reaches the stage: ``model.zero_grad()``
and ``requires_grad_``. What cannot reach it is refused: an optimizer over the model's parameters,
clipping their gradients, weights that were loaded into the model behind ``.module()``. What would
mislead is told: saving the model's own weights, another model with a stage over the same ones.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakIdKeyDictionary

from partc.errors import RunError
from partc.program.model.emptied import is_emptied, no_values, refuse_calls
from partc.program.optimizer.clip import check_directions
from partc.program.optimizer.untrained import check_any_gradient, tell_of_strangers
from partc.program.tensors.elsewhere import check_norm
from partc.program.tensors.homes import HomeTensor
from partc.program.tensors.rank_tensors import RankTensors
from partc.program.tensors.shown import Shown
from partc.trace.fingerprint import Fingerprint, named_tensors
from partc.users_line import warn

Optimizer = torch.optim.Optimizer
SAMPLE = 64  # elements of a tensor that tell whether it was changed


def take_weights(tensors: RankTensors, model: nn.Module | None, compiled: Fingerprint) -> bool:
    """Load what the model of rank 0 has, as DDP does, and say on all ranks whether it has anything;
    all ranks call this together.

    Tensors without values (``meta``) and a model that has changed its shapes are left out.
    """
    same = model is not None and not compiled.differences(Fingerprint.of(model))
    own = named_tensors(model) if model is not None and same else {}
    shards = sorted(tensors.all_shards.values(), key=lambda shard: shard.name)
    has = [int(_has_values(own.get(shard.name))) for shard in shards]
    known = torch.tensor(has, dtype=torch.uint8, device=tensors.device)
    dist.broadcast(known, src=0)
    for shard in (s for s, is_known in zip(shards, known.tolist(), strict=True) if is_known):
        sent = torch.empty(shard.shape, dtype=shard.dtype, device=tensors.device)
        if dist.get_rank() == 0:
            sent.copy_(own[shard.name].detach())
        if sent.numel():
            dist.broadcast(sent.reshape(-1).view(torch.uint8), src=0)
        tensors.fill({shard.name: sent})
    return bool(known.any())


def _has_values(tensor: Tensor | None) -> bool:
    return tensor is not None and not tensor.is_meta and not isinstance(tensor, FakeTensor)


class RawModel:
    """What a stage does about its model, the nn.Module of a single device.

    ``shown``: the stage's parameters by name; the model has others of the same names. The model is
    not kept: a script may let it go.
    """

    def __init__(
        self, model: nn.Module | None, shown: Mapping[str, Shown], tensors: RankTensors
    ) -> None:
        own = named_tensors(model) if model is not None else {}
        self._shown, self._tensors, self.num_steps = shown, tensors, 0
        params = {name: own[name] for name in shown if name in own}
        self._params = {name: ref(param) for name, param in params.items()}  # the script's
        self._flags = {name: param.requires_grad for name, param in params.items()}
        mine = {n: x for n, x in own.items() if n in tensors.shards and _has_values(x)}
        self._taken = {name: (id(value), *_seen(value)) for name, value in mine.items()}
        self._model = ref(model) if model is not None else lambda: None
        trained = (n for n in self._taken if self._flags.get(n))
        self._kept = next(((n, self._taken[n]) for n in trained), None)  # tells that it is old
        self._warn_of_others(params)
        for name, param in params.items():
            _STAGES.setdefault(param, []).append((ref(self), name))
        if params:
            _watch_torch()

    def begin_step(self) -> None:
        """Before a step: what the script did to the model reaches the stage, or is refused."""
        if self.num_steps == 0:
            self._check_weights()
            self._taken = {}
        self.num_steps += 1
        now = {n: p.requires_grad for n, weak in self._params.items() if (p := weak()) is not None}
        changed = {name: flag for name, flag in now.items() if flag != self._flags[name]}
        if changed:
            self._follow(changed)

    def renew(self, name: str, param: Tensor) -> None:
        """Follow another parameter of the model, which stands in the place of the one of a name."""
        self._params[name] = ref(param)
        _STAGES.setdefault(param, []).append((ref(self), name))

    def warn_if_old(self) -> None:
        """Warn, once, where the model's weights are still those from which this stage began."""
        model, kept = self._model(), self._kept
        if model is None or kept is None or not self.num_steps:
            return
        name, seen = kept
        value = named_tensors(model).get(name)
        if value is None or value.is_meta or _is_trained(model):
            return
        if (id(value), *_seen(value)) != seen:
            return
        mine = self._tensors.piece(self._tensors.shards[name], value.detach())
        if not torch.equal(mine.to(self._tensors.held[name]), self._tensors.held[name].detach()):
            self._kept = None
            warn(
                "partc: state_dict() of the model has the weights of before .module(); those that "
                "were trained are the stage's. Save stage.full_state_dict(), or put them into the "
                "model: model.load_state_dict(stage.full_state_dict())"
            )

    def _warn_of_others(self, params: Mapping[str, Tensor]) -> None:
        """Warn where another model holds one of these parameters, and has a stage too."""
        model = self._model()
        for name, param in ((n, p) for n, p in params.items() if p.requires_grad):
            for other, its_name in _stages_of(param):
                if other._model() not in (None, model):
                    warn(
                        f"partc: {name} of {type(model).__name__} is also {its_name} of "
                        f"{type(other._model()).__name__}, which has a stage of its own: each "
                        "stage trains a copy. To train one, compile a module that holds both"
                    )
                    return

    def zero_grad(self, name: str, set_to_none: bool) -> None:
        """Clear the gradient of one of the stage's parameters."""
        shown = self._shown[name]
        if set_to_none:
            shown.param.grad = None
        elif shown.param.grad is not None:
            shown.param.grad.zero_()
        if shown.trained:
            shown.read()

    def _follow(self, changed: Mapping[str, bool]) -> None:
        """Freeze or train those of the stage's parameters that the script did in the model."""
        self._flags |= changed
        for name, flag in changed.items():
            self._shown[name].param.requires_grad_(flag)
        first = next(iter(changed))
        warn(
            f"partc: requires_grad of {len(changed)} parameters of the model, such as {first}, was "
            "changed behind .module(); the stage follows"
        )

    def _check_weights(self) -> None:
        """RunError if the model was given other values than the stage has, before its first step.

        Scripts that load a checkpoint into the model mean what is trained. One that trains the
        model itself, as the gradients show, does not.
        """
        model = self._model()
        if model is None or _is_trained(model):
            return
        own = named_tensors(model)
        with torch.no_grad():
            for name, seen in self._taken.items():
                value = own.get(name)
                if value is None or value.is_meta or (id(value), *_seen(value)) == seen:
                    continue
                mine = self._tensors.piece(self._tensors.shards[name], value.detach())
                held = self._tensors.held[name]
                if not torch.equal(mine.to(held), held):
                    raise _other_weights(name)


def _is_trained(model: nn.Module) -> bool:
    """Whether the script trains the model itself."""
    return any(param.grad is not None for param in model.parameters())


def _seen(value: Tensor) -> tuple[int, ...]:
    """Changes with the values: the count of writes, and some elements, as it misses ``.data``."""
    version = 0 if value.is_inference() else value._version
    if not value.is_contiguous():
        return (version,)
    flat = value.detach().view(-1)
    some = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].cpu().contiguous()
    return version, *some.view(torch.uint8).tolist()


def empty_model(model: nn.Module) -> None:
    """Free a model's parameters, which lie on ``meta`` from then on, as after ``to("meta")``.

    What reads them fails, where it would find weights that are trained no more. ``zero_grad`` and
    ``requires_grad_`` of the model still reach its stages, and tied parameters stay tied.
    """
    refuse_calls(model)
    bare: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not param.is_meta:
                bare[param] = bare[param] if param in bare else _without_values(param)
                module._parameters[name] = bare[param]


def _without_values(param: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for stage, name in [*_stages_of(param)]:
        stage.renew(name, made)
    return made


# model parameter -> the stages that were compiled from its model, with its name there
_STAGES: Any = WeakIdKeyDictionary()
_CLEAN: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # optimizers of no model, and their sizes
_WATCHED: WeakSet[Any] = WeakSet()


def _stages_of(param: Tensor) -> Iterator[tuple[RawModel, str]]:
    for weak, name in _STAGES.get(param, ()):
        stage = weak()
        if stage is not None:
            yield stage, name


def _watch_torch() -> None:
    """Let ``zero_grad`` of models, steps of optimizers and clipping be seen, once in a process.

    The method of nn.Module is wrapped, since an attribute of one model would be copied and pickled
    with it; of ``clip_grad_norm_`` the last part, since scripts import its name before.
    """
    if nn.Module in _WATCHED:
        return
    _WATCHED.add(nn.Module)
    plain = nn.Module.zero_grad

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        plain(self, set_to_none)
        for param in self.parameters():
            for stage, name in _stages_of(param):
                stage.zero_grad(name, set_to_none)

    zero_grad.__doc__ = plain.__doc__
    nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]
    _watch_saving()
    register_optimizer_step_post_hook(_check_optimizer)
    for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
        _check_before(name, [clip_grad, torch.nn.utils])


def _watch_saving() -> None:
    """Let ``state_dict`` of a whole model be seen: it may have weights that are trained no more."""
    plain = nn.Module.state_dict

    @functools.wraps(plain)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = next(self.parameters(), None)
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("partc.")
        asked = first is not None and not args and "destination" not in kwargs
        if asked and not ours and is_emptied(self):
            raise no_values(f"{type(self).__name__}.state_dict()")
        if first is not None and asked and not ours:
            for stage, _ in _stages_of(first):
                stage.warn_if_old()
        return plain(self, *args, **kwargs)

    nn.Module.state_dict = state_dict  # type: ignore[method-assign]
    average = AveragedModel.update_parameters

    @functools.wraps(average)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        params = [*model.parameters()]
        if owner := _without_gradients(params):
            do = "Average the stage: averaged = AveragedModel(stage), and update_parameters(stage)."
            raise _of_model("AveragedModel.update_parameters", owner, do)
        average(self, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def _check_before(name: str, modules: Sequence[ModuleType]) -> None:
    """Let a function that clips gradients refuse a model's parameters, wherever it is named."""
    plain = getattr(modules[0], name)

    @functools.wraps(plain)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owner = _without_gradients(params)
        if owner:
            where = "clip_grad_norm_" if name.startswith("_") else name
            raise _of_model(where, owner, "Clip stage.parameters().")
        if name.startswith("_"):
            check_norm(params)
            homes = [param.home for param in params if isinstance(param, HomeTensor)]
            limit = args[0] if args else kwargs["max_norm"]
            check_directions(limit, any(home.has_directions for home in homes))
        elif all(param.grad is None for param in params) and any(map(_is_of_stage, params)):
            raise _no_gradients(name)
        return plain(params, *args, **kwargs)

    for module in modules:
        if getattr(module, name, None) is plain:
            setattr(module, name, checked)


def _is_of_stage(param: Tensor) -> bool:
    return isinstance(param, HomeTensor)


def _looks_detached(param: Tensor) -> bool:
    """Whether a tensor is of a stage and wants no gradient, and other ranks' parameters do not
    either: those of a pipeline rank may all be frozen where others train.
    """
    if not isinstance(param, HomeTensor) or param.requires_grad:
        return False
    return not (param.is_own and param.home.in_pipeline)


def _without_gradients(params: Sequence[Tensor]) -> str | None:
    """One of a trained model's own parameters, by name, if none of them has a gradient."""
    owners = [(stage, name, param) for param in params for stage, name in _stages_of(param)]
    trained = any(stage.num_steps for stage, _, _ in owners)
    unread = trained and all(param.grad is None for _, _, param in owners)
    return owners[0][1] if unread else None


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """RunError if an optimizer has stepped on a model's parameters, none with a gradient."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if _CLEAN.get(optimizer) == len(params):
        return
    if not any(True for param in params for _ in _stages_of(param)):
        if params and all(map(_looks_detached, params)):
            check_any_gradient(optimizer, params)
        tell_of_strangers(optimizer)
        _CLEAN[optimizer] = len(params)
    elif owner := _without_gradients(params):
        do = "Build the optimizer over stage.parameters(), or stage.named_parameters(): the names "
        do += "are the model's. With Accelerate, pass it to accelerator.prepare with the model."
        raise _of_model(f"{type(optimizer).__name__}.step", owner, do)


def _of_model(where: str, param: str, do: str) -> RunError:
    return RunError(
        where=where,
        what=f"it has the model's own parameters, such as {param}, which no step trains",
        why="the stage that was compiled from the model has weights of its own, and gradients",
        do=do,
    )


def _no_gradients(call: str) -> RunError:
    return RunError(
        where=call,
        what="none of the stage's parameters has a gradient yet",
        why="stage.step adds gradients, and zero_grad clears them",
        do="Call it between stage.step(...) and optimizer.step().",
    )


def _other_weights(name: str) -> RunError:
    return RunError(
        where=name,
        what="the model was given other values after .module(), and the stage has the old ones",
        why="the stage has memory of its own, into which the model's tensors were copied",
        do="Load into the model before .module(), or call stage.load_full(model).",
    )
