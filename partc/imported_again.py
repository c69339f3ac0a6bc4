"""A script whose lines run again in a process that it starts, as a DataLoader's workers by spawn.

Python imports the script there, under another name, before the worker begins. Lines that stand
outside of functions would join the ranks once more, as a rank that is there already, and wait.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from partc.errors import RunError


def is_imported_again() -> bool:
    """Whether this process still imports the script of the one that started it."""
    process: Any = sys.modules.get("multiprocessing.process")
    return bool(process and getattr(process.current_process(), "_inheriting", False))


def check_not_imported_again(call: str) -> None:
    """RunError where a call of all ranks is made while the script is imported again."""
    if is_imported_again():
        raise RunError(
            where=call,
            what="it is called where the script is imported again, by a process that it started",
            why="a DataLoader with multiprocessing_context='spawn' (and mp.spawn) imports the "
            "script in each worker, which is no rank of the run",
            do='Put what the script does into a function: if __name__ == "__main__": main(); or '
            "take workers by fork, which is Linux's default.",
        )


def refuse_groups() -> None:
    """Let ``init_process_group`` refuse in such a process, where it would wait for ever."""
    torch_dist: Any = sys.modules.get("torch.distributed")
    if torch_dist is None or not hasattr(torch_dist, "init_process_group"):
        return
    plain = torch_dist.init_process_group

    @functools.wraps(plain)
    def checked(*args: Any, **named: Any) -> Any:
        check_not_imported_again("init_process_group")
        return plain(*args, **named)

    torch_dist.init_process_group = checked
