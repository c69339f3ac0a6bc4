"""Configurations of other tools as plans: Accelerate's YAML, DeepSpeed's JSON, torchtitan's TOML.

In: a file of one of these tools. Out: the text of a plan, with a line for each key of the file:
what it became, or why the plan has nothing for it. Start: ``read_config`` here; ``draft.py`` is
what the tables in the other files write into. Never: a key that is left out without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from partc.errors import UsageError
from partc.file_text import Unreadable, file_text, json_value, toml_table
from partc.plan.ports import accelerate, deepspeed, torchtitan
from partc.plan.ports.draft import Draft, Table
from partc.wrong_calls import did_you_mean

_ALIKE, _ALIKE_WORDS = 0.85, 0.75  # keys of one tool are long, and have much in common
TOOLS = {"Accelerate": accelerate, "DeepSpeed": deepspeed, "torchtitan": torchtitan}


def read_config(path: str | Path, devices: int | None = None) -> Draft:
    """The plan that a file of another tool asks for.

    Args:
        path: an Accelerate config (``.yaml``), a DeepSpeed one (``.json``) or torchtitan's
            (``.toml``).
        devices: how many ranks there are, where the file does not say it.

    Raises:
        UsageError: the file cannot be read, is none of these, or says what no plan can be.
    """
    path = Path(path)
    return draft_of(dict(flat(_table(path))), path, devices)


def draft_of(keys: Mapping[str, Any], path: Path, devices: int | None = None) -> Draft:
    """The same of the keys of such a file, which errors call by its path."""
    name, tool = _tool_of(path, keys)
    draft = Draft(name, path.name, devices)
    tool.before(keys, draft)
    for key, value in keys.items():
        if meant := _meant(tool.KEYS, key):
            draft.refuse_key(key, meant)
        draft.put(key, value, _entry(tool.KEYS, key))
    draft.finish()
    return draft


def _entry(table: Table, key: str) -> Any:
    """What a table has for a key; an entry ``"optimizer.*"`` stands for all keys below it."""
    if key in table:
        return table[key]
    parts = key.split(".")
    above = (".".join([*parts[:number], "*"]) for number in range(len(parts) - 1, 0, -1))
    return next((table[name] for name in above if name in table), None)


def _meant(table: Table, key: str) -> str:
    """The key that a misspelt one may mean; "" for one that the table has, and for a new one.

    Beside keys of a table with an entry ``"fp16.*"`` the last word alone is compared: all begin
    alike.
    """
    if key in table:
        return ""
    if _entry(table, key) is None:
        return did_you_mean(key, table, _ALIKE)
    above, _, name = key.rpartition(".")
    beside = (each.rpartition(".") for each in table if each.startswith(f"{above}."))
    words = [word for over, _, word in beside if over == above and word != "*"]
    return did_you_mean(name, words, _ALIKE_WORDS)


_OF_LIGHTNING = ("trainer.accelerator", "trainer.strategy", "trainer.devices")


_OF_TRAINER = ("output_dir", "per_device_train_batch_size", "num_train_epochs", "fsdp")
_WORDS_OF_FSDP = {"full_shard": "fsdp", "shard_grad_op": "zero2", "hybrid_shard": "hsdp"}


def _of_trainer(path: Path, named: str, keys: Mapping[str, Any]) -> UsageError:
    """The refusal of TrainingArguments of transformers, with the plan that says the same."""
    said = [str(each) for key, each in keys.items() if key == "fsdp" or key.startswith("fsdp.")]
    words = " ".join(said).replace(",", " ").lower().split()
    preset = next((_WORDS_OF_FSDP[each] for each in words if each in _WORDS_OF_FSDP), "ddp")
    lines = [f'preset = "{preset}"']
    if isinstance(number := keys.get("gradient_accumulation_steps"), int) and number > 1:
        lines.append(f"microbatches = {number}")
    if keys.get("gradient_checkpointing") is True:
        lines.append('recompute = "block"')
    return UsageError(
        where=f"{path}, {named}", what="it is a TrainingArguments of transformers",
        why=f"partc plan --from reads configurations of {', '.join(TOOLS)}",
        do=f"Write a plan.toml of these lines: {', '.join(lines)}; and see "
        "docs/how-to/trainer-and-accelerate.md for the rest.",
    )  # fmt: skip


def _tool_of(path: Path, keys: Mapping[str, Any]) -> tuple[str, Any]:
    """The tool that most keys of a file belong to.

    A key that only ``"model.*"`` stands for names no tool: other tools' files have models too.
    """
    known = {n: sum(_entry(t.KEYS, key) is not None for key in keys) for n, t in TOOLS.items()}
    name = max(known, key=lambda each: known[each])
    if any(key.startswith(_OF_LIGHTNING) for key in keys):
        raise UsageError(
            where=str(path), what="it is a configuration of Lightning",
            why=f"partc plan --from reads those of {', '.join(TOOLS)}",
            do='Give the Trainer partc\'s strategy: strategy=partc.wrappers.lightning.Strategy('
            '"dp=8", plan="fsdp"), with the mesh of your devices.',
        )  # fmt: skip
    if named := next((key for key in keys if key in _OF_TRAINER), ""):
        raise _of_trainer(path, named, keys)
    if not any(key in tool.KEYS for tool in TOOLS.values() for key in keys):
        raise UsageError(
            where=str(path), what="it is no configuration that partc can read",
            why=f"none of its keys is one of {', '.join(TOOLS)}",
            do=f"{_nearest(keys)} Name an Accelerate config (.yaml), a DeepSpeed config (.json) or "
            "one of torchtitan (.toml).".strip(),
        )  # fmt: skip
    return name, TOOLS[name]


def _nearest(keys: Iterable[str]) -> str:
    """What a file of misspelt keys alone may mean."""
    found = ((key, _meant(tool.KEYS, key)) for key in keys for tool in TOOLS.values())
    return next((f"{key}: {meant}" for key, meant in found if meant), "")


KINDS = ("yaml", "yml", "json", "toml")  # endings of names


def _table(path: Path) -> Mapping[str, Any]:
    """The table of a file, by the ending of its name."""
    try:
        text = file_text(path)
        if path.suffix == ".toml":
            return toml_table(text)
        table = json_value(text) if path.suffix == ".json" else _yaml(text)
        if not isinstance(table, dict):
            raise Unreadable("it has no keys")
        return table
    except (Unreadable, ValueError, RecursionError) as error:
        raise UsageError(
            where=str(path), what="it cannot be read", why=str(error) or type(error).__name__,
            do=_readable(path),
        ) from None  # fmt: skip


def _readable(path: Path) -> str:
    """What to do about a file that cannot be read."""
    if not path.is_file():
        return "Name the configuration's file: a .yaml, .json or .toml."
    kind = path.suffix[1:]
    return f"Correct it: it is no {kind.upper()}." if kind in KINDS else (
        "Name a .yaml, .json or .toml file."
    )  # fmt: skip


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise Unreadable("YAML needs a package: pip install pyyaml") from None

    class Once(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that stands twice in a table: only the last would count."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [each.value for each, _ in node.value if isinstance(each.value, str)]
            for name in names:
                if names.count(name) > 1 and name != "<<":
                    raise Unreadable(f"the key {name!r} stands in it twice: keep one")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Once)
    except yaml.YAMLError as error:
        raise Unreadable(" ".join(str(error).split())) from None


def flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of nested tables as ``"zero_optimization.stage"``."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
