"""Run a training step once on fake tensors and record every ATen op with its origin.

In: a module, a loss and inputs. Out: a raw ``torch.fx`` graph, in-place ops and views among its
nodes, each annotated with module path, source line, phase and, if it is random, its site.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.fx.traceback as provenance
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode

from partc.graph.draws import takes_numbers
from partc.graph.fake_calls import RememberingMode, quiet_log
from partc.graph.folds import RepeatedBlocks
from partc.graph.given_back import differentiated
from partc.graph.places import Entered
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
from partc.trace.default_dtype import users_default
from partc.trace.dense import as_fake, check_dense, check_dense_grads
from partc.trace.distribution_checks import unchecked_distributions
from partc.trace.draw_sites import Sites
from partc.trace.forward_lines import forward_noted
from partc.trace.frozen_numbers import FrozenNumbers
from partc.trace.input_grads import by_inputs, notes_of_inputs
from partc.trace.known_values import UnknownValueError, computed, needs_values
from partc.trace.made_layers import check_none_made
from partc.trace.odd_constants import odd_constants
from partc.trace.odd_tensors import check_recorded
from partc.trace.overwritten import overwrites_named
from partc.trace.own_grads import grads_unread
from partc.trace.own_transfers import transfer_notes, without_transfers
from partc.trace.param_hooks import check_hooks, check_no_more_hooks, copy_hooks, idle_notes
from partc.trace.places import Reach, restored
from partc.trace.portable_kernels import noting_padding, padding_notes, portable_kernels
from partc.trace.quiet_run import converted_to_themselves, quiet_generator, quiet_warnings
from partc.trace.ran import not_noting_code, noting_code
from partc.trace.reentrant import reentrant_checked
from partc.trace.returned_tuples import TupleResults
from partc.trace.second_run import History, Outcome
from partc.trace.source_lines import calls_here, source_here, torch_line_here
from partc.trace.step_objects import StepObjects
from partc.trace.swallowed import called, none_swallowed
from partc.trace.unknown_masks import masks_read
from partc.trace.untouched import untouched
from partc.trace.watched_calls import WatchedCalls

Objective = Callable[..., Any]
OF_INPUT = "gradient of input "  # and its place among those that have one
T = TypeVar("T")


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
    return run_of(model, inputs, objective, train, lambda step: step.recorded(), left_out)


def run_of(
    model: nn.Module, inputs: Sequence[Tensor], objective: Objective, train: bool,
    run: Callable[[TracedStep], T], left_out: Sequence[RepeatedBlocks] = (),
) -> T:  # fmt: skip
    """What ``run`` gives for the step that ``record`` records; it may be called twice."""
    every, reach = names_of(model), Reach.of(model, objective)
    check_memory(every.params, every.buffers)
    if train:
        check_hooks(every.params)
    step = TracedStep(model, inputs, objective, train, every.without(left_out), reach)
    with users_default():
        try:
            return run(step)
        except ReadsOwnError:
            return run(replace(step, with_own=True))


@dataclass
class TracedStep:
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
    decided: dict[str, str] = field(default_factory=dict)  # buffers whose values were asked for
    idle: dict[str, str] = field(default_factory=dict)  # hooks that change nothing, by parameter
    entered: Entered = field(default_factory=Entered)
    tuples: TupleResults = field(default_factory=TupleResults)
    mode: RememberingMode = field(
        default_factory=lambda: RememberingMode(allow_non_fake_inputs=True)
    )

    def recorded(self) -> Recording:
        """Record the step, and run it again to see that all steps are alike."""
        module, numbers, notes = self.twice(as_graph, Origins)
        check_recorded(module)
        check_dense(module.graph, self.given())
        return Recording(module, self.names, self.results, notes, numbers, self.decided)

    def twice(
        self, through: Callable[..., T], origins: Callable[[Contents, Sites], TorchDispatchMode]
    ) -> tuple[T, FrozenNumbers, tuple[str, ...]]:
        """What ``through`` gives, which is to run the step once on the lists of fakes that it is
        given; the numbers that the step reads; and sentences on what a program does not follow.

        The step then runs again, to see that all steps are alike. ``origins`` makes the mode under
        which the first one runs.
        """
        history, sites = History(self.model, self.objective, self.reach), Sites()
        outcomes: list[Hashable] = []
        padded: dict[str, None] = {}
        asked: dict[str, None] = {}

        def first(*given: list[Tensor]) -> Outcome:
            with noting_code(history.ran):
                outcome = self.step(history.contents, origins(history.contents, sites), *given)
            outcomes.append(history.outcome(outcome))
            return outcome

        padding = nullcontext() if self.train else noting_padding(self.model, padded)
        with sites.inside(self.model), self._alone(), padding, without_transfers(asked):
            result = through(first, *self.fakes())
            check_aliases(history.contents, self.names.trained, self.reach.places)
            check_updated(history.contents, self.reach.places)
            if not self.train:
                check_none_made(history.contents)
            history.check_second(
                outcomes[0], lambda watch: self.step(history.contents, watch, *self.fakes())
            )
        numbers = history.frozen()
        notes = *notes_on(history.contents, self.reach.places), *numbers.notes()
        self.decided = history.contents.known.decided
        notes += *history.notes(), *idle_notes(self.idle), *padding_notes(padded)
        notes += *transfer_notes(asked), *notes_of_inputs(history.contents)
        return result, numbers, (*notes, *history.contents.known.notes())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The settings under which the step runs; model and generators are left as they were."""
        unprinted = _use_lazy_graph_module(True)  # nobody runs the raw graph as Python text
        model, reach, mode = self.model, self.reach, self.mode
        with (
            quiet_warnings(), untouched(model), restored(reach),
            module_scopes(model, self.entered, self.tuples), quiet_generator(), quiet_log(),
            unprinted, converted_to_themselves(), cuda_autocast_on_cpu(),
            unchecked_distributions(), masks_read(), portable_kernels(), reentrant_checked(), mode,
        ):  # fmt: skip
            yield

    def given(self) -> dict[str, Tensor]:
        """The model's and the script's own tensors by name."""
        named = {f"input {i}": x for i, x in enumerate(self.inputs)}
        return {**self.names.params, **self.names.buffers, **named}

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
        self.entered.begin()
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
            odd = odd_constants(self.reach.places, contents)
            with own, odd, none_swallowed(), self.tuples.noted():
                outcome = named_results(self.objective(self.model, *inputs))
            objects.check()
            contents.differentiates |= by_inputs(inputs)
            if not self.with_own:
                check_own(outcome.values(), contents, names.by_id(held))
            grads = self._grads(outcome, held, weights, contents) if self.train else []
            self.results = list(outcome)
            objects.check()  # as a hook may do the same in the backward
        return list(outcome.values()), grads, [held[name] for name in names.buffers]

    def _grads(
        self,
        outcome: dict[str, Tensor],
        held: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        contents: Contents,
    ) -> list[Any]:
        """The gradients of the trainable parameters, none of any other tensor being lost."""
        loss = next(iter(outcome.values()))
        check_trained(loss, params, self.names.params, self.reach.places, contents)
        check_no_more_hooks(self.names.params, params)
        return _backward(outcome, held, self.names)


