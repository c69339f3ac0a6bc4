"""How a program's text spells attributes' paths, rows of equal blocks, and lines of its header."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from partc.codegen.bodies.classes import BlockClass
from partc.codegen.repeats.layers import FIRST
from partc.codegen.repeats.numbers import Varied
from partc.codegen.repeats.own_names import NUMBER, is_elsewhere
from partc.graph import value
from partc.quoting import docstring, literal


def dtype_name(node: fx.Node) -> str:
    """The dtype of a node as tables have it: ``float32``."""
    return str(value(node).dtype).removeprefix("torch.")


def read(path: str, owner: str = "self") -> str:
    """A path of attributes as Python reads it: ``layers.0.w -> self.layers[0].w``."""
    return f"{owner}." + re.sub(r"\.(\d+)\.", r"[\1].", path)


def result_type(trains: bool, results: bool, *, waits: bool = False) -> str:
    """The type that a step returns: its loss, its named results, or both.

    >>> result_type(True, True)
    'tuple[Tensor, dict[str, Tensor]]'
    """
    if waits:  # a generator, of which torch has no type
        return ""
    if not trains:
        return "dict[str, Tensor]"
    return "tuple[Tensor, dict[str, Tensor]]" if results else "Tensor"


def numbered(parent: str, number: str) -> str:
    """The expression of a member's path: ``"h"`` and ``i`` give ``f"h.{i}"``.

    >>> numbered('f"e.{n + 1}.h"', "i"), numbered('""', "i")  # of the model itself
    ('f"e.{n + 1}.h.{i}"', 'f"{i}"')
    """
    text = parent if parent.startswith("f") else "f" + parent.replace("{", "{{").replace("}", "}}")
    dot = "." if len(parent) > len('""') else ""
    return f"{text[:-1]}{dot}{{{number}}}{text[-1]}"


def row_name(cls: BlockClass, name: str) -> str:
    """The name of a block's parameter in the table of one block: without the block's path.

    Where some stand in other lists, all names are whole and have ``{}`` for the block's number.
    """
    if not cls.run.elsewhere:
        return cls.own(name)
    own = cls.own(name).replace("{", "{{").replace("}", "}}")
    parent, dot, _ = cls.run.layers[0].rpartition(".")
    head = f"{parent}{dot}".replace("{", "{{").replace("}", "}}")
    return own.replace(NUMBER, "{}", 1) if is_elsewhere(own) else f"{head}{{}}.{own}"


def spread_rows(cls: BlockClass, name: str, relative: bool) -> str:
    """The entries of all blocks as a comprehension over the table of one block.

    ``relative`` names count layers from the stage's first one, ``n``.
    """
    if cls.run.is_one_module:
        path, parent = f'f"{cls.attribute}.{{attribute}}"', literal(f"{cls.run.module}.")
        return (
            f"**{{{path}: ({parent} + name, *rest) for attribute, (name, *rest) in {name}.items()}}"
        )
    numbers = [int(layer.rpartition(".")[2]) for layer in cls.run.layers]
    first, num = numbers[0], len(numbers)
    steady = numbers == list(range(first, first + num))
    where = f"i + {first}" if steady and first else "i" if steady else f"{numbers}[i]"
    where += f" + {FIRST}" if relative else ""
    rows = f"for i in range({num}) for attribute, (name, *rest) in {name}.items()}}"
    if cls.run.elsewhere:
        path = f'f"{cls.attribute}.{{i}}.{{attribute}}"'
        return f"**{{{path}: (name.format({where}), *rest)\n       {rows}"
    parent = cls.run.layers[0].removesuffix(str(first))
    named = f"{literal(parent)} + " if parent else ""
    return (
        f'**{{f"{cls.attribute}.{{i}}.{{attribute}}": ({named}f"{{{where}}}.{{name}}", *rest)\n'
        f"       {rows}"
    )


def with_numbers(rows: Sequence[Varied], numbers: str) -> str:
    """What a comprehension goes through to make blocks with numbers of their own.

    ``numbers``: the expression of the blocks' own numbers, if their names are needed.
    """
    names = [*(["i"] if numbers else []), *(row.name for row in rows)]
    lists = [*([numbers] if numbers else []), *(literal(row.values) for row in rows)]
    if len(lists) == 1:
        return f"{names[0]} in {lists[0]}"
    return f"{', '.join(names)} in zip({', '.join(lists)}, strict=True)"


def header_line(line: str) -> str:
    """A line of the header as a docstring can hold it; runs of spaces, its columns, are kept."""
    parts = re.split("( {2,})", line)
    return "".join(part if i % 2 else docstring(part, 120) for i, part in enumerate(parts))


def variable_of(code: str) -> str:
    """The variable or attribute that an expression begins with.

    >>> variable_of("attn_all[3]")
    'attn_all'
    """
    found = re.match(r"(?:self\.)?([A-Za-z_]\w*)", code)
    assert found is not None, code
    return found.group(1)
