"""The modules of a stage: they look like the model's, and refuse what the program would ignore.

Where the model is in the process, each module of a stage has the class and the plain attributes of
the model's own, without its tensors: rules by ``isinstance`` and methods of the model
(``configure_optimizers``) work. Forward and backward are in the program's text, which calls no
module, so hooks, new tensors and new modules would do nothing: they are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from partc.errors import RunError
from partc.program.model.likeness import TABLES, Likeness
from partc.program.model.other_wrappers import HABITS, NoAttributeError
from partc.program.model.read_numbers import ReadNumbers
from partc.program.tensors.elsewhere import ElsewhereError, Table
from partc.program.tensors.exported import no_export
from partc.wrong_calls import did_you_mean

OF_PARTS = (  # what a module of a stage cannot do
    "forward", "register_forward_hook", "register_forward_pre_hook", "register_backward_hook",
    "register_full_backward_hook", "register_full_backward_pre_hook", "_apply",
)  # fmt: skip
MOST_PARTS = 8  # that a message names
FIRST_STEPS, EVERY = 3, 50  # steps that look at all attributes


NEARLY = 0.75  # from how alike on a method of torch's is what a script may mean
_WRITERS = "save_pretrained", "push_to_hub"  # methods that write the memory of all tensors


def _parts(model: str, names: list[str]) -> str:
    """What to take in place of a part that a model has not."""
    listed = ", ".join(names[:MOST_PARTS]) + ", ..." * (len(names) > MOST_PARTS)
    by_number = bool(names) and all(each.isdigit() for each in names)
    if by_number:
        return f"The parts of the {model} go by number, stage[0]: it has {listed}."
    return f"The {model} has {listed or 'no parts'}; dir(stage) lists what a stage has."


class UserModules(nn.Module):
    """What a Stage is beside its step: a module whose parts look like those of the model.

    ``like_model`` is the model without tensors, whose parameters are the stage's; None where the
    model is not in this process.
    """

    like_model: nn.Module | None

    def begin_modules(self, model: nn.Module | None, read: ReadNumbers) -> None:
        """Make the modules; their tensors are registered later. ``read``: what a forward reads."""
        made = None if model is None else Likeness(model, read)
        object.__setattr__(self, "_likeness", made)
        object.__setattr__(self, "like_model", made.root if made else None)
        for name in TABLES:
            vars(self)[name] = Table()
            if made:
                vars(made.root)[name] = vars(self)[name]

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter of this name; an error that says where it is, if another rank has it."""
        path, _, name = target.rpartition(".")
        try:
            return super().get_parameter(target)
        except AttributeError:
            getattr(self.get_submodule(path), name)  # which says where it is
            raise

    def clear_modules(self) -> None:
        """Forget all tensors; the modules that look like the model's stay."""
        for name in TABLES:
            vars(self)[name].clear()
        if self.__dict__["_likeness"]:
            self.__dict__["_likeness"].clear()

    def keep_modules(self) -> None:
        """From now on what the program would ignore is refused."""
        for path, part in self.named_modules():
            if part is not self:
                vars(part).update({name: _Refused(name, path) for name in OF_PARTS})
        root = self.like_model
        if root is not None:
            vars(root).update({name: _Refused(name, "") for name in OF_PARTS})
            self.__dict__["_likeness"].show(dict(self._every_tensor()))
            self.__dict__["_likeness"].keep()
        _KEPT.update(self.modules())
        _watch_registrations()

    def _every_tensor(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named_parameters(remove_duplicate=False)
        yield from self.named_buffers(remove_duplicate=False)

    def begin_mode(self, mode: bool) -> None:
        """Begin in the mode of the first program."""
        self.training = mode
        if likeness := self.__dict__["_likeness"]:
            likeness.whole = mode

    def train(self, mode: bool = True) -> Self:
        """As of the model; parts that are in another mode than the program are refused later."""
        super().train(mode)
        if likeness := self.__dict__["_likeness"]:
            if type(likeness.root).train is not nn.Module.train:
                likeness.root.train(mode)  # the model's own, such as keeps batch norms frozen
            likeness.follow(mode)
        return self

    def check_modules(self, num_steps: int) -> None:
        """RunError if the script has changed the mode of a part, or a number of a module.

        Modes, and some numbers that a forward reads, are looked at in every step; all others, and
        which modules there are, now and then.
        """
        if likeness := self.__dict__["_likeness"]:
            likeness.check_read(self)
            if num_steps < FIRST_STEPS or num_steps % EVERY == 0:
                likeness.check()

    @property
    def read_numbers(self) -> ReadNumbers:
        """What a forward reads of the modules; nothing is known of a model of another process."""
        likeness = self.__dict__["_likeness"]
        return likeness.read if likeness else ReadNumbers()

    def __getattr__(self, name: str) -> Any:
        """What the stage has not: the model's attribute or method, over the stage's parameters."""
        try:
            return super().__getattr__(name)
        except ElsewhereError:
            raise
        except AttributeError as error:
            if name.startswith("_"):
                raise
            root = self.__dict__.get("like_model")
            if hasattr(root, name):
                found = getattr(root, name)
                return _given_whole(name, found) if name in _WRITERS else found
            raise self._no_attribute(name, root) from error

    def _no_attribute(self, name: str, root: nn.Module | None) -> NoAttributeError:
        parts = [] if root is None else [each for each, _ in root.named_children()]
        own = dir(type(self)) if root is None else [*dir(type(self)), *dir(root)]
        public = [each for each in own if not each.startswith("_")]
        near = did_you_mean(name, parts) or did_you_mean(name, public, NEARLY)
        what, do = "no stage has it", near or "See dir(stage)."
        if root is not None:
            what = f"no stage and no {type(root).__name__} has it"
            do = near or _parts(type(root).__name__, parts)
        else:
            do = (
                f"{near} The model is not in this process: give it to partc.load(folder, model), "
                "and its attributes and methods are the stage's too."
            )
        do = HABITS.get(name, do)
        return NoAttributeError(
            where=f"stage.{name}", what=what,
            why="a stage has methods of its own, and the attributes of its model", do=do,
        )  # fmt: skip

    def __getitem__(self, key: Any) -> Any:
        """The part of a model that has parts by number or name, as nn.Sequential has."""
        root: Any = self.like_model
        if not hasattr(type(root), "__getitem__"):
            kind = "the model is not in this process" if root is None else type(root).__name__
            raise RunError(
                where=f"stage[{key!r}]", what="this stage has no parts by number or name",
                why=f"it has those of its model: {kind}",
                do="Pass stage.parameters() to what takes parameters (clip_grad_norm_, an "
                "optimizer); a part is an attribute, or stage.get_submodule(path).",
            )  # fmt: skip
        return root[key]

    # refused ---------------------------------------------------------------------------------
    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise _registered(f"stage[{key!r}]", value)

    def __delitem__(self, key: Any) -> NoReturn:
        raise _registered(f"del stage[{key!r}]", self[key])

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """As of any module; RunError where the modules are not those of the model."""
        if self.like_model is None:
            raise RunError(
                where="stage.apply",
                what="the stage does not know the classes of its modules",
                why="functions decide by them, and would do nothing",
                do="Call partc.load(folder, model), compile in this process, or apply it to the "
                "model and call stage.load_full(model).",
            )
        return super().apply(fn)

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("register_backward_hook")

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("register_full_backward_hook")

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("register_full_backward_pre_hook")

    def check_no_hooks(self) -> None:
        """RunError in ``step`` if the stage has forward hooks, which ``stage(...)`` alone runs."""
        if self._forward_hooks or self._forward_pre_hooks:
            raise RunError(
                where="stage.step",
                what="the stage has forward hooks, which step does not run",
                why="they are run by stage(...), as of any module",
                do="Call stage(...) and loss.backward(), or remove the hooks.",
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RunError(
            where="pickle of a stage",
            what="a stage cannot be pickled",
            why="it has process groups, and this rank's pieces of the tensors alone",
            do="Save stage.full_state_dict(), or call partc.save_checkpoint on all ranks; "
            "copy.deepcopy(stage) copies it.",
        )

    def __prepare_scriptable__(self) -> NoReturn:
        """What ``torch.jit.script`` asks of a module first."""
        raise no_export("torch.jit.script")


def _given_whole(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method that writes a model's tensors, which has to be given whole ones."""

    @functools.wraps(plain)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None and name == _WRITERS[0]:
            return plain(*args, **kwargs)
        raise RunError(
            where=f"stage.{name}",
            what="it would write this rank's pieces of the tensors",
            why="the parameters of a stage are DTensors, and of its own stage alone in a pipeline",
            do="Call whole = stage.full_state_dict() on all ranks, and then on one "
            "stage.save_pretrained(folder, state_dict=whole); or load it into the model.",
        )

    return checked


# registrations -------------------------------------------------------------------------------
_KEPT: WeakSet[nn.Module] = WeakSet()  # the modules of stages
_HOOKS: list[Any] = []


def _watch_registrations() -> None:
    """Let new tensors and modules of stages be seen, by torch's hooks for all modules."""
    if not _HOOKS:
        for kind in ("parameter", "buffer", "module"):
            watch = getattr(module_hooks, f"register_module_{kind}_registration_hook")
            _HOOKS.append(watch(_check_registration))


def _check_registration(module: nn.Module, name: str, value: Any) -> None:
    if module in _KEPT:
        raise _registered(f"{name} of a stage's module", value)


def _registered(where: str, value: object) -> RunError:
    return RunError(
        where=where,
        what=f"a {type(value).__name__} was registered, assigned or taken away",
        why="the program computes with the tensors and modules that the model had when it was "
        "compiled",
        do="Write values by tensor.copy_(...) under torch.no_grad(); change the model and compile "
        "again.",
    )


class _Refused:
    """A method of a module, at a path in the model, that cannot be called in a stage."""

    def __init__(self, name: str, path: str) -> None:
        self.__name__, self.path = name, path

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self.__name__, self.path)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickle", self.path)

    def __deepcopy__(self, memo: object) -> _Refused:
        return self


_WHY = {
    "forward": (
        "it computes nothing by itself, also where a method of the model (generate) calls it",
        "Call stage(...) or stage.step(...), which are the whole program. For what other methods "
        "and parts compute (generate, decode, samples) give the weights to a model of one device: "
        "plain = TheModel(...), and on all ranks plain.load_state_dict(stage.full_state_dict()); "
        "or, where it is too large, write that over stage(...), behind stage.eval().",
    ),
    "_apply": ("it cannot be moved or cast by itself", "Call .to() on the whole stage."),
    "pickle": ("it has this rank's pieces of the tensors alone", "Save stage.full_state_dict()."),
}


def _refuse(name: str, path: str = "") -> NoReturn:
    what, do = _WHY.get(
        name, ("the hook would never run", "Register it on the model and compile again.")
    )
    raise RunError(
        where=f"{name} of a stage's module" + (f" {path}" if path else ""),
        what=what,
        why="forward and backward of all modules are one program",
        do=do,
    )