def as_graph(first: Callable[..., Outcome], *fakes: list[Tensor]) -> fx.GraphModule:
    """Run the step on fakes and record its calls as a graph."""
    # with "fake" it would copy every fake
    return make_fx(first, _allow_non_fake_inputs=True)(*fakes)


def _backward(outcome: dict[str, Tensor], held: Mapping[str, Tensor], names: Names) -> list[Any]:
    """The gradient of the loss by every trainable parameter; the ops are recorded as phase B.

    ``outcome`` gets those by inputs that a loss of the script's asks for.
    """
    loss = next(iter(outcome.values()))
    wanted = [held[name] for name in names.trainable]
    inputs = differentiated(loss)
    if loss.grad_fn is None or not (wanted or inputs):
        return [None for _ in wanted]
    setup_stacktrace_preservation_hooks([loss.grad_fn])
    with provenance.annotate({"phase": "B", "module": ""}), overwrites_named(loss):
        every = list(torch.autograd.grad(loss, [*wanted, *inputs], allow_unused=True))
        found = zip(inputs, every[len(wanted) :], strict=True)
        given = [torch.zeros_like(x) if grad is None else grad for x, grad in found]
    outcome |= {f"{OF_INPUT}{i}": grad for i, grad in enumerate(given)}
    grads = every[: len(wanted)]
    check_dense_grads(dict(zip(names.trainable, grads, strict=True)))
    return grads


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
def module_scopes(model: nn.Module, entered: Entered, tuples: TupleResults) -> Iterator[None]:
    """Annotate nodes recorded inside a submodule's forward with its path, and its call's number.

    ``tuples`` gets what modules return that is no tensor.
    """
    open_scopes: list[Any] = []

    def enter(path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            scope = provenance.annotate({"module": path, "entered": entered.enter(path)})
            scope.__enter__()
            open_scopes.append(scope)

        return hook

    def leave(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            open_scopes.pop().__exit__(None, None, None)
            tuples.note(path, module, result)

        return hook

    with ExitStack() as stack:
        stack.enter_context(provenance.preserve_node_meta())
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(path), prepend=True).remove)
            stack.callback(module.register_forward_hook(leave(path), always_call=True).remove)
        yield


class Origins(WatchedCalls):
    """Annotates each op with the user's source line, and each random op with its site."""

    def __init__(self, contents: Contents, sites: Sites) -> None:
        super().__init__()
        self.contents, self.sites = contents, sites
        self.origin: dict[str, Any] = {}  # of the latest call

    @not_noting_code
    def call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if needs_values(func, args):  # unknown ones are left to the op, which raises torch's error
            with suppress(UnknownValueError):
                found = computed(self.contents.known, func, args, kwargs, self._run)
                self.contents.note_outside([*args, *kwargs.values()], source_here())
                return found
        origin = self.origin = {"source": source_here(), "calls": calls_here()}
        origin["torch_line"] = torch_line_here()
        if takes_numbers(func, args, kwargs):
            origin["site"] = self.sites.of(func, kwargs)
        call = self.contents.before(func, args, kwargs, origin["source"])
        with provenance.annotate(origin), forward_noted(origin["source"]):
            result = called(func, args, kwargs)
        self.contents.behind(call, func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.call(func, args, kwargs)
