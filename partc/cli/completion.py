"""``partc completion``: a script by which a shell completes commands, options and paths."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from partc.cli.terminal import tell
from partc.errors import UsageError

# arguments that name a folder
FOLDERS = ("folder", "folders", "old", "new", "what", "dump", "run", "program", "checkpoint")
FILES = ("trace", "svg", "mesh", "plan", "out")  # arguments that may name a file


def completion_command(args: argparse.Namespace) -> int:
    """Print a script that lets a shell complete partc's commands, options, folders and files."""
    try:
        import shtab
    except ImportError:
        raise UsageError(
            where="partc completion", what="needs the package shtab",
            why="it writes the script from partc's options", do="pip install shtab",
        ) from None  # fmt: skip
    from partc.cli.options import make_parser

    parser = make_parser()
    for each in _arguments(parser):
        if each.dest in FOLDERS:
            each.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif each.dest in FILES:
            each.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(parser, shell=args.shell)
    tell(args, script.rstrip(), {"shell": args.shell, "script": script})
    return 0


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options and arguments of a parser and of its commands."""
    for each in parser._actions:
        if isinstance(each, argparse._SubParsersAction):
            for command in each.choices.values():
                command.fill()
                yield from _arguments(command)
        else:
            yield each
