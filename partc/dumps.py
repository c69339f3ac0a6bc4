"""The graph after every pass as files: ``diff -u`` of two of them says what a pass did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from partc.atomic import atomic_directory, check_output
from partc.passes.runner import Ran, State

WRITTEN = "[0-9][0-9]-*.txt"


def write_dump(state: State, folder: str | Path) -> None:
    """Write ``NN-insert_collectives.txt`` and its like into a folder, which only an earlier dump
    may be in; of a pipeline a file for each stage, once there are stages. The number is the pass's
    in the table. UsageError if the folder has other files.
    """
    with atomic_directory(folder, _written) as new:
        before: tuple[str, ...] = ()
        for row, ran in sorted(state.ran.items()):
            for name, text in _files(row + 1, ran, before):
                (new / name).write_text(text, encoding="utf-8", newline="\n")
            before = ran.texts


def check_folder(folder: str | Path) -> None:
    """UsageError if a dump could not be written there, before the work that it would show."""
    check_output(folder, _written)


def _written(folder: Path) -> list[str]:
    return [each.name for each in folder.glob(WRITTEN)]


def _files(number: int, ran: Ran, before: Sequence[str]) -> Iterator[tuple[str, str]]:
    stages, same_stages = len(ran.texts) > 1, len(ran.texts) == len(before)
    for stage, text in enumerate(ran.texts):
        place = f"-stage{stage}" if stages else ""
        header = ran.header(stage, unchanged=same_stages and text == before[stage])
        yield f"{number:02}-{ran.name}{place}.txt", f"{header}\n{text}"
