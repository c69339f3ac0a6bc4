"""``partc explain``: what a saved program is, why, and what errors and rules mean."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from partc.cli.early import check_saved
from partc.cli.said import check_explained
from partc.cli.targets import target_of
from partc.cli.terminal import columns, progress, shortened, tell
from partc.errors import UsageError, explain

if TYPE_CHECKING:
    from partc.cli.target import Target
    from partc.program import Program
    from partc.reports.cost import CostReport


def explain_command(args: argparse.Namespace) -> int:
    """Explain a saved program, an error code, the sharding rule of an op, or list the rules."""
    check_explained(args)
    if args.rules:
        _explain_rules(args)
    elif args.what is None:
        raise UsageError(
            where="partc explain",
            what="there is nothing to explain",
            why="it needs a folder, an error code or --rules",
            do="Try `partc explain build/`, `partc explain PTC030` or `partc explain --rules`.",
        )
    elif args.what.upper().startswith("PTC"):
        tell(args, explain(args.what), {"code": args.what.upper(), "text": explain(args.what)})
    else:
        _check_no_op(args.what)
        _explain_program(args)
    return 0


def _check_no_op(word: str) -> None:
    """UsageError for the name of an op in the place of a folder that is not there."""
    name = word.removeprefix("aten.")
    if not Path(word).exists() and name.partition(".")[0].isidentifier():
        import torch

        if hasattr(torch.ops.aten, name.partition(".")[0]):
            raise UsageError(
                where=f"partc explain {word}", what="it is the name of an op, and no folder",
                why="without --rules a saved program is explained",
                do=f"Write partc explain --rules aten.{name}.",
            )  # fmt: skip


def _explain_rules(args: argparse.Namespace) -> None:
    """The rule of the op that the command names, or a line for every op with a rule."""
    from partc.installed import RULES, load_installed
    from partc.rules.explain_rule import all_rules, explain_rule

    load_installed(RULES, "rule")
    if args.what:
        known = explain_rule(args.what)
        tell(args, "\n".join(map(str, known)), {"ops": [asdict(each) for each in known]})
        return
    rules = all_rules()
    width = max(map(len, rules), default=0)
    tell(args, "\n".join(f"{n:<{width}}  {text}" for n, text in rules.items()), rules)


def _explain_program(args: argparse.Namespace) -> None:
    """Explain a saved program, or print one rank's source."""
    check_saved(args.what)
    from partc.program import load
    from partc.program.saved_cost import saved_numbers

    program = load(args.what)
    if args.source:
        rank = args.rank or 0
        source = program.source(rank)
        tell(args, source, {"rank": rank, "file": program.role_of(rank), "source": source})
        return
    target = target_of(args, args.what, program) if args.model else None
    with saved_numbers(args.what):
        _tell_program(args, program, target)


def _tell_program(args: argparse.Namespace, program: Program, target: Target | None) -> None:
    """What a program is and why; in short, or with ``--all`` its plan and all costs too."""
    from partc.cli.tp_hint import as_json, hint_text, hints
    from partc.plan import Plan
    from partc.reports.explanation import explain_program
    from partc.reports.summary import Summary, short_explanation

    cost = _with_formulas(program, target) if target else program.cost
    plan = Plan.parse(program.plan)
    hint = hints(target.model, plan) if target else ()
    why, summed = explain_program(program), Summary.of(program)
    told = {
        "model": program.model, "mesh": dict(program.mesh.axes), "plan": program.plan,
        "cost": cost.as_json(), "explanation": why.as_json(),
        "roles": [list(run) for run in program.roles],
        "inputs": {name: [list(s), d] for name, (s, d) in program.inputs.items()},
        "batch": "local" if program.dealt else "global", "summary": summed.as_json(),
    }  # fmt: skip
    if hint:
        told["suggested"] = as_json(hint)
    inputs = [_input(program, name) for name in program.inputs]
    head = [
        f"{program.model} on {program.mesh}", str(summed), f"inputs {', '.join(inputs)}",
        *_roles(program), "",
    ]  # fmt: skip
    if args.all or args.model:
        rest = [program.plan, str(cost), str(why), *hint_text(hint, plan)]
        tell(args, "\n".join([*head, *rest]), told)
        return
    said, *rest = short_explanation(why).split("\n")
    short = [*wrap(said, columns()), *shortened(rest, columns())]
    more = f"partc explain {shlex.quote(args.what)} --all   plan, all costs, other machines"
    tell(args, "\n".join([*head, *short, "", more]), told)


def _roles(program: Program) -> Iterator[str]:
    """``ranks 0 to 3: stage0.py``, for each file that ranks run."""
    first = 0
    for num, name in program.roles:
        yield f"ranks {first} to {first + num - 1}: {name}"
        first += num


def _input(program: Program, name: str) -> str:
    """Dtype and shape of an input, and of a rank's piece; nothing of the program is run."""
    shape, dtype = program.inputs[name]
    if name not in program.dealt:
        return f"{name} {dtype}{list(shape)}"
    piece = [*shape]
    for axis, dim, _ in program.dealt[name]:
        piece[dim] //= program.mesh.size(axis)
    return f"{name} {dtype}{list(shape)} ({piece} on each rank)"


def _with_formulas(program: Program, target: Target) -> CostReport:
    """The cost of a saved program with formulas, for which its model is traced again."""
    from partc.cli.formulas import cost_with_formulas

    with progress("compiling at other sizes"):
        return cost_with_formulas(program, target.model, target.inputs, target.loss)
