"""Read and write ``program.json``, the list of a saved program's parts.

The file is untrusted input: every entry is checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from partc.errors import LoadError, PartcError
from partc.file_text import Unreadable, file_text, if_of_another_rank
from partc.graph.draws import SORTED, UNREAD, Draw
from partc.plan.batch import Dealt
from partc.plan.mesh import Mesh
from partc.program.basis import Basis
from partc.program.changed_file import changed, has_other_line_ends, other_line_ends
from partc.program.expected import Expectation
from partc.program.fixed_text import FixedText
from partc.program.folders import PROGRAM, if_checkpoints
from partc.program.helper_file import NAME as HELPERS
from partc.program.tensorfile import has_its_size
from partc.program.user_lines import UserLines
from partc.program.wanted import Wanted
from partc.trace.arguments import Arguments
from partc.trace.fingerprint import KINDS, Fingerprint, TensorSpec
from partc.trace.trees import Tree

NAME = PROGRAM
OTHERS = "programs"  # the folder with programs of other shapes and modes
SCHEMA = 6
TORCH_MIN, TORCH_BELOW = (2, 13), (2, 16)
MAX_BYTES = 64_000_000
_OPTIONAL = ("decided", "touched", "code", "target")  # fields that may be left out
FILE_NAME = re.compile(r"[a-z][a-z0-9_]*\.(py|toml|csv|safetensors)\Z", re.ASCII)
NEEDED = {"plan.toml", "run.py", "constants.safetensors"}  # files of every program
COMPILE_AGAIN = "Compile the program again, or copy the folder again."
_MALFORMED = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError,
    MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """The checked content of ``program.json``."""

    model: str
    mesh: Mesh
    roles: tuple[tuple[int, str], ...]
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    arguments: Arguments
    returns: Tree | None
    fingerprint: Fingerprint
    cost: Mapping[str, Any]  # {"text": as printed, "data": numbers}
    basis: Basis
    expected: Expectation
    fixed: FixedText
    lines: Mapping[str, UserLines]  # of each role's file
    wanted: Wanted
    others: tuple[str, ...]  # the folders of programs of other shapes and modes, in OTHERS
    files: Mapping[str, str]  # name -> sha256
    draws: Mapping[str, Draw] = field(default_factory=dict)
    decided: tuple[str, ...] = ()  # buffers whose values decided what was traced
    results: Mapping[str, Dealt] = field(default_factory=dict)  # of which a rank has its rows
    dealt: Mapping[str, Dealt] = field(default_factory=dict)  # of inputs given in pieces
    target: Mapping[str, str | int | bool] = field(default_factory=dict)  # options of a command

    def as_json(self) -> str:
        """The text of ``program.json``; the last entry is the digest of all others."""
        fields = {
            "schema": SCHEMA,
            "torch": [_dotted(TORCH_MIN), _dotted(TORCH_BELOW)],
            "model": self.model,
            "mesh": [list(axis) for axis in self.mesh.axes],
            "roles": [list(run) for run in self.roles],
            "inputs": {
                name: [list(shape), dtype, *([self.dealt[name]] if name in self.dealt else [])]
                for name, (shape, dtype) in self.inputs.items()
            },
            "arguments": self.arguments.as_json(),
            "returns": None if self.returns is None else self.returns.as_json(),
            "results": {name: [list(cut) for cut in cuts] for name, cuts in self.results.items()},
            "fingerprint": {
                name: [spec.kind, list(spec.shape), spec.dtype]
                for name, spec in self.fingerprint.tensors.items()
            },
            "cost": dict(self.cost),
            "basis": self.basis.as_json(),
            "draws": {
                site: [draw.name, list(draw.shape), list(map(list, draw.cuts)), draw.kind]
                for site, draw in self.draws.items()
            },
            "expected": self.expected.as_json(),
            "fixed": self.fixed.as_json(),
            "lines": {name: each.as_json() for name, each in sorted(self.lines.items())},
            "wanted": self.wanted.as_text(),
            "others": list(self.others),
            "files": dict(sorted(self.files.items())),
        }
        touched, code = dict(self.fingerprint.touched), dict(self.fingerprint.code)
        asked = self.decided, touched, code, dict(self.target)
        fields |= {name: each for name, each in zip(_OPTIONAL, asked, strict=True) if each}
        return json.dumps({**fields, "sha256": _digest_of(fields)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path, *, edited: bool = False) -> Manifest:
        """Read and check a folder's ``program.json``, and the files that it lists.

        LoadError for a malformed manifest, a missing file or, unless ``edited``, a changed one.
        """
        path = folder / NAME
        refuse_link(path)
        if folder.is_dir() and not path.exists():
            do = _instead(folder) or COMPILE_AGAIN
            refuse(folder, f"it has no {NAME}", "every saved program has one", do)
        try:
            fields = json.loads(file_text(path, MAX_BYTES))
        except (Unreadable, ValueError, RecursionError) as error:
            refuse(path, "cannot be read", str(error), _instead(folder) or COMPILE_AGAIN)
        try:
            manifest = cls._checked(fields)
        except (_OutOfOrder, PartcError) as error:
            refuse(path, "is not a manifest that this partc wrote", str(error))
        except _MALFORMED as error:
            refuse(path, "has entries that are missing or malformed", repr(error))
        for name, digest in manifest.files.items():
            _check_file(folder / name, digest, edited=edited)
        for name in manifest.others:
            refuse_link(folder / OTHERS)
            refuse_link(folder / OTHERS / name)
        return manifest

    @classmethod
    def _checked(cls, fields: Any) -> Manifest:
        """Build the manifest from parsed JSON; raise at the first entry that is malformed."""
        _need(isinstance(fields, dict), "it is not a table")
        schema = fields.get("schema")
        _need(schema == SCHEMA, f"it has schema {schema!r}, this partc reads {SCHEMA}")
        rest = {key: entry for key, entry in fields.items() if key != "sha256"}
        _need(fields["sha256"] == _digest_of(rest), "its content does not have its digest")
        differ = (set(rest) ^ _FIELDS) - {*_OPTIONAL}
        _need(not differ, f"its fields differ in {sorted(differ)}")
        _check_torch(*fields["torch"])
        mesh = Mesh(tuple((name, size) for name, size in fields["mesh"]))
        files = {_file_name(name): _text(digest) for name, digest in fields["files"].items()}
        roles = tuple((_size(num), _text(name)) for num, name in fields["roles"])
        _need(sum(num for num, _ in roles) == mesh.num_ranks, "its roles do not cover its mesh")
        texts = {name for _, name in roles}
        _need(texts <= set(files), "a role has no file")
        lacking = sorted(NEEDED - set(files))
        _need(not lacking, f"it has no digest of {', '.join(lacking)}")
        odd = sorted(n for n in set(files) - texts - NEEDED - {HELPERS} if n.endswith(".py"))
        _need(not odd, f"no rank runs {', '.join(odd)}")
        return cls(
            model=_text(fields["model"]),
            mesh=mesh,
            roles=roles,
            inputs={n: (_sizes(s), _text(d)) for n, (s, d, *_) in fields["inputs"].items()},
            dealt={n: _cuts(*cuts) for n, (_, _, *cuts) in fields["inputs"].items() if cuts},
            arguments=_arguments(fields["arguments"], [*fields["inputs"]]),
            returns=None if fields["returns"] is None else Tree.of_json(fields["returns"]),
            results={_text(n): _cuts(cuts) for n, cuts in fields["results"].items()},
            fingerprint=Fingerprint(
                {n: _spec(*entry) for n, entry in fields["fingerprint"].items()},
                *(_texts(fields.get(name, {})) for name in ("touched", "code")),
            ),
            cost=_cost(fields["cost"]),
            basis=Basis.of_json(fields["basis"]),
            draws={_text(site): _draw(*entry) for site, entry in fields["draws"].items()},
            decided=tuple(_text(name) for name in fields.get("decided", ())),
            expected=Expectation.of_json(fields["expected"]),
            fixed=FixedText.of_json(fields["fixed"]),
            lines={_text(n): UserLines.of_json(each) for n, each in fields["lines"].items()},
            wanted=Wanted.parse(_text(fields["wanted"])),
            others=tuple(_number(name) for name in fields["others"]),
            files=files,
            target=_options(fields.get("target", {})),
        )


_FIELDS = {
    "schema", "torch", "model", "mesh", "roles", "inputs", "arguments", "returns", "results",
    "fingerprint", "cost", "basis", "draws", "expected", "fixed", "lines", "wanted", "others",
    "files",
}  # fmt: skip


class _OutOfOrder(Exception):
    """An entry of a manifest is missing or malformed."""


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _OutOfOrder(otherwise)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of(path: Path) -> str:
    """The sha256 of a file, which may be larger than memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse(path: Path, what: str, why: str, do: str = COMPILE_AGAIN) -> NoReturn:
    raise LoadError(where=str(path), what=what, why=why, do=do) from None


