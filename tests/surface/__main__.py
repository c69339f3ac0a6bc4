"""Compare what reports show with the programs and with their data, for all goldens and 20 others.

``python -m tests.surface [NAME ...]`` prints a row for each program: transfers, lines with a mark,
numbers on the page, and whether a rank starts its transfers in the predicted order, which the page
says too. The exit code is 1 if anything differs but the order.
"""

from __future__ import annotations

import json
import sys
import warnings

import partc
from tests.surface.programs import golden_programs, other_programs
from tests.surface.shown import bars_by_line, counts_differ, shown_numbers, strange_numbers


def main(asked: list[str]) -> int:
    """Print a row for each program, and what differs."""
    warnings.simplefilter("ignore")
    programs = {**golden_programs(), **other_programs()}
    wrong = done = other_order = 0
    for name, make in programs.items():
        if asked and not any(each in name for each in asked):
            continue
        program = make()
        told = json.loads(json.dumps(partc.report(program).told))
        differ = [*counts_differ(program, told), *strange_numbers(told)]
        bars = bars_by_line(told)
        print(
            f"{name:<32} {sum(bars.values()):>5} transfers on {len(bars):>3} lines, "
            f"{shown_numbers(told):>4} numbers: {'differs' if differ else 'equal'}"
            f"{'' if told['timeline']['orders_agree'] else ', in another order'}", flush=True,
        )  # fmt: skip
        other_order += not told["timeline"]["orders_agree"]
        for each in differ:
            print(f"    {each}", flush=True)
        wrong += bool(differ)
        done += 1
    print(f"{done} programs, {wrong} differ; {other_order} start transfers in another order")
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
