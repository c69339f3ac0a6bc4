"""The methods of a pipeline stage's class, one for each phase of a step."""

from __future__ import annotations

from dataclasses import dataclass

from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import Line, wrap
from partc.graph import Phase

METHODS: dict[Phase, str] = {"S": "begin", "F": "forward", "B": "backward", "W": "weights"}
DOCS: dict[Phase, str] = {
    "S": "Compute what all microbatches share.",
    "F": "Microbatch `i` through this stage.",
    "B": "The gradients of microbatch `i`.",
    "W": "The weight gradients that `backward` left for later.",
}


@dataclass
class Method:
    """One of ``METHODS`` before it is printed."""

    phase: Phase
    arguments: list[str]
    lines: list[Line]

    def function(self, helpers: Helpers) -> dict[str, str]:
        """Signature, docstring and body for the template."""
        signature = f"def {METHODS[self.phase]}({', '.join(['self', *self.arguments])})"
        result = "tuple[Tensor, ...]" if self.phase in "FB" else "None"
        return {
            "signature": "\n".join(wrap(f"{signature} -> {result}:", 4)),
            "doc": DOCS[self.phase],
            "body": helpers.block(self.lines or [Line("pass")], 2),
        }
