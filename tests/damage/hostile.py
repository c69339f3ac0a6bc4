"""Cases of input that was made to do harm: names, sizes, nesting, links, pickles, code."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import partc
from tests.damage import readers
from tests.damage.artefacts import (
    Made,
    Make,
    checkpoint_read,
    copied,
    forge,
    reader,
    write_manifest,
)
from tests.damage.built import LAYOUTS, MACHINE, SCHEDULE, Built
from tests.damage.spoil import spoil_entry
from tests.damage.verdicts import Verdict
from tests.patience import patience

HOSTILE: dict[str, Make] = {}
NAMES = (
    "step", "stages", "dp_rank", "self", "class", "lambda", "None", "torch", "dist", "Tensor", "x",
    "import os", "a'b", 'a"b', "a\\b", "a\nb", "a\tb", "\x1b[2J", "{x}", "{{ x }}", "%s", "é",
    "\u210c", "名", "\u202eabc",
    "", " ", "0", "-", "__init__", "__class__", "__dict__", "_parameters",
    "forward", "grad", "print", "open", "MESH", "SHARDS", "mesh", "rank", "loss", "a" * 300, "'''",
    '"""', "#", "\\", "$(id)", "../x", "/etc/passwd", "a/b", "nul\0", "d_x", "seed", "saved",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    10**12, -(10**12), 10**30, 2**63, 2**31, 1e308, "x" * 100_000, "\x1b[2J\x1b]0;t\x07", "../x",
    "../../etc/passwd", "/dev/zero", "__import__('os').system('id')", "\ud800", "nul\0", "load",
    [[[[[[]]]]]], [0] * 50_000, {"a": {"b": {"c": {}}}}, "torch.load", "step", "lambda", True, None,
    "con", "a\nb", "'", '"', "{{7*7}}", [1] * 9, "eval", "float32 ", "pp", -1, 0,
)  # fmt: skip


def hostile(name: str) -> Callable[[Make], Make]:
    def added(make: Make) -> Make:
        HOSTILE[name] = make
        return make

    return added