def file_of(path: Path) -> str:
    """The text of a program's file; LoadError for what is none."""
    try:
        return file_text(path)
    except Unreadable as error:
        refuse(path, "is not a text", str(error))


def refuse_link(path: Path) -> None:
    """LoadError if a file is a symbolic link, as a link could point anywhere."""
    if path.is_symlink():
        refuse(path, "is a symbolic link", "a saved program consists of plain files")


_OF_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def _instead(folder: Path) -> str:
    """What to name in place of a folder without a program; "" if there is something else."""
    if not folder.exists():
        do = "Name the folder that program.save(), or `partc compile --out`, wrote."
        wait = if_of_another_rank(folder)
        return do + wait.replace("save.", "save, or compile on all ranks with cache=FOLDER.")
    if folder.is_file():
        if folder.suffix in _OF_WEIGHTS:
            return (
                "Name the folder of a program; weights are for a stage: "
                "stage.load_full(torch.load(path, weights_only=True)), or the path of safetensors."
            )
        if (folder.parent / NAME).is_file():
            return f"Name the folder, not a file in it: {folder.parent}."
        return "Name the folder that program.save(), or `partc compile --out`, wrote."
    if checkpoints := if_checkpoints(folder):
        return checkpoints
    if next(folder.glob("*.safetensors"), None) or next(folder.glob("stage*.py"), None):
        return ""  # what is left of a program
    below = sorted(each.parent for each in folder.glob(f"*/{NAME}"))
    named = f": {' or '.join(map(str, below[:3]))}" if below else ""
    return f"Name the folder that program.save(), or `partc compile --out`, wrote{named}."


