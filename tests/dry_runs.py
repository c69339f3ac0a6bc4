"""A dry run of a printed program with every microbatch and every layer.

The compiler's own dry runs leave out microbatches and layers that repeat; tests compare their peak
memory with this one's.
"""

from __future__ import annotations

from partc.dryrun.run import DryRun, execute, report
from partc.program.role import Role


def dry_run_all(role: Role, rank: int = 0) -> DryRun:
    """Run one rank's step on tensors without data; its peak in bytes, and on which line."""
    live = execute(role, rank, None, 0)
    peak = live.peak()
    return report(role, peak.num_bytes, peak.line, live.lines_at(peak))
