"""Mistakes in the text of rank programs: one line deleted, doubled or changed.

The lines are those that wait, start a collective, send, receive or add to a gradient, those that
read the mask of a dropout, and those with a bound, a number that is no whole one.
``python -m tests.audit.mutants 200`` makes so many over eleven plans, and prints what finds each.
"""

from __future__ import annotations

import ast
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from partc.audit.audit import audit
from partc.errors import PartcError
from partc.plan import Plan
from partc.program import Program
from partc.verification.verification import verify
from tests.audit.bounded import case_and_program
from tests.pipelines import compiled, stages_of_toy, toy
from tests.zoo import MODELS, Case

STARTS = {
    "all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast",
    "isend", "irecv",
}  # fmt: skip
ADDS = {
    "add_", "addmm_", "add_grad", "add_weight_grad", "add", "add_product", "sum_tied", "sum_grads",
}  # fmt: skip
MASK = re.compile(r"\bdropout_mask_\d+\b")
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)


@dataclass(frozen=True)
class Mutant:
    """One spoiled line of one file."""

    file: str
    line: int
    how: str
    before: str
    after: str
    text: str  # of the whole file

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.how}: {self.before} -> {self.after}"

    def of(self, program: Program) -> Program:
        return replace(program, sources={**program.sources, self.file: self.text})