def _check_file(path: Path, digest: str, *, edited: bool) -> None:
    refuse_link(path)
    if not path.is_file():
        refuse(path, "is missing", f"{NAME} lists it")
    if path.suffix != ".safetensors" and path.stat().st_size > MAX_BYTES:
        refuse(path, "is no text of a program", f"it has more than {MAX_BYTES:,} bytes")
    if path.suffix == ".safetensors" and not has_its_size(path):
        refuse(
            path,
            "was changed or damaged after it was saved",
            "it has another size than its header says",
        )
    if has_other_line_ends(path, digest):
        refuse(path, *other_line_ends(path))
    if not edited and sha256_of(path) != digest:
        refuse(path, *changed(path))


def _check_torch(least: str, below: str) -> None:
    here = tuple(int(part) for part in torch.__version__.split(".")[:2])
    low, high = (tuple(map(int, text.split("."))) for text in (least, below))
    _need(low <= here < high, f"it needs torch {least} to below {below}, here is {_dotted(here)}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _digest_of(fields: Mapping[str, Any]) -> str:
    return sha256(json.dumps(fields, sort_keys=True).encode())


def _text(entry: Any) -> str:
    _need(isinstance(entry, str), f"{entry!r} is not a text")
    return str(entry)


def _texts(entry: Any) -> dict[str, str]:
    return {_text(name): _text(each) for name, each in entry.items()}


def _options(entry: Any) -> dict[str, str | int | bool]:
    plain = all(type(each) in (str, int, bool) for each in entry.values())
    _need(plain and (not entry or "model" in entry), "its target names no model")
    return {_text(name): each for name, each in entry.items()}


def _file_name(entry: Any) -> str:
    _need(bool(FILE_NAME.match(_text(entry))), f"{entry!r} is no name of a program's file")
    return _text(entry)


def _number(entry: Any) -> str:
    _need(re.fullmatch(r"\d{1,6}", _text(entry)) is not None, f"{entry!r} is no program's number")
    return _text(entry)


def _size(entry: Any) -> int:
    _need(type(entry) is int and entry >= 0, f"{entry!r} is not a size")
    return int(entry)


def _sizes(entry: Any) -> tuple[int, ...]:
    return tuple(_size(size) for size in entry)


def _spec(kind: Any, shape: Any, dtype: Any) -> TensorSpec:
    _need(kind in KINDS, f"{kind!r} is no kind of tensor")
    return TensorSpec(kind, _sizes(shape), _text(dtype))


def _arguments(entry: Any, inputs: list[str]) -> Arguments:
    arguments = Arguments.of_json(entry)
    _need(arguments.names == inputs, "its arguments are not its inputs")
    return arguments


def _draw(name: Any, shape: Any, cuts: Any, kind: Any) -> Draw:
    _need(kind in ("", SORTED, UNREAD), f"{kind!r} is no kind of draw")
    each = tuple((_text(axis), _size(dim), _size(outer), _size(n)) for axis, dim, outer, n in cuts)
    return Draw(_text(name), _sizes(shape), each, kind)


def _cuts(entry: Any) -> Dealt:
    return tuple((_text(axis), _size(dim), _size(outer)) for axis, dim, outer in entry)


def _cost(entry: Any) -> Mapping[str, Any]:
    _need(set(entry) == {"text", "data"}, "its cost is not a text and its numbers")
    return {"text": _text(entry["text"]), "data": entry["data"]}
