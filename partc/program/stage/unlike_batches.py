"""What to do where ranks are given batches that one step cannot have, by how these differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from partc.program.choices import IGNORED, pad_of
from partc.program.wanted import Wanted

OF_OWN_ROWS = (
    "Where numbers of rows differ, as in a last batch, give every rank as many "
    "(DataLoader(..., drop_last=True), stage.loader(dataset)), or say "
    'program.module(partial="replicate"): all ranks then compute all rows.'
)
OF_ONE_BATCH = (
    'The program takes the whole batch on every rank (batch="global"): pass all of its rows, alike '
    'on all ranks, as stage.loader(dataset) reads them; or compile with batch="local", so that '
    "each rank passes rows of its own."
)
OF_ISLANDS = (
    "Islands compute as many rows in a step: give each as many, as stage.loader(dataset) does, and "
    "leave a smaller last batch out (DataLoader(..., drop_last=True))."
)


def of_microbatches(each: Sequence[int]) -> str:
    """The same of a plan whose islands compute so many microbatches each."""
    numbers = ", ".join(map(str, each))
    return (
        f"By the plan's [uneven] islands compute {numbers} microbatches of a step, all of as many "
        "rows: pass on each island the rows of all of its own, as stage.loader(dataset) reads "
        "them; or leave [uneven] out."
    )


def of_other_calls(each: Sequence[Wanted]) -> str:
    """The same where ranks make other calls, or call in another setting; "" where they do not."""
    first = each[0]

    def differ(of: Callable[[Wanted], object]) -> bool:
        return any(of(one) != of(first) for one in each)

    if differ(lambda one: (one.kind, one.mode)):
        return (
            "Take the call, and eval() or train() before it, out of `if rank == 0`; only what is "
            "then printed or written may be of one rank."
        )
    if differ(lambda one: one.autocast):
        return "Enter torch.autocast on all ranks, or on none, and not behind `if rank == 0`."
    if differ(lambda one: one.is_without_grad):
        return "Enter torch.no_grad() on all ranks, or on none."
    if differ(lambda one: one.variant):
        return (
            "Make the same call on all ranks: which loss it is, and which arguments are given, "
            "None or left out, decides what is computed."
        )
    if differ(lambda one: [dtype for _, dtype in one.inputs]):
        return "Give the inputs the same dtypes on all ranks."
    if differ(lambda one: (one.form, [len(shape) for shape, _ in one.inputs])):
        return "Pass the same arguments on all ranks, with as many dims."
    return ""


def of_lengths(each: Sequence[Wanted], inputs: Mapping[str, tuple[Any, str]]) -> str:
    """The same of batches with as many rows, of other lengths."""
    if any(one.kind == "forward" for one in each):
        return (
            "A forward is not filled up, as its results would be longer: let the collator pad to "
            "one length on all ranks, or return the results as extras of the loss, eval_step."
        )
    return (
        "Where only lengths differ, pad= with a number for each input that is filled up fills all "
        f"up to the longest, program.module({pad_of(inputs)}): {IGNORED}; the Accelerator and the "
        "Trainer of partc take pad= too."
    )
