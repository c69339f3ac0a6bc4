"""What of a command can be checked before torch is imported, which takes seconds.

A plan, a mesh, a model's name and a folder are known to be wrong from texts and files alone. What
is checked here is checked again where it is used, so that nothing depends on this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from partc.atomic import check_output, refusal
from partc.cli.model_names import check_name
from partc.errors import LoadError
from partc.file_endings import check_endings
from partc.wrong_calls import did_you_mean, refuse_tilde

MANIFEST = "program.json"  # of a saved program
AUTO = "auto"


def check_compile(args: argparse.Namespace) -> None:
    """PlanError or UsageError for a model, mesh, plan or folder that ``partc compile`` refuses."""
    from partc.plan.mesh import Mesh

    check_name(args.model)
    Mesh.of(args.mesh)
    _check_plan(args.plan)
    check_output(args.out, _ours)


def _check_plan(plan: str) -> None:
    """PlanError for what is neither a plan's file or text, nor words of presets."""
    from partc.passes.shard.preset_words import preset_words
    from partc.plan import Plan

    if plan.endswith(".toml"):
        Plan.load(plan)
    elif "\n" in plan or "=" in plan:
        Plan.parse(plan)
    elif plan not in ("", AUTO):
        preset_words(plan)


def _ours(folder: Path) -> Collection[str]:
    """All files of a folder with a program, which is looked at closely later; else a refusal."""
    if not (folder / MANIFEST).is_file():
        raise refusal(folder, f"it has no {MANIFEST}, so partc did not write it")
    return [each.relative_to(folder).as_posix() for each in folder.rglob("*")]


def check_words(args: argparse.Namespace) -> None:
    """LoadError or UsageError for a folder, a file to write or a model's name that any command
    refuses.
    """
    for given in vars(args).values():
        if isinstance(given, str):
            refuse_tilde(given, given)
    check_endings(args, getattr(args, "written", {}))
    for name in ("folder", "old", "new"):  # of a command that reads saved programs
        check_saved(getattr(args, name, "") or "")
    if model := getattr(args, "model", None):
        check_name(model)


def check_saved(folder: str) -> None:
    """LoadError for a folder that is not there, with one beside it that may be meant.

    What is there is judged where it is read.
    """
    path = Path(folder)
    if path.exists() or not folder:
        return
    parent = path.parent
    there = [each.parent for each in parent.glob(f"*/{MANIFEST}")] if parent.is_dir() else []
    raise LoadError(
        where=folder, what="there is no such folder", why="a saved program is a folder",
        do=did_you_mean(str(path), map(str, there))
        or "Name the folder that program.save(), or `partc compile --out`, wrote.",
    )  # fmt: skip
