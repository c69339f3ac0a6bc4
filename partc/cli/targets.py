"""The model that ``--model`` names, beside a saved program of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from partc.cli.said import sizes_said
from partc.cli.terminal import progress

if TYPE_CHECKING:
    from partc.cli.target import Target
    from partc.program import Program


def target_of(
    args: argparse.Namespace, folder: str, program: Program, values: bool = False
) -> Target:
    """The model that ``--model`` names; LoadError if the program is of another model."""
    from partc.cli.models import find_model, sizes_of_inputs
    from partc.program import check_model

    shapes = [shape for shape, _ in program.inputs.values()]
    sizes = sizes_of_inputs(shapes, sizes_said(args))
    with progress(f"building {args.model}"):
        if values and args.model.startswith("hf:"):  # another, larger one is refused without values
            known = find_model(args.model, sizes).model
            check_model(Path(folder), program.fingerprint, known, program.model)
        target = find_model(args.model, sizes, values=values)
        target = target.for_inference() if program.role(0).is_inference else target
    check_model(Path(folder), program.fingerprint, target.model, program.model)
    return target
