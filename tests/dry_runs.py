"""A dry run that leaves nothing out: what the shorter ones of the compiler are compared with."""

from __future__ import annotations

from partc.dryrun.run import DryRun, execute, report
from partc.program.role import Role


def dry_run_all(role: Role, rank: int = 0) -> DryRun:
    """A step of one rank, every microbatch and layer executed."""
    live = execute(role, rank, None, 0)
    peak = live.peak()
    return report(role, peak.num_bytes, peak.line, live.lines_at(peak))
