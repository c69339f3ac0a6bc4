"""A method of a block's class before it is printed."""

from __future__ import annotations

from dataclasses import dataclass

from partc.codegen.bodies.frees import Ledger
from partc.codegen.calls.statements import with_sections
from partc.codegen.text import Line


@dataclass
class BlockMethod:
    """A method of a class before it is printed; ``ledger`` adds ``del`` lines to its statements."""

    signature: Line
    ledger: Ledger
    closing: list[Line]
    layer: str  # the path of the block from whose calls it is printed

    def lines(self) -> list[Line]:
        """The signature and the body."""
        return [
            self.signature,
            *with_sections(self.ledger.statements, layer=self.layer),
            *self.closing,
        ]
