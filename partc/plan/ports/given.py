"""What stands where a plan should: a dict, a text of JSON, keys of another tool's configuration.

In: what was given. Out: what it is, and the plan's text that says the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partc.errors import PlanError, UsageError
from partc.file_text import Unreadable, json_value
from partc.plan.axis_words import axis_instead
from partc.plan.field_kinds import FIELDS
from partc.plan.ports import draft_of, flat
from partc.wrong_calls import did_you_mean

_WHY = 'a plan is TOML, with one decision in a line: preset = "fsdp"'
_AXES = ("dp", "tp", "pp", "dp_shard", "dp_replicate")
MOST = 4  # keys that are named


def no_dict(given: Mapping[Any, Any]) -> PlanError:
    """The refusal of a dict that stands for a plan."""
    if any(hasattr(each, "_apply") and hasattr(each, "src_data_rank") for each in given.values()):
        return PlanError(
            where="compile", what="plan is a parallelize_plan of torch's tensor parallelism",
            why=f"{_WHY}; along tp partc knows itself which weights are cut by columns or rows",
            do='Write plan="megatron", with tp in the mesh; a weight of your own choice is a line '
            'of the plan: [params] "0.weight" = { tp = 0 }.',
        )  # fmt: skip
    return _refusal("compile", "plan is a dict", given)


def no_json(text: str, where: str) -> PlanError | None:
    """The refusal of a text of JSON that stands for a plan; None for another text."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json_value(text)
    except Unreadable as error:
        return PlanError(
            where=where, what="it begins as JSON does, and is none", why=f"{_WHY}; {error}",
            do='Write TOML: plan=\'preset = "fsdp"\', or the path of a plan.toml.',
        )  # fmt: skip
    return _refusal(where, "it is JSON", found)


def _refusal(where: str, what: str, table: Mapping[Any, Any]) -> PlanError:
    kind, do = meant_by(table)
    return PlanError(
        where=where, what=f"{what}, {kind}" if kind else what, why=_WHY,
        do=do or 'Write plan=\'preset = "fsdp"\\nmicrobatches = 4\', as text, or '
        'partc.Plan(preset="fsdp", microbatches=4).',
    )  # fmt: skip


def meant_by(table: Mapping[Any, Any]) -> tuple[str, str]:
    """Of what kind the keys are, and the plan that says the same; both empty for unknown ones."""
    names = [str(each) for each in table]
    if names and {*names} <= FIELDS:
        if lines := _lines(table):
            return "with the keys of a plan", f"Write it as TOML: plan={lines!r}."
        return "with the keys of a plan", "Write these keys as TOML, a text or a plan.toml."
    if names and all(each in _AXES or axis_instead(each) for each in names):
        axes = ",".join(f"{name}={size}" for name, size in table.items())
        return "with axes of a mesh", f'Pass it as the mesh, mesh="{axes}", and plan="fsdp".'
    try:
        draft = draft_of(dict(flat(table)), Path("the configuration"))
        text = [line for line in str(draft).splitlines() if line and not line.startswith("#")]
    except (UsageError, AttributeError, TypeError):
        return "", _nearest(names)
    told = [f"{key}: {said}" for key, said in draft.told.items() if not said.startswith("no line")]
    more = ", ..." if len(told) > MOST else ""
    return (
        f"a configuration of {draft.tool}",
        f"Write plan={chr(10).join(text)!r} ({', '.join(told[:MOST])}{more}). Of its file, partc "
        "plan --from FILE --out plan.toml tells what becomes of each key.",
    )


def _lines(table: Mapping[Any, Any]) -> str:
    """The TOML of a table of plain values; "" where it has others, which have types in Python."""
    plain = (bool, int, float, str)
    rows = []
    for name, given in table.items():
        entries = given if isinstance(given, list | tuple) else [given]
        if not all(isinstance(each, plain) for each in entries):
            return ""
        rows.append(f"{name} = {json.dumps(given)}")
    return "\n".join(rows)


def _nearest(names: list[str]) -> str:
    """What to write for a misspelt key; "" where none is near."""
    near = ((name, did_you_mean(name, FIELDS)) for name in names if name not in FIELDS)
    found = next((f"{name}: {told}" for name, told in near if told), "")
    return f"{found} Write it as TOML: plan='preset = \"fsdp\"\\n...'." if found else ""
