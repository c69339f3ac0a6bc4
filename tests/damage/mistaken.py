"""What a user may give in the place of something else: near misses of it, and any other thing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import partc
from tests.damage.built import batch_of, loss_of, model_of

Given = dict[str, Any]
Mistake = Callable[[random.Random, Given], str]  # changes what is given, and says how
ANY: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "False": lambda: False, "0": lambda: 0,
    "1": lambda: 1, "-1": lambda: -1, "3": lambda: 3, "10**12": lambda: 10**12,
    "1.5": lambda: 1.5, "nan": lambda: float("nan"), "inf": lambda: float("inf"),
    "''": lambda: "", "'x'": lambda: "x", "'4'": lambda: "4", "'dp=2'": lambda: "dp=2",
    "'cuda:0'": lambda: "cuda:0", "b'x'": lambda: b"x", "[]": list, "{}": dict, "()": tuple,
    "a set": lambda: {1}, "{'dp': 2}": lambda: {"dp": 2}, "[1, 2]": lambda: [1, 2],
    "an object": object, "a type": lambda: int, "a module": lambda: torch,
    "a generator": lambda: (each for each in [1, 2]), "a path": lambda: Path("nowhere"),
    "a tensor": lambda: torch.ones(8, 8), "a number in a tensor": lambda: torch.tensor(2.0),
    "whole numbers": lambda: torch.arange(8), "numpy's": lambda: torch.ones(8, 8).numpy(),
    "a batch": batch_of, "a list of tensors": lambda: list(batch_of()), "a model": model_of,
    "its class": lambda: nn.Linear, "another model": lambda: nn.Linear(8, 8),
    "weights": lambda: model_of().state_dict(),
    "a compiled model": lambda: torch.compile(model_of()),
    "parameters": lambda: model_of().parameters(), "a loss": lambda: loss_of,
    "a loss module": nn.MSELoss, "a lambda": lambda: (lambda *given: None),
    "an optimizer": lambda: torch.optim.SGD(model_of().parameters(), 0.1),
    "a loader": lambda: DataLoader(TensorDataset(*batch_of())), "a dtype": lambda: torch.float16,
    "a device": lambda: torch.device("meta"), "a mesh": lambda: partc.Mesh((("dp", 2),)),
    "a plan": partc.Plan, "print": lambda: print, "an exception": lambda: ValueError("no"),
}  # fmt: skip


def letters(rng: random.Random, word: str) -> str:
    """A word with one letter doubled, gone, changed or moved, or in capitals."""
    if len(word) < 2:
        return word + "x"
    at = rng.randrange(len(word) - 1)
    return rng.choice((
        word[:at] + word[at] + word[at:], word[:at] + word[at + 1 :], word.upper(), word + " ",
        word[:at] + rng.choice("abcxyz_-=") + word[at + 1 :],
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
    ))  # fmt: skip


# what is near to something -------------------------------------------------------------------
def near(rng: random.Random, value: Any) -> tuple[Any, str]:
    """Something of the same kind that is not the same."""
    if isinstance(value, bool) or value is None:
        return rng.choice((not value, "yes", 1)), "a flag of another kind"
    if isinstance(value, str):
        word = letters(rng, value)
        return word, repr(word)
    if isinstance(value, int | float):
        new = rng.choice((-value, value + 1, value * 1000, float(value), str(value), 0))
        return new, f"{new!r}"
    if isinstance(value, Tensor):
        return near_tensor(rng, value)
    if isinstance(value, nn.Module):
        return near_model(rng, value)
    if isinstance(value, tuple | list) and value:
        return near_rows(rng, value)
    name = rng.choice(sorted(ANY))
    return ANY[name](), name


def near_tensor(rng: random.Random, value: Tensor) -> tuple[Any, str]:
    how: dict[str, Callable[[], Any]] = {
        "half of its rows": lambda: value[::2], "no rows": lambda: value[:0],
        "transposed": lambda: value.mT, "one dim more": lambda: value[None],
        "one dim less": lambda: value[0], "float64": value.double, "float16": value.half,
        "whole numbers": value.long, "complex": lambda: value + 0j,
        "on meta": lambda: value.to("meta"),
        "with a gradient": lambda: value.clone().requires_grad_(), "bool": value.bool,
        "of a graph": lambda: value.clone().requires_grad_() * 2, "a list": value.tolist,
        "an array": lambda: value.detach().numpy(), "nan": lambda: value * float("nan"),
        "sparse": value.to_sparse, "a column": lambda: value[:, :1],
        "strided": lambda: value.mT.clone().mT,
        "expanded": lambda: value[:, :1].expand(-1, 8),
        "a parameter": lambda: nn.Parameter(value.clone()),
    }  # fmt: skip
    name = rng.choice(sorted(how))
    return how[name](), f"tensor {name}"


def near_model(rng: random.Random, value: nn.Module) -> tuple[Any, str]:
    how: dict[str, Callable[[], Any]] = {
        "in float64": value.double, "in float16": value.half, "in bfloat16": value.bfloat16,
        "frozen": lambda: value.requires_grad_(False), "in eval mode": value.eval,
        "on meta": lambda: value.to("meta"), "in DataParallel": lambda: nn.DataParallel(value),
        "in Sequential": lambda: nn.Sequential(value), "its forward": lambda: value.forward,
        "scripted": lambda: torch.jit.trace(value.eval(), batch_of()[:1]),
        "its class": lambda: type(value),
        "with a hook": lambda: hooked(value), "with another forward": lambda: moved(value),
        "without a part": lambda: lacking(value), "with a wider part": lambda: wider(value),
        "shared": lambda: shared(value), "half frozen": lambda: half_frozen(value),
    }  # fmt: skip
    name = rng.choice(sorted(how))
    return how[name](), f"model {name}"


def hooked(model: Any) -> Any:
    model.register_forward_hook(lambda module, given, result: result * 2)
    return model


def moved(model: Any) -> Any:
    model.forward = lambda x: x
    return model


def lacking(model: Any) -> Any:
    del model.up
    return model


def wider(model: Any) -> Any:
    model.up = nn.Linear(8, 32)
    return model


def shared(model: Any) -> Any:
    model.down.weight = nn.Parameter(model.up.weight.detach().T)
    return model


def half_frozen(model: Any) -> Any:
    model.up.requires_grad_(False)
    return model


def near_rows(rng: random.Random, value: Any) -> tuple[Any, str]:
    at, kind = rng.randrange(len(value)), type(value)
    how = rng.choice(("one less", "one more", "reversed", "a dict", "nested", *["near"] * 3))
    if how == "near":
        new, told = near(rng, value[at])
        return kind([*value[:at], new, *value[at + 1 :]]), f"[{at}] {told}"
    made: dict[str, Callable[[], Any]] = {
        "one less": lambda: kind(value[:-1]), "one more": lambda: kind([*value, value[0]]),
        "reversed": lambda: kind(value[::-1]), "nested": lambda: kind([kind(value)]),
        "a dict": lambda: {"x": value[0], "z": value[-1]},
    }  # fmt: skip
    return made[how](), how


NOTHING = "nothing is wrong"


# mistakes ------------------------------------------------------------------------------------
def another(rng: random.Random, given: Given) -> str:
    name, what = rng.choice(sorted(given)), rng.choice(sorted(ANY))
    given[name] = ANY[what]()
    return f"{name} = {what}"


def nearly(rng: random.Random, given: Given) -> str:
    name = rng.choice(sorted(given))
    given[name], told = near(rng, given[name])
    return f"{name}: {told}"


def missing(rng: random.Random, given: Given) -> str:
    name = rng.choice(sorted(given))
    del given[name]
    return f"no {name}"


def misspelt(rng: random.Random, given: Given) -> str:
    name = rng.choice(sorted(given))
    given[new := letters(rng, name)] = given.pop(name)
    return f"{name} is written {new}"


def exchanged(rng: random.Random, given: Given) -> str:
    a, b = rng.sample(sorted(given), 2) if len(given) > 1 else [*given, *given]
    given[a], given[b] = given[b], given[a]
    return f"{a} and {b} have changed places"


def nothing(rng: random.Random, given: Given) -> str:
    """No mistake: the control, which has to be accepted."""
    return NOTHING


MISTAKES: tuple[Mistake, ...] = (another, another, another, nearly, nearly, nearly, missing,
                                 misspelt, exchanged, nothing)  # fmt: skip
