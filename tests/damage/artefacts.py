"""Cases of one damaged file among those that partc wrote, or reads as a user gives it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tests.damage import readers
from tests.damage.built import LAYOUTS, MACHINE, SCHEDULE, Built
from tests.damage.spoil import spoil, spoil_entry
from tests.damage.verdicts import Verdict


class Made(NamedTuple):
    """A damaged thing, what was done to it, and its reader."""

    damage: str
    read: Callable[[], Verdict | None]
    writes: str = ""  # how the names of files begin that the reader is to change


Make = Callable[[random.Random, Built, Path], Made]
ARTEFACTS: dict[str, Make] = {}


def artefact(name: str) -> Callable[[Make], Make]:
    def added(make: Make) -> Make:
        ARTEFACTS[name] = make
        return make

    return added


# a saved program -----------------------------------------------------------------------------
def copied(rng: random.Random, built: Built, place: Path, *only: str) -> tuple[str, Path]:
    """A copy of one program, by name; of those of ``only`` if there are some."""
    name = rng.choice([each for each in built.names if not only or each in only])
    return name, Path(shutil.copytree(built.program(name), place / "build"))


def reader(
    built: Built, name: str, folder: Path, *, runs: bool = True, forged: bool = False
) -> Callable[[], Verdict]:
    losses = built.losses[name] if runs else None
    return lambda: readers.read_program(folder, built.program(name), losses, forged=forged)


def forge(folder: Path) -> None:
    """Make the digests of a program's files and of its manifest right again, if it is JSON."""
    path = folder / "program.json"
    try:
        fields = json.loads(path.read_bytes())
        for name in fields["files"]:
            fields["files"][name] = sha256((folder / name).read_bytes()).hexdigest()
        write_manifest(path, fields)
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return


def write_manifest(path: Path, fields: Any) -> None:
    """Write ``program.json`` or ``checkpoint.json`` with the digest of its entries."""
    rest = {name: entry for name, entry in fields.items() if name != "sha256"}
    digest = sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**rest, "sha256": digest}, indent=1) + "\n")


def _file(pattern: str, forged: bool, *only: str) -> Make:
    """Cases of a damaged file of a program, with its digests as they were, or right again."""

    def make(rng: random.Random, built: Built, place: Path) -> Made:
        name, folder = copied(rng, built, place, *only)
        file = rng.choice(sorted(f for f in folder.rglob(pattern) if f.name != "run.py") or
                          sorted(folder.rglob(pattern)))  # fmt: skip
        new, damage = spoil(rng, file.read_bytes())
        file.write_bytes(new)
        if forged:
            forge(file.parent)
        damage = f"{name}/{file.relative_to(folder)}: {damage}"
        return Made(damage, reader(built, name, folder, runs=file.name != "run.py", forged=forged))

    return make


for _name, _pattern, _only in (
    ("role .py", "*.py", ()), ("run.py", "run.py", ()), ("plan.toml", "plan.toml", ()),
    ("schedule.csv", "schedule.csv", ("pipeline",)), ("constants", "*.safetensors", ()),
):  # fmt: skip
    ARTEFACTS[_name] = _file(_pattern, False, *_only)
    ARTEFACTS[f"{_name}, forged"] = _file(_pattern, True, *_only)
ARTEFACTS["program.json"] = _file("program.json", False)


@artefact("program.json, forged")
def manifest_entry(rng: random.Random, built: Built, place: Path) -> Made:
    return _entry(rng, built, place, None)


@artefact("cost and basis, forged")
def cost_entry(rng: random.Random, built: Built, place: Path) -> Made:
    return _entry(rng, built, place, rng.choice(("cost", "basis")))


def _entry(rng: random.Random, built: Built, place: Path, within: str | None) -> Made:
    name, folder = copied(rng, built, place)
    path = folder / "program.json"
    fields = json.loads(path.read_text())
    kept = {k: fields.pop(k) for k in ("sha256", "cost", "basis") if within is None}
    damage = spoil_entry(rng, fields[within] if within else fields)
    write_manifest(path, {**fields, **kept})
    return Made(f"{name}: {within or ''} {damage}", reader(built, name, folder, forged=True))


@artefact("a file of another build")
def other_build(rng: random.Random, built: Built, place: Path) -> Made:
    name, folder = copied(rng, built, place, *LAYOUTS)
    where = rng.choice(("other", "programs"))
    of = name if where == "other" else rng.choice(sorted({*built.names} - {name, "modes"}))
    source = built.folder / where / of
    both = sorted({f.name for f in source.iterdir()} & {f.name for f in folder.iterdir()})
    file = rng.choice(both)
    shutil.copy(source / file, folder / file)
    forged = rng.random() < 0.5
    if forged:
        forge(folder)
    damage = f"{name}/{file} is that of {where}/{of}{', forged' if forged else ''}"
    runs = file != "run.py"
    return Made(damage, reader(built, name, folder, runs=runs, forged=forged))


@artefact("missing and added files")
def missing(rng: random.Random, built: Built, place: Path) -> Made:
    name, folder = copied(rng, built, place)
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.name != "run.py")
    file = rng.choice(files)
    how = rng.choice(("gone", "moved", "added"))
    if how == "gone":
        file.unlink()
    elif how == "moved":
        file.rename(file.with_name(f"x{file.name}"))
    else:
        word = rng.choice(("json.py", "torch.pyc", "random/__init__.py", "socket.so", "torch.py"))
        (folder / word).parent.mkdir(exist_ok=True)
        (folder / word).write_text(f"open({str(place / 'ran')!r}, 'w')")
        file = folder / word
    return Made(f"{name}/{file.relative_to(folder)} {how}", reader(built, name, folder))


