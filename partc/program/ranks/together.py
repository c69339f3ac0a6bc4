"""What all ranks do at once: where one of them cannot, all raise, and none is left waiting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from partc.errors import LoadError, PartcError, RunError
from partc.program.tensors.holders import exchange_texts

Done = TypeVar("Done")
MOST = 2000  # letters of an error that other ranks are told


@dataclass(frozen=True)
class Together:
    """All ranks of the world, in a call of this name.

    ``error``: what is raised where a rank cannot go on, or ranks differ.
    """

    call: str
    device: torch.device
    error: type[LoadError] | type[RunError]

    def do(self, act: Callable[[], Done]) -> Done:
        """Do something on each rank, without collectives inside; if it fails on one, all raise."""
        failed: PartcError | None = None
        try:
            done = act()
        except PartcError as error:
            failed = error
        except OSError as error:
            failed = self._of_system(error)
        told = self._exchange("" if failed is None else str(failed)[:MOST])
        if failed is not None:
            raise failed
        refused = [rank for rank, text in enumerate(told) if text]
        if refused:
            raise self.error(
                where=self.call,
                what=f"rank {refused[0]} cannot go on",
                why=told[refused[0]],
                do="All ranks stop, so that none waits for another.",
            )
        return done

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """All ranks raise, with a line for each value, if they differ in a fact that two have."""
        rows = self._exchange(dict(facts))
        for name in dict.fromkeys(name for row in rows for name in row):
            ranks: dict[str, list[int]] = {}
            for rank, row in enumerate(rows):
                if name in row:
                    ranks.setdefault(json.dumps(row[name]), []).append(rank)
            if len(ranks) > 1:
                raise self._differ(name, ranks)

    def _exchange(self, said: Any) -> list[Any]:
        texts = exchange_texts(json.dumps(said), dist.group.WORLD, self.device)
        return [json.loads(text) for text in texts]

    def _differ(self, name: str, ranks: Mapping[str, list[int]]) -> PartcError:
        lines = [
            f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {value[:200]}"
            for value, who in ranks.items()
        ]
        return self.error(
            where=self.call,
            what=f"the ranks have not the same {name}",
            why="a checkpoint is of all ranks together",
            do="Call it on all ranks with the same:\n  " + "\n  ".join(lines),
        )

    def _of_system(self, error: OSError) -> PartcError:
        return self.error(
            where=str(error.filename or self.call),
            what="cannot be read or written",
            why=error.strerror or str(error),
            do="Name a folder that all ranks share, where you may write, with room on its disk.",
        )
