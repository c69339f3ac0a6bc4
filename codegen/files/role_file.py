"""The text of a role's file, and of the file of helper functions beside the roles of a program.

One text for all roles: what is no part of the model (transfers, pipeline links, attention by
device) stands once, and a role reads as the model. ``from .helpers import`` is relative, so that no
module of the same name elsewhere on the path is taken.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from partc.codegen.files.spelling import header_line
from partc.codegen.files.templates import TEMPLATES
from partc.codegen.helpers.needed import Helpers, in_order, sources
from partc.codegen.helpers.needed import Printed as Function
from partc.codegen.safety import check_source
from partc.codegen.text import WIDTH, Printed
from partc.program.helper_file import MODULE, NAME
from partc.version import __version__


def role_file(body: str, header: str, helpers: Helpers, *, distributed: bool = True) -> Printed:
    """A role's file: its header, what it imports, and its body from the tables on.

    CheckError if the text does anything but compute with torch.
    """
    shared = helpers.shared()
    called = sorted({each.__name__ for each in shared} & names_in(body))
    text = TEMPLATES.get_template("head.py.j2").render(
        header=[header_line(line) for line in header.strip().splitlines()],
        distributed=distributed, own=helpers, helpers=import_of(called), body=body.rstrip(),
    )  # fmt: skip
    check_source(text)
    return Printed(text, helpers.origins(text), shared)


def helper_file(roles: Iterable[Printed]) -> dict[str, str]:
    """The file with the helper functions of all roles, by its name; none where no role needs any.

    CheckError if its text does anything but compute with torch.
    """
    functions: list[Function] = in_order(each for role in roles for each in role.helpers)
    if not functions:
        return {}
    body = sources(functions)
    text = TEMPLATES.get_template("helpers.py.j2").render(
        version=__version__, names=names_in(body), text=body
    )
    check_source(text)
    return {NAME: text}


def import_of(names: Sequence[str]) -> str:
    """The statement that imports functions of the file; nothing for none.

    >>> import_of(["gather", "join"])
    'from .helpers import gather, join'
    """
    line = f"from .{MODULE} import {', '.join(names)}"
    if not names or len(line) <= WIDTH:
        return line if names else ""
    rows = [f"from .{MODULE} import ("]
    for name in names:
        if len(rows) > 1 and len(rows[-1]) + len(name) + 2 <= WIDTH:
            rows[-1] += f" {name},"
        else:
            rows.append(f"    {name},")
    return "\n".join([*rows, ")"])


def names_in(text: str) -> set[str]:
    """Every name that a text reads or sets."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
