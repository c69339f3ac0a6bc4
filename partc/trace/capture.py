"""Run a training step once on fake tensors and record every ATen op with its origin.

In: a module, a loss and inputs. Out: a raw ``torch.fx`` graph, in-place ops and views among its
nodes, each annotated with module path, source line, phase and, if it is random, its site.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx.traceback as provenance
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.backends import mkldnn
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode

from partc.graph.draws import takes_numbers
from partc.graph.fake_calls import quiet_log, storage_of
from partc.graph.folds import RepeatedBlocks
from partc.trace.closed_over import (
    OwnTensors,
    ReadsOwnError,
    check_aliases,
    check_memory,
    check_own,
    check_trained,
    check_updated,
    notes_on,
)
from partc.trace.contents import Contents
from partc.trace.cuda_autocast import cuda_autocast_on_cpu
from partc.trace.distribution_checks import unchecked_distributions
from partc.trace.draw_sites import Sites
from partc.trace.forward_lines import forward_noted
from partc.trace.frozen_numbers import FrozenNumbers
from partc.trace.known_values import UnknownValueError, computed, needs_values
from partc.trace.overwritten import overwrites_named
from partc.trace.own_grads import grads_unread
from partc.trace.param_hooks import check_hooks, check_no_more_hooks, copy_hooks, idle_notes
from partc.trace.places import Reach, restored
from partc.trace.python_random import quiet_python_random
from partc.trace.ran import not_noting_code, noting_code
from partc.trace.second_run import History, Outcome
from partc.trace.source_lines import calls_here, source_here
from partc.trace.step_objects import StepObjects
from partc.trace.untouched import untouched

Objective = Callable[..., Any]


@dataclass
class Names:
    """A module's parameters and buffers, each under its first name.

    ``aliases``: a tied tensor's second name -> its first name.
    """

    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def trainable(self) -> list[str]:
        return [name for name, param in self.params.items() if param.requires_grad]

    @property
    def trained(self) -> dict[str, Tensor]:
        """The trainable parameters by name."""
        return {name: self.params[name] for name in self.trainable}

    def by_id(self, fakes: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """The fakes of parameters and buffers by the ``id`` of the model's own tensor."""
        own = {**self.params, **self.buffers}
        return {id(tensor): fakes[name] for name, tensor in own.items()}

    def without(self, folds: Sequence[RepeatedBlocks]) -> Names:
        """These names without the parameters and buffers of blocks that are left out."""

        def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: t for n, t in tensors.items() if not any(f.covers(n) for f in folds)}

        return Names(kept(self.params), kept(self.buffers), self.aliases)


def names_of(model: nn.Module) -> Names:
    """The parameters and buffers of the user's module; one tensor under two names is tied."""
    names = Names()
    first: dict[int, str] = {}
    params = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    for found, tensors in ((params, names.params), (buffers, names.buffers)):
        for name, tensor in found:
            kept = first.setdefault(id(tensor), name)
            if kept == name:
                tensors[name] = tensor
            else:
                names.aliases[name] = kept
    return names


@dataclass
class Recording:
    """A raw graph, the module that holds its constants, and what its outputs are called.

    ``frozen`` has sentences on what a program of this graph does not follow, ``numbers`` the Python
    numbers that the step has read, ``decided`` the buffers on whose values it depends what was
    recorded, each with the line that asked for them.
    """

    module: fx.GraphModule
    names: Names
    results: list[str]  # names of the tensors that stand where the loss would
    frozen: tuple[str, ...]
    numbers: FrozenNumbers
    decided: dict[str, str]


def record(
    model: nn.Module,
    inputs: Sequence[Tensor],
    objective: Objective,
    train: bool,
    left_out: Sequence[RepeatedBlocks] = (),
) -> Recording:
    """Trace ``objective(model, *inputs)``, and its backward where ``train``, under fake tensors.

    ``left_out``: equal blocks that do not run; the graph has no parameter or buffer of these.

    The raw graph's placeholders are the parameters, buffers and inputs. Its outputs are results,
    gradients of the trainable parameters (None where the loss does not depend on the parameter) and
    the buffers after the step.
    """
    every, reach = names_of(model), Reach.of(model, objective)
    check_memory(every.params, every.buffers)
    if train:
        check_hooks(every.params)
    step = _Step(model, inputs, objective, train, every.without(left_out), reach)
    try:
        return step.recorded()
    except ReadsOwnError:
        return replace(step, with_own=True).recorded()


