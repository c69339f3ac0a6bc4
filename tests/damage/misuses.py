"""Cases of calls with one mistake: what a user gets wrong in Python and on the command line.

A case is good if the call is refused in words, or if what it gives is right for what was given:
a program that ``verify`` finds equal to the model, a step with the loss of the model, a loader that
gives each row once. An error that Python raises at the call itself, without a line of partc, is
Python's own sentence on a missing or unknown argument.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import partc
from partc.program import Program
from tests.damage import readers
from tests.damage.artefacts import Made, Make
from tests.damage.built import LAYOUTS, Built, batch_of, content, loss_of, model_of, trained
from tests.damage.mistaken import MISTAKES, NOTHING, Given, letters
from tests.damage.verdicts import Verdict, told
from tests.mistakes.things import one_rank
from tests.patience import patience

MISUSES: dict[str, Make] = {}
Call = Callable[..., Any]
Judge = Callable[[Any, Given], Verdict | None]
ROWS = 24


def misuse(name: str) -> Callable[[Make], Make]:
    def added(make: Make) -> Make:
        def with_control(rng: random.Random, built: Built, place: Path) -> Made:
            made = make(rng, built, place)
            return made._replace(read=accepted(made.read)) if NOTHING in made.damage else made

        MISUSES[name] = with_control
        return make

    return added


def accepted(read: Callable[[], Verdict | None]) -> Callable[[], Verdict]:
    """What is right and is refused is bad as well: else a case could be good for a wrong reason."""

    def judged() -> Verdict:
        found = told(read)
        return Verdict("wrong", f"right, but {found.why}") if found.word == "refused" else found

    return judged


def mistaken(
    rng: random.Random, call: Call, right: Given, judge: Judge
) -> tuple[str, Callable[[], Verdict | None]]:
    """One mistake in the arguments of a call: what it is, and what comes of it."""
    given = dict(right)
    what = rng.choice(MISTAKES)(rng, given)
    return what, lambda: called(call, given, judge)


def called(call: Call, given: Given, judge: Judge) -> Verdict | None:
    try:
        result = call(**given)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            return Verdict("refused", f"by Python: {error}")
        raise
    return judge(result, given)


def wrong_unless(right: bool, why: str) -> Verdict | None:
    return None if right else Verdict("wrong", why)


# programs ------------------------------------------------------------------------------------
@misuse("compile")
def compile_(rng: random.Random, built: Built, place: Path) -> Made:
    mesh, plan = LAYOUTS[rng.choice(sorted(LAYOUTS))]
    right = {"model": model_of(), "inputs": batch_of(), "mesh": mesh, "loss": loss_of, **plan}
    more = {"microbatches": 2, "memory_bytes": 10**9, "recompute": "block", "objective": "time",
            "random": "pieces", "batch": "global", "strict": False, "schedule": "1f1b",
            "backend": "gloo",
            "dump": str(place / "dump"), "cache": str(place / "cache")}  # fmt: skip
    right |= {name: more[name] for name in rng.sample(sorted(more), rng.choice((0, 1, 3)))}
    what, read = mistaken(rng, partc.compile, right, is_right)
    return Made(f"{mesh}: {what}", lambda: readers.apart(read))


def is_right(program: Program, given: Given) -> Verdict | None:
    """Whether a program equals the model that was given, with the batch that was given."""
    model, loss = given.get("model"), given.get("loss")
    if model is None:
        return Verdict("wrong", "there was no model")
    report = partc.verify(program, model, given.get("inputs"), loss=loss, timeout=patience(40.0))
    return wrong_unless(report.ok(), str(report))


@misuse("verify")
def verify(rng: random.Random, built: Built, place: Path) -> Made:
    right = {"program": partc.load(built.program("zero1")), "model": model_of(),
             "inputs": batch_of(), "loss": loss_of, "lr": 1e-3, "dtype": torch.float64,
             "timeout": patience(40.0)}  # fmt: skip
    what, read = mistaken(rng, partc.verify, right, _holds)
    return Made(what, lambda: readers.apart(read))


def _holds(report: Any, given: Given) -> None:
    report.check()


@misuse("load")
def load(rng: random.Random, built: Built, place: Path) -> Made:
    right = {"path": built.program(rng.choice(built.names)), "model": model_of()}

    def judge(program: Program, given: Given) -> Verdict | None:
        model = (given.get("model") or model_of()).train()  # another mode was warned of
        if isinstance(model, torch.jit.ScriptModule):  # which stays in the mode of its trace
            model = model_of()
        model.requires_grad_(True)  # a stage freezes what it finds frozen, and tells it
        return is_right(program, {"inputs": batch_of(), "loss": loss_of, "model": model})

    what, read = mistaken(rng, partc.load, right, judge)
    return Made(what, lambda: readers.apart(read))


@misuse("save")
def save(rng: random.Random, built: Built, place: Path) -> Made:
    right = {"path": place / "build"}

    def judge(result: None, given: Given) -> Verdict | None:
        program = partc.load(given["path"])
        return is_right(program, {"inputs": batch_of(), "loss": loss_of, "model": model_of()})

    what, read = mistaken(rng, partc.load(built.program("zero1")).save, right, judge)
    return Made(what, lambda: readers.apart(read), "build")


# stages --------------------------------------------------------------------------------------
def on_one_rank(work: Callable[[], Verdict | None]) -> Callable[[], Verdict | None]:
    def alone() -> Verdict | None:
        with one_rank():
            return work()

    return lambda: readers.apart(alone)


@misuse("module")
def module(rng: random.Random, built: Built, place: Path) -> Made:
    program = partc.load(built.program("one"), model_of())
    right = {"device": "cpu", "mesh": None, "partial": None, "pad": None, "most_programs": 4}

    def judge(stage: Any, given: Given) -> Verdict | None:
        wanted = without_dropout(model_of(), loss_of, *batch_of())
        return near_to(stage.step(*batch_of()), wanted)

    what, read = mistaken(rng, program.module, right, judge)
    return Made(what, on_one_rank(read))


def without_dropout(model: nn.Module, loss: Call, *batch: Any) -> Any:
    return loss(deepcopy(model).eval(), *batch)


def near_to(found: Any, wanted: Any) -> Verdict | None:
    """A tenth of the values are dropped, and which follows from the seed of the process."""
    near = torch.isclose(found.double(), wanted.double(), rtol=0.3)
    return wrong_unless(bool(near), f"{found}, not {wanted}")


@misuse("step")
def step(rng: random.Random, built: Built, place: Path) -> Made:
    x, y = batch_of()
    program = partc.compile(model_of().eval(), "dp=1", (x, y), loss=loss_of, plan="ddp")
    given = {"x": x, "y": y}
    what = rng.choice(MISTAKES)(rng, given)
    named = rng.random() < 0.5

    def read() -> Verdict | None:
        stage: Any = program.module()
        found = stage.step(**given) if named else stage.step(*given.values())
        wanted = loss_of(model_of().eval(), *given.values())
        return wrong_unless(torch.allclose(found, wanted, equal_nan=True), f"{found}, not {wanted}")

    return Made(f"{what}, {'by name' if named else 'in order'}", on_one_rank(read))


@misuse("clip_grad_norm_")
def clip(rng: random.Random, built: Built, place: Path) -> Made:
    def call(stage: Any, **given: Any) -> Any:
        stage.step(*batch_of())
        grads = [each.grad.clone() for each in stage.parameters()]
        return grads, stage.clip_grad_norm_(**given)

    def judge(result: Any, given: Given) -> Verdict | None:
        grads, norm = result
        wanted = nn.utils.get_total_norm(grads, given.get("norm_type", 2.0))
        return wrong_unless(torch.allclose(norm, wanted), f"{norm}, not {wanted}")

    given: Given = {"max_norm": 0.1, "norm_type": 2.0, "error_if_nonfinite": False}
    what = rng.choice(MISTAKES)(rng, given)

    def read() -> Verdict | None:
        return called(
            call, {"stage": partc.load(built.program("one"), model_of()).module(), **given}, judge
        )

    return Made(what, on_one_rank(read))


@misuse("parallelize")
def parallelize(rng: random.Random, built: Built, place: Path) -> Made:
    right = {"model": model_of(), "mesh": "dp=1", "loss": loss_of, "plan": "ddp",
             "batch": "local", "device": "cpu", "pad": None, "outputs": ()}  # fmt: skip

    def judge(wrapped: Any, given: Given) -> Verdict | None:
        loss = given.get("loss") or loss_of
        model = deepcopy(given["model"])  # which the first step empties
        found = wrapped.step(*batch_of())
        return near_to(found, without_dropout(model, loss, *batch_of()))

    what, read = mistaken(rng, partc.parallelize, right, judge)
    return Made(what, on_one_rank(read))


# data and checkpoints ------------------------------------------------------------------------
def rows_of() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS)[:, None] * torch.ones(8), torch.ones(ROWS, 8))


@misuse("loader")
def loader(rng: random.Random, built: Built, place: Path) -> Made:
    given: Given = {"dataset": rows_of(), "seed": 1, "shuffle": True, "last": "drop",
                    "rows_per_step": 8, "collate_fn": None, "num_workers": 0}  # fmt: skip
    what = rng.choice(MISTAKES)(rng, given)

    def read() -> Verdict | None:
        stage = partc.load(built.program("one")).module()
        return called(stage.loader, given, _gives_each_row_once)

    return Made(what, on_one_rank(read))


def _gives_each_row_once(loader: Any, given: Given) -> Verdict | None:
    found = []
    for batch in loader:
        found += [float(row[0]) for row in batch[0]]
        if len(found) > 10 * ROWS:
            return Verdict("wrong", "an epoch without end")
    if not isinstance(given.get("dataset"), TensorDataset):
        return None
    return wrong_unless(len({*found}) == len(found) > 0, f"the rows {found}")


@misuse("sampler")
def sampler(rng: random.Random, built: Built, place: Path) -> Made:
    right = {"dataset": rows_of(), "rank": 1, "seed": 1, "shuffle": True, "last": "drop",
             "rows_per_step": 8}  # fmt: skip

    def judge(sampler: Any, given: Given) -> Verdict | None:
        steps = [each for each, _ in zip(sampler, range(10 * ROWS), strict=False)]
        rows = [row for each in steps for row in each]
        asked = given["dataset"]  # also the number of its rows, of which any is right
        there = range(asked if isinstance(asked, int) else ROWS)
        once = 0 < len(rows) == len({*rows})
        return wrong_unless(once and all(row in there for row in rows), f"the rows {rows}")

    return Made(*mistaken(rng, partc.load(built.program("zero1")).sampler, right, judge))


@misuse("save_checkpoint")
def save_checkpoint(rng: random.Random, built: Built, place: Path) -> Made:
    given: Given = {"folder": place / "steps", "stage": None, "optimizer": None, "step": 3}
    what = rng.choice(MISTAKES)(rng, given)

    def read() -> Verdict | None:
        stage, optimizer = trained(built.program("one"), 1)
        own = {"stage": stage, "optimizer": optimizer}
        for name, value in own.items():
            if name in given and given[name] is None:
                given[name] = value
        return called(partc.save_checkpoint, given, partial_judge(built, own))

    return Made(what, on_one_rank(read), "steps")


def partial_judge(built: Built, own: Given) -> Judge:
    def judge(path: Path, given: Given) -> Verdict | None:
        again, optimizer = trained(built.program("one"), 1)
        kept = "optimizer" in given and given["optimizer"] is not None
        step = partc.load_checkpoint(path.parent, again, optimizer if kept else None)
        same = content(again) == content(own["stage"])
        return wrong_unless(same and step == given.get("step", 0), f"step {step}, same: {same}")

    return judge


@misuse("load_checkpoint")
def load_checkpoint(rng: random.Random, built: Built, place: Path) -> Made:
    given: Given = {"folder": place / "steps", "stage": None, "optimizer": None}
    what = rng.choice(MISTAKES)(rng, given)

    def read() -> Verdict | None:
        stage, optimizer = trained(built.program("one"), 2)
        partc.save_checkpoint(place / "steps", stage, optimizer, step=3)
        again, other = trained(built.program("one"), 1)
        for name, value in (("stage", again), ("optimizer", other)):
            if name in given and given[name] is None:
                given[name] = value
        return called(partc.load_checkpoint, given, lambda step, given: wrong_unless(
            step == 3 and content(again) == content(stage), f"step {step}"))  # fmt: skip

    return Made(what, on_one_rank(read), "steps")


# commands ------------------------------------------------------------------------------------
@misuse("commands")
def commands(rng: random.Random, built: Built, place: Path) -> Made:
    build, model = str(built.program("zero1")), readers.MODEL
    lines = (
        ["compile", model, "--mesh", "dp=2", "--plan", "ddp", "--out", str(place / "build")],
        ["compile", model, "--mesh", "dp=2", "--microbatches", "2", "--memory-bytes", "10000000",
         "--out", str(place / "build")],
        ["explain", build], ["simulate", build, "--peak", "2"], ["check", build],
        ["diff", build, str(built.program("one"))], ["verify", build, "--model", model],
        ["passes"],
    )  # fmt: skip
    line = list(rng.choice(lines))
    at = rng.randrange(len(line))
    how = rng.choice(("letters", "letters", "gone", "twice", "other", "moved", NOTHING))
    if how == "letters":
        line[at] = letters(rng, line[at])
    elif how == "other":
        line[at] = rng.choice(("", "-1", "nowhere", "--", "-x", "é", "1e9", "dp=0", "--help=x"))
    elif how != NOTHING:
        word = line.pop(at)
        again = {"gone": [], "twice": [word, word], "moved": []}[how]
        line[at:at] = again
        line += [word] if how == "moved" else []

    def read() -> Verdict | None:
        return readers.command(line)

    return Made(f"{how}: {' '.join(line)}", lambda: readers.apart(read), "build")
