"""``partc doctor``: look at this process, or under torchrun at all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partc.doctor.between import compare, compare_clocks
from partc.doctor.finding import WRONG, Finding, Findings, merged
from partc.doctor.here import look_here
from partc.doctor.links import look_at_links
from partc.doctor.looked_at import Here, host, versions
from partc.doctor.variables import look_at_variables
from partc.errors import PartcError, RunError
from partc.program import load
from partc.program.written import refuse_code_beside

TIMEOUT = timedelta(seconds=300)  # for which ranks wait for each other


def examine(
    folder: str = "", links_s: float = 5.0, tell: Callable[[str], None] = lambda line: None
) -> Findings:
    """Look at this rank and, under torchrun, at all of them; every rank has to call it.

    ``folder``: a saved program that they shall run, "" for none. ``links_s``: seconds for
    measuring links, 0 for none. All ranks return the same. RunError if the ranks do
    not find each other.
    """
    here, mine = _looked_at(folder)
    mine += [*look_here(here), *look_at_variables(here)]
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Findings(tuple(mine))
    with _group():
        rows = _together(here, mine, folder, links_s, tell)
    return Findings(tuple(rows))


def _looked_at(folder: str) -> tuple[Here, list[Finding]]:
    """This rank; and what is wrong with the program, which is then left out."""
    if not folder:
        return Here(os.environ), []
    try:
        program = load(folder)
        refuse_code_beside(Path(folder))
        return Here(os.environ, program, folder), []
    except PartcError as error:
        found = f"{error.where}: {error.what} ({error.why})"
        return Here(os.environ), [Finding(WRONG, "program", found, error.do)]


def _together(
    here: Here, mine: list[Finding], folder: str, links_s: float, tell: Callable[[str], None]
) -> list[Finding]:
    """The findings of all ranks, and those between them."""
    has = here.program is not None
    said = _from_all((mine, versions(folder if has else ""), host(), has and _can_measure(here)))
    rows = merged([each[0] for each in said])
    rows += compare([each[1] for each in said])
    tell("comparing clocks ...")
    rows += _from_all(compare_clocks([each[2] for each in said]))[0]
    if here.machine is not None and links_s > 0 and all(each[3] for each in said):
        tell("measuring links ...")
        rows += look_at_links(here.machine, here.library, links_s)
    return rows


def _can_measure(here: Here) -> bool:
    """Whether this rank's links are those of the program's machine."""
    machine, num = here.machine, dist.get_world_size()
    has_device = here.library == "gloo" or torch.cuda.device_count() >= here.ranks
    return machine is not None and machine.num_devices == num and has_device


def _from_all(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@contextmanager
def _group() -> Iterator[None]:
    """A process group of all ranks over gloo, which needs no GPU."""
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise RunError(
            where="partc doctor", what="the ranks do not find each other",
            why=str(error).partition("\n")[0],
            do="Look at MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME; torchrun sets the first "
            "two.",
        ) from None  # fmt: skip
    try:
        yield
    finally:
        dist.destroy_process_group()
