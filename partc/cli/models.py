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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary, extract_tb, format_exception_only
from typing import Any

import torch
from torch import Tensor, nn

from partc.cli.model_names import as_hub, as_module, unknown
from partc.errors import PartcError, UsageError
from partc.wrong_calls import did_you_mean, quoted

AUTO = (  # the first class that has the configuration's model, and the name of its input
    ("AutoModelForCausalLM", "input_ids"),
    ("AutoModelForSeq2SeqLM", "input_ids"),
    ("AutoModelForMaskedLM", "input_ids"),
    ("AutoModelForImageClassification", "pixel_values"),
)
LookingUp = ImportError, AttributeError
LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
)


@dataclass(frozen=True)
class Target:
    """A model, its example inputs and its loss."""

    model: nn.Module
    inputs: Any  # as ``partc.compile`` takes them
    loss: Callable[..., Any] | None = None
    labels: int = 0  # how many of the last inputs only the loss reads

    def for_inference(self) -> Target:
        """The model in eval mode, without a loss and the inputs that only the loss reads."""
        inputs = self.inputs[: -self.labels] if self.labels else self.inputs
        return Target(self.model.eval(), inputs)


@dataclass(frozen=True)
class Sizes:
    """The options of the command line for a Hugging Face model; None: not given."""

    batch: int | None = None
    seq: int | None = None
    layers: int | None = None
    dtype: torch.dtype = torch.float32
    dropout: bool = True


def find_model(name: str, sizes: Sizes, values: bool = False) -> Target:
    """The model of a name; UsageError if the name stands for none."""
    kind, _, rest = name.partition(":")
    if kind in ("http", "https"):
        raise unknown(name, "nothing is downloaded", as_hub(name))
    if not rest:
        raise unknown(name, "it has no colon", as_hub(name) or as_module(kind, "CALLABLE"))
    target = _configured(rest, sizes, values) if kind == "hf" else _called(kind, rest)
    if not sizes.dropout:
        _drop_nothing(target.model)
    return target


def _called(module: str, attribute: str) -> Target:
    """The model that ``attribute`` of a module is, or returns when it is called."""
    made = _found(module, attribute)
    is_called = callable(made) and not isinstance(made, nn.Module)
    if is_called:
        _check_takes_none(f"{module}:{attribute}", made)
    with _users_code(f"{module}:{attribute}"):
        made = made() if is_called else made
    if isinstance(made, nn.Module):
        with _users_code(f"{module}:{attribute}"):
            return Target(made, _own_inputs(made, module, attribute))
    if isinstance(made, tuple | list) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        return Target(made[0], made[1], made[2] if len(made) == 3 else None)
    raise _no_model(f"{module}:{attribute}", made)


def _no_model(name: str, made: Any) -> UsageError:
    """The error for a callable that gives something else."""
    each = ", ".join(type(x).__name__ for x in made) if isinstance(made, tuple | list) else ""
    gives = f"({each})" if each else quoted(made)
    return UsageError(
        where=name, what=f"it gives {gives}, and no model",
        why="it gives a model, or (model, inputs, loss) in this order",
        do="Let it return these: return model, (x, y), loss_of.",
    )  # fmt: skip


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
        with _users_code(module):
            return getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        there = vars(sys.modules[module]) if module in sys.modules else {}
        do = did_you_mean(attribute, (n for n in there if not n.startswith("_")))
        raise unknown(f"{module}:{attribute}", str(error), do) from error
    except ImportError as error:
        raise unknown(f"{module}:{attribute}", str(error), as_module(module, attribute)) from error
    finally:
        sys.path.pop(0)