@artefact("role .py, edits accepted")
def accepted(rng: random.Random, built: Built, place: Path) -> Made:
    name, folder = copied(rng, built, place, *LAYOUTS)
    file = rng.choice(sorted(f for f in folder.glob("*.py") if f.name != "run.py"))
    new, damage = spoil(rng, file.read_bytes())
    file.write_bytes(new)
    model = ["--model", readers.MODEL] if rng.random() < 0.5 else []

    def read() -> Verdict | None:
        said = readers.command(["check", str(folder), "--accept-edits", *model])
        return said or readers.read_program(folder, built.program(name), built.losses[name])

    how = "with the model" if model else "by its own numbers"
    return Made(f"{name}/{file.name}, accepted {how}: {damage}", read, "build/program.json")


# what a user gives to compile ----------------------------------------------------------------
@artefact("plan.toml given to compile")
def given_plan(rng: random.Random, built: Built, place: Path) -> Made:
    name = rng.choice(sorted({*built.names} - {"modes"}))
    path, damage = _spoiled(rng, built.program(name) / "plan.toml", place)
    mesh = LAYOUTS[name][0]
    return Made(f"{name}: {damage}", lambda: readers.read_for_compile(mesh, plan=path))


@artefact("mesh.toml given to compile")
def given_mesh(rng: random.Random, built: Built, place: Path) -> Made:
    path, damage = _spoiled(rng, built.folder / MACHINE, place)
    plan = rng.choice(("ddp", "fsdp", "auto"))
    return Made(f"{plan}: {damage}", lambda: readers.read_for_compile(path, plan=plan))


@artefact("schedule.csv given to compile")
def given_schedule(rng: random.Random, built: Built, place: Path) -> Made:
    path, damage = _spoiled(rng, built.folder / SCHEDULE, place)
    given = {"plan": "ddp", "microbatches": 2, "schedule": str(path)}
    return Made(damage, lambda: readers.read_for_compile("pp=2", **given))


def _spoiled(rng: random.Random, source: Path, place: Path) -> tuple[Path, str]:
    """A damaged copy of a file, and the damage."""
    new, damage = spoil(rng, source.read_bytes())
    place.mkdir(exist_ok=True)
    (place / source.name).write_bytes(new)
    return place / source.name, damage


LOADERS = ((1, "one"), (2, "zero1"), (2, "ddp"))  # how many ranks of which program


# checkpoints and weights ---------------------------------------------------------------------
def checkpoint_read(
    rng: random.Random, built: Built, place: Path, forged: bool
) -> tuple[Path, Callable[[], Verdict]]:
    """A copy of the step's folder, and its reader, on the mesh that saved it or on another."""
    whole = built.folder / "checkpoint"
    folder = Path(shutil.copytree(whole, place / "checkpoint"))
    num, name = rng.choice([each for each in LOADERS if each[1] in built.names])
    program = built.program(name)
    return next(folder.iterdir()), lambda: readers.read_checkpoint(
        folder, whole, program, num, forged
    )


@artefact("checkpoint: rank files")
def rank_file(rng: random.Random, built: Built, place: Path) -> Made:
    step, read = checkpoint_read(rng, built, place, False)
    file = rng.choice(sorted(step.glob("*.safetensors")))
    if rng.random() < 0.1:
        other = next(each for each in step.glob("*.safetensors") if each != file)
        new, damage = other.read_bytes(), f"is {other.name}"
    else:
        new, damage = spoil(rng, file.read_bytes())
    file.write_bytes(new)
    return Made(f"{file.name} {damage}", read)


@artefact("checkpoint.json")
def checkpoint_list(rng: random.Random, built: Built, place: Path) -> Made:
    step, read = checkpoint_read(rng, built, place, False)
    file = step / "checkpoint.json"
    new, damage = spoil(rng, file.read_bytes())
    file.write_bytes(new)
    return Made(damage, read)


@artefact("checkpoint.json, forged")
def forged_list(rng: random.Random, built: Built, place: Path) -> Made:
    step, read = checkpoint_read(rng, built, place, True)
    file = step / "checkpoint.json"
    fields = json.loads(file.read_text())
    del fields["sha256"]
    damage = spoil_entry(rng, fields)
    write_manifest(file, fields)
    return Made(damage, read)


@artefact("weights.safetensors")
def weights(rng: random.Random, built: Built, place: Path) -> Made:
    path, damage = _spoiled(rng, built.folder / "weights.safetensors", place)
    return Made(damage, lambda: readers.read_weights(path, [path], built.program("one")))


@artefact("index of weights")
def index(rng: random.Random, built: Built, place: Path) -> Made:
    folder = Path(shutil.copytree(built.folder / "shards", place / "shards"))
    file = rng.choice(sorted(folder.iterdir()))
    new, damage = spoil(rng, file.read_bytes())
    file.write_bytes(new)
    files = sorted(folder.glob("*.safetensors"))
    path = rng.choice((folder, folder / "model.safetensors.index.json"))
    return Made(
        f"{file.name} {damage}", lambda: readers.read_weights(path, files, built.program("one"))
    )
