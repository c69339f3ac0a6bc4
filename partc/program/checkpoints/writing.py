"""Write what all ranks have as one step of a folder, over one process group."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from partc.errors import LoadError
from partc.program.checkpoints.files import FileEntry, Parts, file_name, link_or_write, write_file
from partc.program.checkpoints.one_folder import check_seen, of_one_folder
from partc.program.checkpoints.run_folder import (
    KEEP_ALL,
    Retention,
    committed,
    first_rank_commits,
    first_rank_drops,
    first_rank_makes,
    first_rank_retires,
    partial_of,
)
from partc.program.checkpoints.saved_checkpoint import CUTS, SCHEMA, Saved, cuts_text, digest_of
from partc.program.checkpoints.snapshot import Held, Snapshot, joined
from partc.program.ranks.together import Together
from partc.program.tensorfile import parts_of

Files = dict[str, FileEntry]


@dataclass(frozen=True)
class Writer:
    """Writes steps into a folder; of frozen parameters those that are as in the step before are
    links to its files.
    """

    folder: Path
    retention: Retention = KEEP_ALL

    def write(self, snapshot: Snapshot, target: Path, ranks: Together) -> None:
        """Write one step; all ranks call this together, in any thread.

        If one of them fails, all raise, and the folder is as it was.
        """
        ranks.check_alike(snapshot.facts)
        num_bytes = sum(ranks.exchange(snapshot.num_bytes))
        ranks.do(lambda: first_rank_makes(target, num_bytes))
        try:
            with of_one_folder(ranks, target.parent):
                ranks.do(lambda: check_seen(partial_of(target)))
            files = ranks.do(lambda: self._files(snapshot, partial_of(target)))
            text = self._list(snapshot, files, ranks)
            ranks.do(lambda: first_rank_commits(target, text))
        except Exception:
            first_rank_drops(target)
            raise
        ranks.do(lambda: first_rank_retires(self.folder, self.retention))

    def _files(self, snapshot: Snapshot, folder: Path) -> Files:
        """Write this rank's files."""
        rank, frozen = dist.get_rank(), {k: snapshot.tensors[k] for k in snapshot.frozen}
        others = {k: pair for k, pair in snapshot.tensors.items() if k not in frozen}
        name = file_name(rank)
        files = {name: write_file(folder / name, _parts(others))}
        if frozen:
            name = file_name(rank, frozen=True)
            files[name] = link_or_write(folder / name, _parts(frozen), self._before(name))
        return files

    def _before(self, name: str) -> tuple[Path, FileEntry] | None:
        """The file of this name in the newest step, and what its list says of it."""
        for step in committed(self.folder)[-1:]:
            with suppress(LoadError):  # a damaged one is no reason not to save
                files = Saved.read(step).files
                return (step / name, files[name]) if name in files else None
        return None

    def _list(self, snapshot: Snapshot, files: Files, ranks: Together) -> str:
        """The text of the list, on rank 0."""
        told = ranks.to_first(
            {"tensors": snapshot.entries, "optimizer": snapshot.groups}, snapshot.senders
        )
        every = ranks.exchange(files)
        if not told:
            return ""
        fields = {
            "schema": SCHEMA, **snapshot.listed, **joined(told),
            "files": {name: entry for each in every for name, entry in each.items()},
        }  # fmt: skip
        return json.dumps({**fields, "sha256": digest_of(fields)}, indent=1) + "\n"


def _parts(held: Held) -> Parts:
    """The bytes of a file with these tensors, which says how they are sharded."""
    notes = {CUTS: cuts_text({key: shard for key, (shard, _) in held.items()})}
    return parts_of({key: piece for key, (_, piece) in held.items()}, notes)
