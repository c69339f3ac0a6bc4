"""The templates of programs' files, and what is said of their tables."""

from __future__ import annotations

import jinja2

from partc.codegen.bodies.tables import WHOLE_BATCH
from partc.codegen.files.mesh_attributes import mesh_attributes

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("partc.codegen"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # Python text; every value comes quoted
)
TEMPLATES.filters["mesh_attributes"] = mesh_attributes
MEANINGS = {
    "SHARDS": "attribute here: (name in the model, whole shape, dtype, cuts as (axis, dim, outer))",
    "BUFFERS": "the same for buffers",
    "ALIASES": "second name of a tied parameter: the name it stands under",
    "INPUTS": WHOLE_BATCH,
}