@contextmanager
def _users_code(name: str) -> Iterator[None]:
    """Tell of an error in the code that a name stands for, and where it was raised.

    Not of those by which Python says that there is no such module or attribute.
    """
    try:
        yield
    except Exception as error:
        frames = [f for f in extract_tb(error.__traceback__) if _is_users(f.filename)]
        if isinstance(error, SyntaxError) and error.filename:
            frames.append(FrameSummary(error.filename, error.lineno, ""))
        if isinstance(error, PartcError) or (isinstance(error, LookingUp) and not frames):
            raise
        at = [f"{Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames[-1:]]
        raise UsageError(
            where=name,
            what=" ".join(["it raises", *format_exception_only(error)[-1].split()]),
            why="; ".join(at),
            do="The error is in the code that partc was to run; call it in Python to debug it.",
        ) from error


def _is_users(file: str) -> bool:
    """Whether a file is neither partc's nor Python's own, nor of a package that is installed."""
    others = {Path(__file__).parents[1], Path(importlib.__file__).parents[1]}
    path = Path(file)
    return path.is_file() and "site-packages" not in path.parts and others.isdisjoint(path.parents)


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


def _configured(name: str, sizes: Sizes, values: bool) -> Target:
    """A Hugging Face model, built from its configuration without downloading weights."""
    try:
        import transformers
    except ImportError:
        raise UsageError(
            where=f"hf:{name}",
            what="needs the transformers package",
            why="it is an optional dependency",
            do="pip install transformers",
        ) from None
    config = _config(transformers, name)
    _set_layers(config, name, sizes.layers)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    auto, argument = _auto_class(transformers, config, name)
    torch.manual_seed(0)
    try:
        with nullcontext() if values else parameters_on_meta():
            model = auto.from_config(config).to(sizes.dtype).train()
    except Exception as error:
        raise _no_config(name, error) from error
    make = _images if argument == "pixel_values" else _tokens
    try:
        return Target(model, make(config, sizes), _labelled(argument), labels=1)
    except AttributeError as error:
        raise _no_inputs(name, str(error)) from error


def _config(transformers: Any, name: str) -> Any:
    if name.endswith(".json") and not Path(name).is_file():
        raise unknown(f"hf:{name}", "there is no such file", "Check the path of the config.json.")
    known = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING.keys())
    if not Path(name).exists() and name not in known:
        why = f"{'nothing is downloaded' if '/' in name else 'no model type is called so'}"
        do = as_hub(name) if "/" in name else ""
        raise unknown(f"hf:{name}", why, do or did_you_mean(name, known))
    try:
        if name.endswith(".json") or Path(name).is_dir():
            return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        return transformers.AutoConfig.for_model(name)
    except (OSError, KeyError) as error:
        raise unknown(f"hf:{name}", str(error).splitlines()[0]) from error
    except Exception as error:  # the configurations check themselves, by classes of their own
        raise _no_config(name, error) from error


def _auto_class(transformers: Any, config: Any, name: str) -> tuple[Any, str]:
    for auto, argument in AUTO:
        found = getattr(transformers, auto)
        if type(config) in found._model_mapping:
            return found, argument
    raise _no_inputs(name, f"{type(config).__name__} fits none of {', '.join(a for a, _ in AUTO)}")


def _no_config(name: str, error: Exception) -> UsageError:
    """The refusal of a configuration with numbers of which no model can be made."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return UsageError(
        where=f"hf:{name}", what="transformers makes no model of this configuration",
        why=f"{type(error).__name__}: {said[-1]}", do="Correct the config.json.",
    )  # fmt: skip


def _no_inputs(name: str, why: str) -> UsageError:
    return UsageError(
        where=f"hf:{name}",
        what="is neither a language model nor an image classifier that needs only tokens or pixels",
        why=why,
        do="Name a function of yours that builds model, inputs and loss: package.module:callable.",
    )


def _set_layers(config: Any, name: str, layers: int | None) -> None:
    if layers is None:
        return
    known = [field for field in LAYERS if hasattr(config, field)]
    if not known:
        raise UsageError(
            where=f"hf:{name}",
            what="--layers does not apply",
            why=f"{type(config).__name__} has none of {', '.join(LAYERS)}",
            do="Write a config.json with the depth you want.",
        )
    for field in known:
        setattr(config, field, layers)
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]


def _tokens(config: Any, sizes: Sizes) -> tuple[Tensor, ...]:
    """Random token ids, and the same ids as labels."""
    shape = sizes.batch or 8, sizes.seq or 128
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.get_text_config().vocab_size, shape, generator=generator)
    return ids, ids.clone()


def _images(config: Any, sizes: Sizes) -> tuple[Tensor, ...]:
    """Random images, and random classes as labels."""
    batch, size = sizes.batch or 8, sizes.seq or getattr(config, "image_size", 224)
    height, width = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, config.num_channels, height, width, generator=generator)
    return pixels.to(sizes.dtype), torch.randint(config.num_labels, (batch,), generator=generator)


def _labelled(argument: str) -> Callable[..., Any]:
    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
        return model(**{argument: inputs}, labels=labels).loss

    return loss


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


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters that are made inside of the ``with`` on the meta device.

    Buffers keep their values, as the compiler uses those of small tables.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # else a tied weight would become two
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def sizes_of_inputs(shapes: Sequence[tuple[int, ...]], sizes: Sizes) -> Sizes:
    """Sizes with batch and sequence (or image) size from a program's inputs, where not given."""
    first = shapes[0] if shapes else ()
    batch = sizes.batch or (first[0] if first else None)
    seq = sizes.seq or (first[-1] if len(first) > 1 else None)
    return Sizes(batch, seq, sizes.layers, sizes.dtype, sizes.dropout)
