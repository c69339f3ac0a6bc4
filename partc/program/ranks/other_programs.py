"""In what the programs of ranks differ, in the words of what made them: model, loss, plan, text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile
from typing import Any

import torch
import torch.distributed as dist

from partc.errors import PartcError
from partc.program import Program
from partc.program.tensors.holders import exchange_texts

MOST = 3  # things that differ, and kinds of ranks, that are named


def told_differences(program: Program, device: torch.device) -> str:
    """How ranks differ from rank 0, of all ranks; all call this together, once they know it."""
    mine = _facts(program)
    usual = json.loads(_of_first(json.dumps(mine), device))
    found = [*_differences(mine, usual)] or [*_of_sources(mine["sources"], usual["sources"])]
    each = exchange_texts("; ".join(found[:MOST]), dist.group.WORLD, device)
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(each):
        if text:
            ranks.setdefault(text, []).append(str(rank))
    kinds = [f"rank{'s' * (len(r) > 1)} {', '.join(r[:8])}: {text}" for text, r in ranks.items()]
    return "; ".join(kinds[:MOST])


def _of_first(text: str, device: torch.device) -> str:
    """The text of rank 0."""
    sent = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([sent.numel()], device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank():
        sent = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(sent, src=0)
    return bytes(sent.tolist()).decode()


def _facts(program: Program) -> dict[str, Any]:
    """What a program was made of, as plain data."""
    recipe: Any = program.recipe
    loss = getattr(recipe, "loss", None)
    inputs = {n: f"{dtype}{list(shape)}" for n, (shape, dtype) in program.inputs.items()}
    tensors = program.fingerprint.tensors.items()
    return {
        "model": program.model, "loss": getattr(loss, "__qualname__", type(loss).__name__),
        "tensors": {n: f"{x.dtype}{list(x.shape)}" for n, x in tensors},
        "frozen": _frozen(recipe), "mode": program.wanted.mode, "inputs": inputs,
        "plan": program.plan.splitlines(), "torch": torch.__version__,
        "sources": {name: text.splitlines() for name, text in program.sources.items()},
    }  # fmt: skip


def _frozen(recipe: Any) -> list[str]:
    """The parameters that are not trained, where the model is at hand."""
    with suppress(PartcError, AttributeError):
        pairs = zip(recipe.model.named_parameters(), recipe.trained, strict=False)
        return [name for (name, _), trained in pairs if not trained]
    return []


def _differences(mine: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on how this rank differs from rank 0, the causes before their effects."""
    at = "on rank 0"
    if mine["model"] != usual["model"]:
        yield f"the model is a {mine['model']}, and a {usual['model']} {at}"
    for kind in ("tensors", "inputs"):
        yield from _of_tensors(mine[kind], usual[kind], "input " * (kind == "inputs"))
    for name in sorted({*mine["frozen"]} ^ {*usual["frozen"]})[:1]:
        here = name in mine["frozen"]
        yield f"{name} is {_mode(here)}, and {_mode(not here)} {at}"
    if mine["loss"] != usual["loss"]:
        yield f"the loss is {mine['loss']}, and {usual['loss']} {at}"
    if mine["mode"] != usual["mode"]:
        yield f"the model is in {mine['mode']} mode, and in {usual['mode']} mode {at}"
    if mine["torch"] != usual["torch"]:
        yield f"torch is {mine['torch']}, and {usual['torch']} {at}"
    if pair := _first(mine["plan"], usual["plan"]):
        yield f"the plan has {pair[0]}, and {pair[1]} {at}"


def _of_sources(mine: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
    """The first line of a text that is another one, where nothing says why."""
    for name in sorted({*mine, *usual}):
        texts = [[*dropwhile(_is_head, each.get(name, []))] for each in (mine, usual)]
        if pair := _first(*texts) or _first(mine.get(name, []), usual.get(name, [])):
            yield f"{name} has {pair[0]}, and {pair[1]} on rank 0"
            return


def _is_head(line: str) -> bool:
    """Whether a line is of what stands above a program's code, whose numbers follow from that."""
    return not line.startswith(("import ", "from "))


def _mode(frozen: bool) -> str:
    return "frozen" if frozen else "trained"


def _of_tensors(mine: Mapping[str, str], usual: Mapping[str, str], kind: str) -> Iterator[str]:
    differing = [n for n in {**usual, **mine} if mine.get(n) != usual.get(n)]
    for name in differing[:1]:
        more = f" (and {len(differing) - 1} more)" * (len(differing) > 1)
        here, there = (x.get(name, "absent") for x in (mine, usual))
        yield f"{kind}{name} is {here}, and {there} on rank 0{more}"


def _first(mine: Sequence[str], usual: Sequence[str]) -> tuple[str, str] | None:
    """The first line of two texts that is another one; a comment only where nothing else is."""
    if mine == usual:
        return None
    kept = [[each.partition("  #")[0].strip() for each in text] for text in (mine, usual)]
    kept = [[line for line in text if line and line[0] not in '#"'] for text in kept]
    if kept[0] == kept[1]:
        kept = [[*mine], [*usual]]
    at = next((i for i, pair in enumerate(zip(*kept, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        at = min(map(len, kept))
    here, there = (f"`{text[at]}`" if at < len(text) else "nothing more" for text in kept)
    return here, there
