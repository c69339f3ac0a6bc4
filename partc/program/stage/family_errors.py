"""What a stage with several programs refuses, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from partc.errors import RunError
from partc.program import Program
from partc.program.choices import IGNORED, pad_of
from partc.program.wanted import WORDS, Wanted
from partc.trace.record import Kind
from partc.trace.trees import OF_ROWS, Tree, told

REFUSED = "refused"  # what a rank says that does not run
CALL = "call "  # what a rank says that is in a call of all ranks, before its name


def no_gradients(first: Program) -> RunError:
    return RunError(
        where="stage.step",
        what="the program computes no gradients",
        why=f"it was compiled as a forward of {first.model} alone",
        do="Compile the training step first; stage.eval() then gives forwards over its weights.",
    )


def step_in_eval() -> RunError:
    return RunError(
        where="stage.step",
        what="the stage is in eval mode",
        why="stage.eval() was called, and a step would train with dropout off and frozen "
        "statistics",
        do="Call stage.train() before, or stage.eval_step(...) for the loss alone. To train in "
        "eval mode compile the model in eval mode, and leave stage.eval() out.",
    )


def loss_is_scripts(call: str) -> RunError:
    return RunError(
        where=f"{call}(...)", what="it gives a loss, and the program has none",
        why="no loss= was given and the model returns none, so that the script computes it from "
        "what the model returns",
        do="Write loss = criterion(model(x), y) and loss.backward(); or give partc the loss, "
        "loss=loss_of, of def loss_of(model, x, y): return criterion(model(x), y).",
    )  # fmt: skip


def no_input_gradient(name: str) -> RunError:
    return RunError(
        where=f"the input {name}", what="it waits for a gradient (requires_grad)",
        why="the program was compiled without the gradient of this input",
        do=f"Compile with loss=partc.ScriptLoss(model, [{name!r}]), or take partc.parallelize, "
        "which does so by itself; or pass it detached, x.detach(), if nothing before the model "
        "trains.",
    )  # fmt: skip


def check_numbers(returned: Tree | None, kind: Kind) -> None:
    """RunError for results with a number of rows, where ranks have different numbers of these."""
    parts = [] if returned is None else [*returned.parts()]
    for each in (part for part in parts if part.of == OF_ROWS):
        raise RunError(
            where=WORDS[kind], what=f"ranks were given different numbers of rows, and with the "
            f"results comes {told(each.plain)}, which follows from these",
            why="it is part of the program, the same on every rank",
            do="Take it in the script, from the batch that this rank was given, len(x); or give "
            "all ranks as many rows.",
        )  # fmt: skip


def ranks_differ(each: Sequence[Wanted], what_helps: str) -> RunError:
    """The error of all ranks; ``each``: what a rank was given, by rank."""
    return RunError(
        where="the step of all ranks",
        what=f"ranks differ in what they run: {_by_rank(map(str, each))}",
        why="one program computes a step on all ranks together",
        do=f"Call the same on every rank. {what_helps}",
    )


def calls_differ(texts: Sequence[str]) -> RunError:
    """The error of all ranks where some are in a call of all ranks, and others are not; ``texts``:
    what each runs, by rank.
    """
    return RunError(
        where="a call of all ranks",
        what=f"ranks differ in what they run: {_by_rank(map(_shown, texts))}",
        why="each holds a part of what the others need there",
        do="Make the call on every rank, and not behind `if rank == 0`, nor by a number of this "
        "rank's own, such as a loss by which it leaves the loop or skips a batch (decide on one "
        "that all ranks have); only what is then written may be of one rank.",
    )


def _by_rank(texts: Iterable[str]) -> str:
    """What each rank runs, in rank order: ``ranks 0, 2: step ...; ranks 1: save_checkpoint``."""
    same: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        same.setdefault(text, []).append(rank)
    return "; ".join(f"ranks {_ranges(ranks)}: {text}" for text, ranks in same.items())


def _shown(text: str) -> str:
    if text.startswith(CALL):
        return text.removeprefix(CALL)
    return "a batch that it refuses" if text == REFUSED else str(Wanted.parse(text))


def _ranges(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return text + ", ..." * (len(ranks) > 8)


def not_ignored(wanted: Wanted, why: str, without: Mapping[str, tuple[Any, str]]) -> RunError:
    """The refusal of rows that fill up a batch; ``without``: the inputs, where pad lacks one."""
    do = f"Write {pad_of(without)}: {IGNORED}" if without else f"See that {IGNORED}"
    return RunError(
        where=str(wanted),
        what="the batch cannot be filled up with rows that the loss ignores",
        why=why,
        do=f'{do}; or take partial="replicate", which is right for every loss, or "drop".',
    )


def inside_autocast(autocast: str) -> RunError:
    device, dtype = autocast.split()
    return RunError(
        where="the call of a stage",
        what=f'it runs inside of torch.autocast("{device}", torch.{dtype})',
        why="the casts of a program stand in its text, and the stage has no other program",
        do="Enter autocast in the loss that is compiled and call the stage outside of it, compile "
        "ahead by program.for_shapes(...) inside of the same autocast, or give the loaded program "
        "its model: partc.with_model(program, model, loss).",
    )


def no_recipe(wanted: Wanted, programs: Mapping[Wanted, Program]) -> RunError:
    known = "; ".join(str(each) for each in list(programs)[:6]) + "; ..." * (len(programs) > 6)
    return RunError(
        where=str(wanted),
        what="the stage has no program for this",
        why=f"it has: {known}",
        do="Compile it ahead by program.for_shapes(...) before program.save, or give the loaded "
        "program its model, to compile when needed: partc.with_model(program, model, loss).",
    )


def too_many(wanted: Wanted, most: int) -> RunError:
    return RunError(
        where=str(wanted),
        what=f"the stage has {most} programs already",
        why="each shape, and each mode, has a program of its own, which takes seconds to compile",
        do=(_TOKENS if wanted.kind == "forward" and most > 1 else _LENGTHS)
        + f" Or allow more: program.module(most_programs={most + 1}).",
    )


_LENGTHS = "Let the data loader pad batches to few lengths (multiples of 64)."
_TOKENS = (
    "Pad what comes in many lengths to few: while generating token by token pad ids on the right "
    "to the length that is wanted in the end, and read the logits of the last token that is there, "
    "stage(padded)[:, n - 1], as docs/how-to/shapes-and-modes.md does."
)


@contextmanager
def alone_by_choice(most: int) -> Iterator[None]:
    """Say of another batch where a stage was allowed one program that this is why it is refused."""
    try:
        yield
    except RunError as error:
        if most > 1 or not error.what.startswith("expected ("):
            raise
        raise RunError(
            where=error.where, what=error.what,
            why=f"{error.why}; module(most_programs=1) allows this stage no other program",
            do=f"{error.do} Without most_programs=1 another shape is compiled when it comes.",
        ) from error  # fmt: skip


def late_gradients() -> RunError:
    """The refusal of a second loss over weights whose gradients are late."""
    return RunError(
        where="stage.share", what="the plan's [stale] gives gradients some steps late",
        why="a step of one loss would give the gradients of the other one",
        do="Compile both losses without [stale], or one loss that is their sum.",
    )  # fmt: skip


def untrained(name: str) -> RunError:
    """The refusal of another loss that trains what the stage keeps for checkpoints alone."""
    return RunError(
        where=name,
        what="this loss trains it, and the stage's first program does not read it",
        why="the first program decides which tensors are parameters, and how they are sharded",
        do="Compile first the loss that reads all of the model, or add 0 * of what is missing.",
    )
