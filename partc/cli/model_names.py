"""Names of models on the command line: what they may look like, and what one that is none may mean.

Nothing here imports torch or transformers, so that a slip of the pen is told at once. The model
types of transformers are read from its files.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from partc.errors import UsageError
from partc.file_text import Unreadable, file_bytes, file_text, json_value
from partc.users_line import unparsed
from partc.wrong_calls import did_you_mean

HF = "hf"
_TYPE = re.compile(r'\(?"([\w.-]+)"(?:,|:) "\w+Config"')  # of the table of model types
_LEAST_TYPES = 100  # fewer were found: the table stands elsewhere, and nothing is refused for it


def check_name(name: str) -> None:
    """UsageError for a name that can stand for no model, as far as files alone tell."""
    kind, _, rest = name.partition(":")
    if kind in ("http", "https"):
        raise unknown(name, "nothing is downloaded", as_hub(name))
    if not rest:
        raise unknown(name, "it has no colon", as_hub(name) or as_module(kind, "CALLABLE"))
    if kind == HF:
        _check_configured(rest)
    elif do := as_module(kind, rest):
        raise unknown(name, "it names a file, and not a module", do)
    else:
        _check_module(kind, rest)


def _check_configured(name: str) -> None:
    """UsageError for an ``hf:`` name that is no file, folder or model type."""
    if find_spec("transformers") is None:
        return  # told with how to install it
    if name.endswith(".json") and not Path(name).is_file():
        raise unknown(f"{HF}:{name}", "there is no such file", "Check the path of the config.json.")
    _check_json(name)
    types = model_types()
    if not Path(name).exists() and name not in types and len(types) > _LEAST_TYPES:
        why = "nothing is downloaded" if "/" in name else "no model type is called so"
        do = as_hub(name) if "/" in name else ""
        raise unknown(f"{HF}:{name}", why, do or did_you_mean(name, types))


def _check_json(name: str) -> None:
    """UsageError for a config.json, or a folder's, that is no table of JSON."""
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if path.suffix != ".json" or not path.is_file():
        return
    try:
        if not isinstance(json_value(file_text(path)), dict):
            raise Unreadable("it has no keys")
    except Unreadable as error:
        raise UsageError(
            where=f"{HF}:{name}", what="the configuration cannot be read", why=str(error),
            do=f"Correct {path}: it is no JSON.",
        ) from None  # fmt: skip


def _check_module(module: str, attribute: str) -> None:
    """UsageError for a module that Python would not find from here; its package is not run."""
    first = module.partition(".")[0]
    here = Path.cwd()
    _check_parses(here / f"{module.replace('.', '/')}.py", f"{module}:{attribute}")
    if not first.isidentifier() or first in sys.modules or (here / first).is_dir():
        return
    if (here / f"{first}.py").is_file() or find_spec(first) is not None:
        return
    near = sorted({each.stem for each in here.glob("*.py")})
    raise unknown(f"{module}:{attribute}", f"No module named {first!r}", did_you_mean(first, near))


def _check_parses(path: Path, name: str) -> None:
    """UsageError for a module of the current folder that is no Python; nothing of it is run."""
    if not path.is_file():
        return
    try:
        ast.parse(file_bytes(path), str(path))
    except SyntaxError as error:
        raise UsageError(
            where=name, what="the file does not parse", why=unparsed(error), do="Mend that line.",
        ) from None  # fmt: skip
    except (Unreadable, ValueError, RecursionError):
        return  # told by the import


@cache
def model_types() -> tuple[str, ...]:
    """The names of transformers' model types, read from its files; none without transformers."""
    spec = find_spec("transformers")
    places = (spec.submodule_search_locations or []) if spec else []
    found: dict[str, None] = {}
    for place in places:
        for file in ("auto_mappings.py", "configuration_auto.py"):
            path = Path(place, "models", "auto", file)
            if path.is_file():
                found |= dict.fromkeys(_TYPE.findall(path.read_text(encoding="utf-8")))
    return tuple(found)


def unknown(name: str, why: str, do: str = "") -> UsageError:
    """The refusal of a name that stands for no model."""
    return UsageError(
        where=name, what="does not name a model", why=why,
        do=do or "Write package.module:callable, hf:llama or another type, or hf:path/config.json.",
    )  # fmt: skip


def as_hub(name: str) -> str:
    """What to write for a model of the hub, a model type, a program or a folder; "" for others."""
    if Path(name, "program.json").is_file():
        return (
            f"It is a saved program: start it by torchrun and {Path(name, 'run.py')}, or look at "
            f"it by partc explain {name}. To compile anew, name its model: package.module:callable."
        )
    if Path(name, "config.json").is_file():
        return f"Write hf:{Path(name, 'config.json')}."
    hub = re.fullmatch(r"(?:https?://[^/]+/)?([\w.-]+/[\w.-]+)/?", name)
    if hub and not name.endswith(".py") and not name.startswith("."):
        return (
            f"Save its configuration, AutoConfig.from_pretrained({hub[1]!r})"
            f".save_pretrained({hub[1].rpartition('/')[2]!r}), and name that: "
            f"hf:{hub[1].rpartition('/')[2]}/config.json. A file of yours is named "
            "package.module:callable."
        )
    return f"Write hf:{name}." if name in model_types() else ""


def as_module(module: str, attribute: str) -> str:
    """What to write for the path of a file; "" for what is none."""
    if module.endswith(".py") or "/" in module:
        path = Path(module.removesuffix(".py"))
        if path.is_absolute() and not path.is_relative_to(Path.cwd()):
            there = f"cd {path.parent}; {path.name}:{attribute}"
            return f"Change to its folder, and name the module: {there}."
        path = path.relative_to(Path.cwd()) if path.is_absolute() else path
        dotted = str(path).strip("./").replace("/", ".")
        return f"Write the module, as Python imports it from here: {dotted}:{attribute}."
    return ""
