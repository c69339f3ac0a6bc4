"""Make edited files part of a saved program, if they pass: ``partc check --accept-edits``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from partc.audit.audit import Audit, audit
from partc.errors import CheckError
from partc.file_text import Unreadable
from partc.plan import Plan
from partc.program import PLAN, Program, edited_files, load, load_edited, write_digests
from partc.program.fixed_text import FixedText, digest_of_code, digest_of_plan


def accept_edits(path: str | Path) -> Program:
    """Make edited files part of a saved program, if ``audit_edits`` finds nothing; then load it.

    Raises:
        CheckError, RunError, LoadError: as ``audit_edits``; the folder stays as it is.
    """
    audit_edits(path, load_edited(path))
    write_digests(path)
    return load(path)


def audit_edits(path: str | Path, program: Program, *, verified: bool = False) -> Audit:
    """Check a saved program with edited files; ``verified``: it is compared with its model too.

    Rank programs must pass ``audit``, and the plan must have the entries it was saved with: both
    may have other comments. No other file may be edited.

    Raises:
        CheckError: a check failed, or a rank program was edited that no numbers can judge.
        RunError, LoadError: as ``audit``.
    """
    edited = edited_files(path)
    for name in edited:
        if name == PLAN:
            _check_plan(path, program)
        elif name not in program.sources:
            raise _not_editable(path, name)
    found = audit(program)
    sources = [*_changed_code(program)]
    if sources and program.expected.numbers is None and not verified:
        raise _unjudged(path, sources, program.expected.lacking)
    return found


def _changed_code(program: Program) -> Iterator[str]:
    """The rank programs of which more was changed than comments."""
    known = (program.fixed or FixedText()).found.files
    for name, text in sorted(program.sources.items()):
        if name not in known or digest_of_code(ast.parse(text)) != known[name].code:
            yield name


def _check_plan(path: str | Path, program: Program) -> None:
    """CheckError unless an edited plan says what it said; PlanError if it is no plan."""
    try:
        same = digest_of_plan(program.plan) == (program.fixed or FixedText()).found.plan
    except Unreadable as error:
        raise CheckError(
            where=f"{Path(path) / PLAN}",
            what="the edited plan is not TOML",
            why=str(error),
            do="Undo the edit.",
        ) from None
    Plan.parse(program.plan)
    if not same:
        raise CheckError(
            where=f"{Path(path) / PLAN}",
            what="the edited plan has other entries than the program was compiled with",
            why="a plan says what partc prints, so the rank programs are not of this plan",
            do=f"Undo the edit (comments are free), or compile again with --plan {PLAN}.",
        )


def _not_editable(path: str | Path, name: str) -> CheckError:
    return CheckError(
        where=f"{Path(path) / name}",
        what="this file was changed, and no check can judge it",
        why="edits are accepted of rank programs, and of comments in the plan",
        do="Undo the edit; to change it, copy it under another name, beside the program.",
    )


def _unjudged(path: str | Path, sources: Sequence[str], lacking: str) -> CheckError:
    return CheckError(
        where=f"{Path(path)}, {', '.join(sources)}",
        what="nothing can tell what the edited text computes",
        why=f"the program has no numbers of the step on one device: {lacking}",
        do="Give the model: partc check FOLDER --accept-edits --model MODULE:NAME.",
    )
