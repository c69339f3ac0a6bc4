"""What all ranks do at once: where one of them cannot, all raise, and none is left waiting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from partc.atomic import what_helps
from partc.errors import LoadError, PartcError, RunError
from partc.program.tensors.holders import bytes_of, exchange_texts, text_of

Done = TypeVar("Done")
MOST = 2000  # letters of an error that other ranks are told


@dataclass(frozen=True)
class Together:
    """All ranks of the world, in a call of this name.

    ``error``: what is raised where a rank cannot go on, or ranks differ. ``group``: by which they
    talk, of all ranks; None is the default group.
    """

    call: str
    device: torch.device
    error: type[LoadError] | type[RunError]
    group: Any = None

    def do(self, act: Callable[[], Done]) -> Done:
        """Do something on each rank, without collectives inside; if it fails on one, all raise."""
        failed: Exception | None = None
        try:
            done = act()
        except OSError as error:
            failed = self._of_system(error)
        except Exception as error:  # whatever it is: the others wait for this rank
            failed = error
        told = self.exchange("" if failed is None else str(failed)[:MOST])
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
        rows = self.exchange(dict(facts))
        for name in dict.fromkeys(name for row in rows for name in row):
            ranks: dict[str, list[int]] = {}
            for rank, row in enumerate(rows):
                if name in row:
                    ranks.setdefault(json.dumps(row[name]), []).append(rank)
            if len(ranks) > 1:
                raise self._differ(name, ranks)

    def exchange(self, said: Any) -> list[Any]:
        """What each rank says, plain data, in rank order."""
        group = dist.group.WORLD if self.group is None else self.group
        texts = exchange_texts(json.dumps(said), group, self.device)
        return [json.loads(text) for text in texts]

    def to_first(self, said: Any, senders: Sequence[int]) -> list[Any]:
        """On rank 0 what the senders say, plain data that may be long; nothing on other ranks."""
        here = dist.get_rank()
        if here != 0:
            if here in senders:
                self._send(json.dumps(said))
            return []
        return [said if each == 0 else json.loads(self._receive(each)) for each in senders]

    def _send(self, text: str) -> None:
        data = bytes_of(text, self.device)
        dist.send(torch.tensor([data.numel()], device=self.device), 0, group=self.group)
        dist.send(data, 0, group=self.group)

    def _receive(self, rank: int) -> str:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        dist.recv(size, rank, group=self.group)
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.recv(data, rank, group=self.group)
        return text_of(data)

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
            do=f"{what_helps(error)} All ranks share this folder.",
        )