def mutants(program: Program) -> Iterator[Mutant]:
    """Every mistake that can be made in a program's lines."""
    for file, text in sorted(program.sources.items()):
        groups, masks = sorted(set(_groups(text))), sorted(set(MASK.findall(text)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, SIMPLE):
                ways = _changed(node, OF_NUMBERS | dict(_other_masks(masks)))
                for how, statement in (*ways, *(_spoiled(node, groups) if _matters(node) else ())):
                    yield _mutant(file, text, node, how, statement)


def _matters(node: ast.stmt) -> bool:
    """Whether a statement waits, starts a transfer or adds to a gradient."""
    if isinstance(node, ast.AugAssign) and "grad" in ast.unparse(node.target):
        return True
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    names = {each.attr for each in calls if isinstance(each, ast.Attribute)}
    names |= {each.id for each in calls if isinstance(each, ast.Name)}
    return bool(names & {"wait", *STARTS, *ADDS})


def _groups(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg == "group":
            yield ast.unparse(node.value)


def _spoiled(node: ast.stmt, groups: list[str]) -> Iterator[tuple[str, str]]:
    """The ways to spoil a statement, each with the text that takes its place."""
    text = ast.unparse(node)
    yield "deleted", "return None" if isinstance(node, ast.Return) else "pass"
    if not isinstance(node, ast.Return):
        yield "doubled", f"{text}\n{text}"
    yield from _changed(node, CHANGES | dict(_other_groups(groups)))


def _changed(node: ast.stmt, changes: Mapping[str, Change]) -> Iterator[tuple[str, str]]:
    text = ast.unparse(node)
    for how, change in changes.items():
        fresh = ast.parse(text).body[0] if not isinstance(node, ast.Return) else _returned(text)
        if change(fresh):
            yield how, ast.unparse(fresh)


def _returned(text: str) -> ast.stmt:
    function = ast.parse(f"def f():\n    {text}").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.body[0]


Change = Callable[[ast.AST], bool]


def _renamed(old: str, new: str, tree: ast.AST) -> bool:
    """Rename the first attribute ``old``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == old:
            node.attr = new
            return True
    return False


def _another_number(tree: ast.AST) -> bool:
    """Make the first number one larger."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
            return True
    return False


def _another_bound(tree: ast.AST) -> bool:
    """Double the first number that is no whole one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is float:
            node.value = 2 * node.value or 1.0
            return True
    return False


def _synchronous(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "async_op":
            node.value = ast.Constant(False)
            return True
    return False


def _swapped(tree: ast.AST) -> bool:
    """Swap the first two operands of a transfer or an addition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            node.args[0], node.args[1] = node.args[1], node.args[0]
            return True
    return False


def _not_added(tree: ast.AST) -> bool:
    """Replace what a gradient was by what should be added."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            node.orelse = node.body
            return True
    return False


def _subtracted(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            node.op = ast.Sub()
            return True
    return False


def _grouped(group: str, tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "group":
            if ast.unparse(node.value) == group:
                return False
            node.value = ast.parse(group, mode="eval").body
            return True
    return False


def _other_groups(groups: list[str]) -> Iterator[tuple[str, Change]]:
    for group in groups:
        if group.startswith("self."):
            yield f"over {group}", partial(_grouped, group)


def _masked(mask: str, tree: ast.AST) -> bool:
    """Read another mask, where one is read and none drawn."""
    if "dropout_mask(" in ast.unparse(tree):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and MASK.fullmatch(node.id) and node.id != mask:
            node.id = mask
            return True
    return False


def _other_masks(masks: list[str]) -> Iterator[tuple[str, Change]]:
    for mask in masks:
        yield f"times {mask}", partial(_masked, mask)


OF_NUMBERS: dict[str, Change] = {"bound": _another_bound}
CHANGES: dict[str, Change] = {
    "sent, not received": partial(_renamed, "irecv", "isend"),
    "received, not sent": partial(_renamed, "isend", "irecv"),
    "subtracted": _subtracted,
    "sub_": partial(_renamed, "add_", "sub_"),
    "copied": partial(_renamed, "add_", "copy_"),
    "not added": _not_added,
    "number": _another_number,
    "synchronous": _synchronous,
    "swapped": _swapped,
    "the largest": partial(_renamed, "SUM", "MAX"),
    "a sum": partial(_renamed, "MAX", "SUM"),
}


def _mutant(file: str, text: str, node: ast.stmt, how: str, statement: str) -> Mutant:
    lines = text.splitlines()
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    before = ast.unparse(node)
    put = [
        (head if i == 0 and head.strip() else " " * node.col_offset) + line
        for i, line in enumerate(statement.splitlines())
    ]
    put[-1] += tail
    spoiled = "\n".join([*lines[:first], *put, *lines[last + 1 :]]) + "\n"
    return Mutant(file, node.lineno, how, before, " ; ".join(statement.splitlines()), spoiled)


# plans --------------------------------------------------------------------------------------------
def _of_toy(
    mesh: str, preset: str, schedule: str, num: int, tied: bool = False
) -> tuple[Case, Program]:
    case = toy(4 if "v" in schedule or "inter" in schedule else 2, tied)
    layers = len(case.model.blocks)  # type: ignore[arg-type]
    stages = layers if "pp=2" in mesh else 1
    plan = Plan(preset=preset, stages=stages_of_toy(stages, layers))
    return case, compiled(case, mesh, plan, schedule, num)


def _of_zoo(name: str, mesh: str, preset: str) -> tuple[Case, Program]:
    import partc

    case = MODELS[name]()
    return case, partc.compile(case.step, mesh, plan=preset)


PLANS: dict[str, Callable[[], tuple[Case, Program]]] = {
    "ddp": partial(_of_zoo, "gpt2", "dp=2", "ddp"),
    "fsdp": partial(_of_zoo, "llama", "dp=2", "fsdp"),
    "zero1": partial(_of_zoo, "bert", "dp=2", "zero1"),
    "megatron": partial(_of_zoo, "gpt2", "tp=2", "megatron"),
    "megatron-sp": partial(_of_zoo, "llama", "tp=2", "megatron-sp"),
    "ddp+megatron": partial(_of_zoo, "llama", "dp=2,tp=2", "ddp+megatron"),
    "1f1b": partial(_of_toy, "pp=2", "ddp", "1f1b", 8),
    "1f1b tied": partial(_of_toy, "pp=2", "ddp", "1f1b", 4, True),
    "pp x dp": partial(_of_toy, "pp=2,dp=2", "fsdp", "1f1b", 4),
    "masks and bounds": case_and_program,
    "zb-v": partial(_of_toy, "pp=2", "ddp", "zb-v", 4),
}


def found_by(case: Case, program: Program, verified: bool = True) -> str:
    """What finds a mistake: the error of ``audit``, ``verify``, or nothing."""
    try:
        audit(program)
    except PartcError as error:
        return f"check: {error}"
    if not verified:
        return ""
    try:
        verify(program, case.model, case.inputs, case.loss).check()
    except Exception as error:
        return f"verify: {error}"
    return ""


def main(total: int) -> None:
    """Print each mistake and what finds it, and how many ``check`` finds."""
    torch.set_num_threads(1)
    found = missed = 0
    for name, make in PLANS.items():
        case, program = make()
        start = time.monotonic()
        audit(program)
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        all_of_them = [*mutants(program)]
        picked = random.Random(name).sample(all_of_them, min(total // len(PLANS), len(all_of_them)))
        for mutant in picked:
            by = found_by(case, mutant.of(program))
            found, missed = found + by.startswith("check"), missed + (not by.startswith("check"))
            print(f"  {mutant}\n      {by[:160] or 'SURVIVED'}", flush=True)
    print(f"check refuses {found} of {found + missed}: {found / (found + missed):.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