@dataclass
class _Step:
    """One training step of a model, to be run on fakes.

    ``with_own``: code that has a parameter of the model in a variable computes with its fake. That
    takes time, so it is only done where a first try has met such a parameter.
    """

    model: nn.Module
    inputs: Sequence[Tensor]
    objective: Objective
    train: bool
    names: Names
    reach: Reach
    with_own: bool = False
    results: list[str] = field(default_factory=list)
    idle: dict[str, str] = field(default_factory=dict)  # hooks that change nothing, by parameter
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))

    def recorded(self) -> Recording:
        """Record the step, and run it again to see that all steps are alike."""
        history, sites = History(self.model, self.objective, self.reach), Sites()
        outcomes: list[Hashable] = []

        def first(*given: list[Tensor]) -> Outcome:
            with noting_code(history.ran):
                outcome = self.step(history.contents, _Origins(history.contents, sites), *given)
            outcomes.append(history.outcome(outcome))
            return outcome

        with sites.inside(self.model), self._alone():
            # with "fake" it would copy every fake
            module = make_fx(first, _allow_non_fake_inputs=True)(*self.fakes())
            check_aliases(history.contents, self.names.trained, self.reach.places)
            check_updated(history.contents, self.reach.places)
            history.check_second(
                outcomes[0], lambda watch: self.step(history.contents, watch, *self.fakes())
            )
        numbers = history.frozen()
        notes = *notes_on(history.contents, self.reach.places), *numbers.notes()
        notes += *history.notes(), *idle_notes(self.idle)
        known = history.contents.known
        notes += (*known.notes(),)
        return Recording(module, self.names, self.results, notes, numbers, known.decided)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The settings under which the step runs; model and generators are left as they were."""
        unprinted = _use_lazy_graph_module(True)  # nobody runs the raw graph as Python text
        model, reach, mode = self.model, self.reach, self.mode
        with (
            _no_warning(), untouched(model), restored(reach), module_scopes(model),
            quiet_generator(), quiet_log(), unprinted, converted_to_themselves(),
            cuda_autocast_on_cpu(), unchecked_distributions(), portable_kernels(), mode,
        ):  # fmt: skip
            yield

    def fakes(self) -> list[list[Tensor]]:
        """Fakes of the parameters, the buffers and the inputs."""
        every = self.names.params.values(), self.names.buffers.values(), self.inputs
        return [[as_fake(each, self.mode) for each in tensors] for tensors in every]

    def step(
        self, contents: Contents, watch: TorchDispatchMode, params: list[Tensor],
        buffers: list[Tensor], inputs: list[Tensor],
    ) -> Outcome:  # fmt: skip
        """Results, gradients of the trainable parameters, and buffers behind the step."""
        names = self.names
        held = dict(zip((*names.params, *names.buffers), (*params, *buffers), strict=True))
        given = {f"input {i}": x for i, x in enumerate(inputs)}
        contents.begin({**held, **given}, names.buffers)
        own = OwnTensors(names.by_id(held)) if self.with_own else nullcontext()
        weights = dict(zip(names.params, params, strict=True))
        copy_hooks(names.params, weights, self.idle)
        held |= {alias: held[name] for alias, name in names.aliases.items()}
        with (
            _reparametrize_module(self.model, held),
            torch.set_grad_enabled(self.train),
            watch,
            grads_unread(names.params, weights),
        ):
            objects = StepObjects(self.model, held, names.params)
            with own:
                outcome = named_results(self.objective(self.model, *inputs))
            objects.check()
            self.results = list(outcome)
            if not self.with_own:
                check_own(outcome.values(), contents, names.by_id(held))
            grads = self._grads(outcome, held, weights) if self.train else []
            objects.check()  # as a hook may do the same in the backward
        return list(outcome.values()), grads, [held[name] for name in names.buffers]

    def _grads(
        self,
        outcome: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
    ) -> list[Any]:
        """The gradients of the trainable parameters, none of any other tensor being lost."""
        loss = next(iter(outcome.values()))
        check_trained(loss, params, self.names.params, self.reach.places)
        check_no_more_hooks(self.names.params, params)
        return _backward(outcome, held, self.names)


@contextmanager
def _no_warning() -> Iterator[None]:
    """Let fakes of a tensor with a history be made, which looks at its ``.grad``, and be copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Switch mkldnn off: an LSTM is then recorded as matrix products, not as a CPU-only kernel."""
    enabled: Any = mkldnn.enabled
    mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        mkldnn.enabled = enabled


def as_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor on the CPU with a tensor's shape, strides and dtype, whatever its device."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        vars(fake).update(vars(tensor))  # what the user has noted on it
        return fake
    return fake.requires_grad_(tensor.requires_grad)


def _backward(outcome: Mapping[str, Tensor], held: Mapping[str, Tensor], names: Names) -> list[Any]:
    """The gradient of the loss by every trainable parameter; the ops are recorded as phase B."""
    loss = next(iter(outcome.values()))
    wanted = [held[name] for name in names.trainable]
    if loss.grad_fn is None or not wanted:
        return [None for _ in wanted]
    setup_stacktrace_preservation_hooks([loss.grad_fn])
    with provenance.annotate({"phase": "B", "module": ""}), overwrites_named(loss):
        return list(torch.autograd.grad(loss, wanted, allow_unused=True))


def named_results(outcome: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a nested result by dotted path: ``logits``, ``past.0``."""
    if isinstance(outcome, Tensor):
        return {prefix or "result": outcome}
    if isinstance(outcome, Mapping):
        items = [(str(key), value) for key, value in outcome.items()]
    elif isinstance(outcome, list | tuple):
        fields = getattr(outcome, "_fields", map(str, range(len(outcome))))
        items = list(zip(fields, outcome, strict=True))
    else:
        return {}
    paths = ((f"{prefix}.{key}" if prefix else key, value) for key, value in items)
    return {n: t for path, value in paths for n, t in named_results(value, path).items()}


