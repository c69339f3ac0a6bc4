"""Find the model, example inputs and loss that a name on the command line stands for.

``package.module:callable`` returns a model, ``(model, inputs)`` or ``(model, inputs, loss)``; the
module may be in the current directory. ``hf:llama`` is the model of a default Hugging Face
configuration, ``hf:path/config.json`` of a configuration file; nothing is downloaded. Parameters of
such a model stay on the meta device unless values are asked for.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from partc.cli.hugging_face import find_configured
from partc.cli.model_names import as_hub, as_module, unknown
from partc.cli.target import Sizes, Target
from partc.cli.users_code import users_code
from partc.errors import UsageError
from partc.wrong_calls import did_you_mean, quoted

MOST_NAMED = 12  # functions of a file that a message lists


def find_model(name: str, sizes: Sizes, values: bool = False) -> Target:
    """The model of a name; UsageError if the name stands for none."""
    kind, _, rest = name.partition(":")
    if kind in ("http", "https"):
        raise unknown(name, "nothing is downloaded", as_hub(name))
    if not rest:
        raise unknown(name, "it has no colon", as_hub(name) or as_module(kind, "CALLABLE"))
    target = find_configured(rest, sizes, values) if kind == "hf" else _called(kind, rest)
    if not sizes.dropout:
        _drop_nothing(target.model)
    return target


def _called(module: str, attribute: str) -> Target:
    """The model that ``attribute`` of a module is, or returns when it is called."""
    made = _found(module, attribute)
    is_called = callable(made) and not isinstance(made, nn.Module)
    if is_called:
        _check_takes_none(f"{module}:{attribute}", made)
    with users_code(f"{module}:{attribute}"):
        made = made() if is_called else made
    if isinstance(made, nn.Module):
        with users_code(f"{module}:{attribute}"):
            return Target(made, _own_inputs(made, module, attribute))
    several = isinstance(made, tuple | list) and len(made) in (2, 3)
    if several and isinstance(made[0], nn.Module) and not _is_loss(made[1]):
        return Target(made[0], made[1], made[2] if len(made) == 3 else None)
    raise _no_model(f"{module}:{attribute}", made, is_called)


def _others(module: str, attribute: str) -> str:
    """The models and callables that a module has itself, and the one that is probably meant."""
    found = sys.modules.get(module)
    own = [
        name for name, each in vars(found).items()
        if not name.startswith("_") and getattr(each, "__module__", "") == module
    ] if found else []  # fmt: skip
    near = did_you_mean(attribute, own)
    if not own:
        return f"Write a function in {module} that returns (model, inputs, loss), and name it."
    more = ", ..." * (len(own) > MOST_NAMED)
    return f"{near} {module} has {', '.join(own[:MOST_NAMED])}{more}.".strip()


def _no_model(name: str, made: Any, is_called: bool) -> UsageError:
    """The error for a callable that gives something else, or for what is none."""
    module, _, attribute = name.partition(":")
    if not is_called:
        return UsageError(
            where=name, what=f"it is {quoted(made)}, and no function or model",
            why="partc calls it, and takes the model, inputs and loss that it returns",
            do=_others(module, attribute),
        )  # fmt: skip
    each = ", ".join(type(x).__name__ for x in made) if isinstance(made, tuple | list) else ""
    gives = f"({each})" if each else quoted(made)
    return UsageError(
        where=name, what=f"it gives {gives}" + ", and no model" * (not _has_model(made)),
        why="it gives a model, or (model, inputs, loss) in this order",
        do="Let it return these: return model, (x, y), loss_of.",
    )  # fmt: skip


def _has_model(made: Any) -> bool:
    return isinstance(made, tuple | list) and any(isinstance(each, nn.Module) for each in made)


def _is_loss(given: Any) -> bool:
    """Whether what stands in the place of the inputs is a function."""
    return callable(given) and not isinstance(given, Tensor)


def _check_takes_none(name: str, function: Any) -> None:
    """UsageError for a callable that needs arguments."""
    with suppress(ValueError):  # Python does not know the arguments of all built-in functions
        for each in inspect.signature(function).parameters.values():
            takes_any = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            if each.default is each.empty and not takes_any:
                raise UsageError(
                    where=name, what=f"it needs the argument {each.name!r}",
                    why="partc calls it without arguments",
                    do="Give the argument a default, or write a function that passes it: "
                    f"def setup(): return {name.rpartition(':')[2]}(...).",
                )  # fmt: skip


def _found(module: str, attribute: str) -> Any:
    """What a module, perhaps of the current directory, has under a name."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        with users_code(module):
            return getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        do = _others(module, attribute)
        raise unknown(f"{module}:{attribute}", str(error), do) from error
    except ImportError as error:
        raise unknown(f"{module}:{attribute}", str(error), as_module(module, attribute)) from error
    finally:
        sys.path.pop(0)


def _own_inputs(model: nn.Module, module: str, attribute: str) -> Any:
    """The ``example_inputs`` of a model, or what a method of that name returns; UsageError without
    any.
    """
    inputs = getattr(model, "example_inputs", None)
    if inputs is None:
        raise UsageError(
            where=f"{module}:{attribute}",
            what="gives a model without example inputs",
            why="shapes and dtypes of the batch are needed",
            do="Return (model, inputs, loss), or give the model an `example_inputs` attribute.",
        )
    return inputs() if callable(inputs) else inputs


def _drop_nothing(model: nn.Module) -> None:
    """Set every dropout to 0: modules, their attributes, and the configuration's fields."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and type(value) is float:
                setattr(module, name, 0.0)
    config = getattr(model, "config", None)
    for name in [n for n in vars(config or object) if "drop" in n or n.endswith("pdrop")]:
        if type(getattr(config, name)) is float:
            setattr(config, name, 0.0)


def sizes_of_inputs(shapes: Sequence[tuple[int, ...]], sizes: Sizes) -> Sizes:
    """Sizes with batch and sequence (or image) size from a program's inputs, where not given."""
    first, last = (shapes[0], shapes[-1]) if shapes else ((), ())
    batch = sizes.batch or (first[0] if first else None)
    seq = sizes.seq or next((each[-1] for each in (last, first) if len(each) > 1), None)
    return Sizes(batch, seq, sizes.layers, sizes.dtype, sizes.dropout)
