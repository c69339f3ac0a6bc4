"""A plan as a piece of a page: each key, its value, and what it decides."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from partc.drawing import html_table
from partc.plan.plan_keys import MEANINGS

MOST = 120  # characters of a value
MOST_ENTRIES = 30  # of a table of the plan that are shown one by one


def plan_html(text: str) -> str:
    """HTML of the text of a plan, of at most some 20 kB."""
    rows: list[tuple[str, str, str]] = []
    for key, value in tomllib.loads(text).items():
        entries = [*value.items()] if isinstance(value, dict) else [("", value)]
        for number, (name, entry) in enumerate(entries[:MOST_ENTRIES]):
            meant = MEANINGS.get(key, "") if number == 0 else ""
            rows.append((f"{key}.{name}" if name else key, _short(entry), meant))
        if len(entries) > MOST_ENTRIES:
            rows.append(("", f"and {len(entries) - MOST_ENTRIES} more", ""))
    return html_table(rows, "Plan")


def _short(value: Any) -> str:
    said = json.dumps(value)
    return said if len(said) <= MOST else f"{said[: MOST - 3]}..."