@contextmanager
def module_scopes(model: nn.Module) -> Iterator[None]:
    """Annotate nodes recorded inside a submodule's forward with the submodule's path."""
    open_scopes: list[Any] = []

    def enter(path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            scope = provenance.annotate({"module": path})
            scope.__enter__()
            open_scopes.append(scope)

        return hook

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        open_scopes.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        stack.enter_context(provenance.preserve_node_meta())
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(path), prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


class _Origins(TorchDispatchMode):
    """Annotates each op with the user's source line, and each random op with its site."""

    def __init__(self, contents: Contents, sites: Sites) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.contents, self.sites = contents, sites

    @not_noting_code()
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks this of every tensor; it is no op
        kwargs = kwargs or {}
        if needs_values(func, args):  # unknown ones are left to the op, which raises torch's error
            with suppress(UnknownValueError):
                found = computed(self.contents.known, func, args, kwargs, self._run)
                self.contents.note_outside([*args, *kwargs.values()], source_here())
                return found
        origin: dict[str, Any] = {"source": source_here(), "calls": calls_here()}
        if takes_numbers(func, args, kwargs):
            origin["site"] = self.sites.of(func, kwargs)
        call = self.contents.before(func, args, kwargs, origin["source"])
        with provenance.annotate(origin), forward_noted(origin["source"]):
            result = func(*args, **kwargs)
        self.contents.behind(call, func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.__torch_dispatch__(func, (), args, kwargs)


@contextmanager
def converted_to_themselves() -> Iterator[None]:
    """Let a forward call ``module.to(dtype)`` with the dtype that the module has already.

    torch swaps each fake parameter with its conversion, and raises where the parameter has other
    references. A conversion to itself shares the memory, so nothing has to be swapped.
    """
    swap: Any = torch.utils.swap_tensors

    def swap_others(one: Tensor, other: Tensor) -> None:
        if one.dtype != other.dtype or storage_of(one) != storage_of(other):
            swap(one, other)

    torch.utils.swap_tensors = swap_others
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@contextmanager
def quiet_generator() -> Iterator[None]:
    """Restore the states of the default random generators afterwards, Python's among them."""
    state = torch.default_generator.get_state()
    try:
        with quiet_python_random():
            yield
    finally:
        torch.default_generator.set_state(state)
