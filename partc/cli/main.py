"""The command `partc`: what it prints, its exit codes, and what becomes of an error.

Results go to stdout (``--json``: as one JSON object), progress and errors to stderr. Exit codes:
0 done, 1 a verification failed, a diff is not empty, no plan fits or the doctor found something
wrong, 2 an error, 130 interrupted, 141 nobody reads the output any more (``| head``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from partc.cli.options import make_parser
from partc.errors import PartcError, RunError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    args = make_parser().parse_args(arguments)
    from partc.cli.early import check_words

    try:
        check_words(args)
        command: Callable[[argparse.Namespace], int] = args.command
        code = command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes
        return 141  # 128 + SIGPIPE, as of any command
    except PartcError as error:
        return _refuse(args, error)
    except OSError as error:
        return _refuse(args, _of_system(error))
    except (MemoryError, RecursionError) as error:
        return _refuse(args, _too_much(error))
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


def _refuse(args: argparse.Namespace, error: PartcError) -> int:
    if args.json:
        print(json.dumps({"error": error.as_dict()}))
    from partc.cli.terminal import coloured

    print(f"{coloured(error.code, 'red', sys.stderr)} {error}", file=sys.stderr)
    return 2


def _too_much(error: BaseException) -> PartcError:
    """What asks for more memory, or is nested deeper, than this process has."""
    return RunError(
        where=sys.argv[0], what="this process has not enough memory or stack for it",
        why=type(error).__name__, do="Look at the sizes that the command and its files name.",
    )  # fmt: skip


def _of_system(error: OSError) -> PartcError:
    """An error of the file system (a full disk, a missing permission) as a RunError."""
    return RunError(
        where=str(error.filename or "file system"),
        what="cannot be read or written",
        why=error.strerror or str(error),
        do="Check the path, its permissions and the free space.",
    )