# names ---------------------------------------------------------------------------------------
class Named(nn.Module):
    """A model with a module, a parameter and a buffer of any names."""

    def __init__(self, module: str, parameter: str, buffer: str) -> None:
        super().__init__()
        self.names = (module, parameter, buffer)
        self.add_module(module, nn.Linear(8, 8))
        self.register_parameter(parameter, nn.Parameter(torch.linspace(0.0, 1.0, 8)))
        self.register_buffer(buffer, torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        module, parameter, buffer = self.names
        layer: Any = self._modules[module]
        y: Tensor = (layer(x) + self._parameters[parameter]) * self._buffers[buffer]
        return y


@hostile("names of a model")
def names(rng: random.Random, built: Built, place: Path) -> Made:
    usual = ["layer", "gain", "scale"]
    for at in rng.sample(range(3), rng.choice((1, 1, 2, 3))):
        usual[at] = rng.choice(NAMES)
    mesh, given = LAYOUTS[rng.choice(("ddp", "sharded", "zero1"))]
    axes = rng.choice(NAMES) if rng.random() < 0.2 else None

    def read() -> Verdict | None:
        try:
            model = Named(*usual)
        except (KeyError, TypeError, AttributeError):
            return Verdict("refused", "by torch")
        x = (torch.linspace(-1, 1, 64).reshape(8, 8),)
        program = partc.compile(
            model, {axes: 2} if axes is not None else mesh, x, loss=_square, **given
        )
        program.save("build")
        report = partc.verify(
            partc.load("build", model), model, x, loss=_square, timeout=patience(40.0)
        )
        if not report.ok():
            return Verdict("wrong", str(report))
        return readers.apart(lambda: readers.command(["explain", "build"]))

    return Made(f"{usual!r}, axis {axes!r} on {mesh}", lambda: readers.apart(read))


def _square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


# entries -------------------------------------------------------------------------------------
@hostile("entries of program.json")
def manifest(rng: random.Random, built: Built, place: Path) -> Made:
    name, folder = copied(rng, built, place)
    path = folder / "program.json"
    fields = json.loads(path.read_text())
    damage = spoil_entry(rng, fields, VALUES)
    write_manifest(path, fields)
    return Made(f"{name}: {damage}", reader(built, name, folder, forged=True))


@hostile("entries of checkpoint.json")
def checkpoint(rng: random.Random, built: Built, place: Path) -> Made:
    step, read = checkpoint_read(rng, built, place, True)
    fields = json.loads((step / "checkpoint.json").read_text())
    damage = spoil_entry(rng, fields, VALUES)
    write_manifest(step / "checkpoint.json", fields)
    return Made(damage, read)


@hostile("headers of tensor files")
def header(rng: random.Random, built: Built, place: Path) -> Made:
    place.mkdir(exist_ok=True)
    path = Path(shutil.copy(built.folder / "weights.safetensors", place))
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    fields = json.loads(content[8 : 8 + size])
    damage = spoil_entry(rng, fields, VALUES)
    text = json.dumps(fields).encode()
    length = rng.choice((len(text),) * 4 + (2**63, 2**40, 0))
    path.write_bytes(length.to_bytes(8, "little") + text + content[8 + size :])
    return Made(f"length {length}, {damage}", _weights(built, path))


def _weights(built: Built, path: Path) -> Callable[[], Verdict]:
    return lambda: readers.read_weights(path, [path], built.program("one"))


@hostile("index of weights")
def index(rng: random.Random, built: Built, place: Path) -> Made:
    folder = Path(shutil.copytree(built.folder / "shards", place / "shards"))
    path = folder / "model.safetensors.index.json"
    fields = json.loads(path.read_text())
    damage = spoil_entry(rng, fields, VALUES)
    path.write_text(json.dumps(fields))
    files = sorted(folder.glob("*.safetensors"))
    return Made(damage, lambda: readers.read_weights(path, files, built.program("one")))


# texts ---------------------------------------------------------------------------------------
def _texts(rng: random.Random) -> tuple[bytes, str]:
    """The content of a file that is no honest text of any kind, and what it is."""
    deep, word = rng.choice((1_000, 100_000)), rng.choice(NAMES)
    value = rng.choice(VALUES)
    return rng.choice((
        (b"[" * deep, f"{deep} brackets"), (b"a = " + b"{a=" * deep, f"{deep} tables"),
        (b'{"a":' * deep, f"{deep} objects"), (b"a." * deep + b"a = 1", f"{deep} dots"),
        (b"a = " + b"9" * 5_000, "5,000 digits"), (b"\xff\xfea\0", "UTF-16"),
        (b"\xef\xbb\xbfa = 1", "a byte order mark"), (b"\xe9 = 1", "Latin-1"),
        (b"\0" * 999, "zeros"),
        (pickle.dumps(Canary()), "a pickle"), (rng.randbytes(3000), "noise"),
        (b"\x1b[2J\x1b]0;t\x07 = 1", "escapes"), (b"0F0," * deep, f"{deep} cells"),
        (b"a" * 3_000_000, "3 MB in a line"), (b"\n" * 3_000_000, "3 million lines"),
        (b'"""' + b"x" * 9999, "an open string"), (b"PK\x03\x04" + b"\0" * 99, "a zip file"),
        (f"[mesh]\ndp = {value!r}\n".encode("utf-8", "replace"), f"a mesh of {str(value)[:30]!r}"),
        (f"microbatches = {value!r}\n".encode("utf-8", "replace"), f"{str(value)[:30]!r} batches"),
        (f"[params]\n{json.dumps(word)} = {{ dp = 0 }}\n".encode(), f"parameter {word!r}"),
        (f"[inputs]\nx = {{ dp = {value!r} }}\n".encode("utf-8", "replace"), "a hostile dim"),
    ))  # fmt: skip


class Canary:
    """Unpickled, it writes a file."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {Path.cwd() / 'ran'}",)


def _place(rng: random.Random, path: Path) -> str:
    """Put something that is no honest file in a path's place; what it is."""
    how = rng.choice(("text",) * 4 + ("pipe", "zeros", "noise", "folder", "link", "loop", "huge"))
    content = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    if how == "text":
        text, what = _texts(rng)
        path.write_bytes(text)
        return what
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "huge":  # without holding a disk's space
        with path.open("wb") as file:
            file.truncate(40_000_000_000)
    elif how == "link":
        (path.parent.parent / f"outside-{path.name}").write_bytes(content)
        path.symlink_to(f"../outside-{path.name}")
    else:
        path.symlink_to({"zeros": "/dev/zero", "noise": "/dev/urandom", "loop": path.name}[how])
    return how


@hostile("what is no plain file, in a program")
def program_file(rng: random.Random, built: Built, place: Path) -> Made:
    name, folder = copied(rng, built, place)
    file = rng.choice(sorted(f for f in folder.rglob("*") if f.is_file() and f.name != "run.py"))
    what = _place(rng, file)
    forged = rng.random() < 0.5 and file.is_file() and file.stat().st_size < 10_000_000
    if forged:
        forge(file.parent)
        what += ", forged"
    read = reader(built, name, folder, forged=forged)
    return Made(f"{name}/{file.relative_to(folder)}: {what}", read)


@hostile("what is no plain file, in a checkpoint")
def checkpoint_file(rng: random.Random, built: Built, place: Path) -> Made:
    step, read = checkpoint_read(rng, built, place, True)
    file = rng.choice(sorted(step.iterdir()))
    return Made(f"{file.name}: {_place(rng, file)}", read)


@hostile("what is no plain file, as weights")
def weights_file(rng: random.Random, built: Built, place: Path) -> Made:
    place.mkdir(exist_ok=True)
    path = Path(shutil.copy(built.folder / "weights.safetensors", place))
    return Made(_place(rng, path), _weights(built, path))


@hostile("texts given to compile")
def given(rng: random.Random, built: Built, place: Path) -> Made:
    place.mkdir(exist_ok=True)
    kind = rng.choice(("plan", "mesh", "schedule"))
    source = {"mesh": built.folder / MACHINE, "schedule": built.folder / SCHEDULE}.get(
        kind, built.program("ddp") / "plan.toml"
    )
    path = Path(shutil.copy(source, place))
    what = _place(rng, path)
    if kind == "plan":
        return Made(f"plan: {what}", lambda: readers.read_for_compile("dp=2", plan=path))
    if kind == "mesh":
        return Made(f"mesh: {what}", lambda: readers.read_for_compile(path, plan="ddp"))
    words = {"plan": "ddp", "microbatches": 2, "schedule": str(path)}
    return Made(f"schedule: {what}", lambda: readers.read_for_compile("pp=2", **words))


# code ----------------------------------------------------------------------------------------
@hostile("code in a role")
def code(rng: random.Random, built: Built, place: Path) -> Made:
    """Code of a stranger, with right digests; what only loads, checks or explains runs none."""
    name, folder = copied(rng, built, place)
    file = rng.choice(sorted(f for f in folder.rglob("*.py") if f.name != "run.py"))
    ran = str(Path.cwd() / "ran")
    line = rng.choice((
        f"open({ran!r}, 'w')", f"__import__('os').system('touch {ran}')",
        f"MESH = {{'dp': open({ran!r}, 'w')}}", f"class A(open({ran!r}, 'w').__class__): pass",
        f"@(lambda f: open({ran!r}, 'w'))\ndef g(): pass", f"def g(a=open({ran!r}, 'w')): pass",
        f"assert open({ran!r}, 'w')", f"x: open({ran!r}, 'w') = 1",
        f"torch.hub._makedirs = open({ran!r}, 'w')", f"[open({ran!r}, 'w') for _ in [0]]",
        f"torch.save(1, {ran!r})", f"torch.ones(1).numpy().tofile({ran!r})",
    ))  # fmt: skip
    lines = file.read_text().splitlines()
    lines.insert(rng.choice((len(lines), 0, rng.randrange(len(lines)))), line)
    file.write_text("\n".join(lines) + "\n")
    if rng.random() < 0.5:
        forge(file.parent)

        def read() -> Verdict:
            return readers.read_program(folder, built.program(name), None)
    else:

        def read() -> Verdict:
            arguments = ["check", str(folder), "--accept-edits"]
            return readers.apart(lambda: readers.command(arguments))

    return Made(f"{name}/{file.name}: {line}", read, "build/program.json")


# places --------------------------------------------------------------------------------------
@hostile("an out folder")
def out(rng: random.Random, built: Built, place: Path) -> Made:
    """A place where ``save`` would have to delete or follow what is not partc's own."""
    name, folder = copied(rng, built, place)
    how = rng.choice(("file", "mine", "inside", "long", "below a file", "link", "read only",
                      "nul", "manifest of another", "deep"))  # fmt: skip
    target: Path | str = folder
    if how == "file":
        target = folder / "plan.toml"
    elif how == "mine":
        (folder / rng.choice(("train.py", "a.toml", "b.json", "stage9.py", ".env", "x y"))).touch()
    elif how == "inside":
        (folder / "programs/7").mkdir(parents=True)
        (folder / "programs/7/plan.toml").write_text("mine")
    elif how == "long":
        target = place / ("n" * 300)
    elif how == "below a file":
        target = folder / "plan.toml/build"
    elif how == "link":
        (folder / "data").symlink_to(built.folder)
    elif how == "read only":
        target = Path("/proc/build")
    elif how == "nul":
        target = f"{place}/a\0b"
    elif how == "manifest of another":
        (folder / "program.json").write_text(rng.choice(('{"files": {}}', "[]", "", "[" * 9999)))
    else:
        target = place.joinpath(*["d" * 200] * 30)

    def read() -> Verdict | None:
        partc.load(built.program(name)).save(target)
        return Verdict("lost", "the save went on")

    return Made(f"{how}: {str(target)[-60:]!r}", read)
