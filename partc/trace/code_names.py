"""Find the names that a function's code reads: globals, attributes, imported modules."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType
from typing import NamedTuple


class CodeNames(NamedTuple):
    """What code reads by name, also in the functions that it defines."""

    globals: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()  # of any object
    imports: tuple[str, ...] = ()  # modules that it imports when it runs


_KINDS = {
    "LOAD_GLOBAL": 0, "LOAD_NAME": 0, "LOAD_ATTR": 1, "LOAD_METHOD": 1, "IMPORT_FROM": 1,
    "LOAD_SUPER_ATTR": 1, "LOAD_SUPER_METHOD": 1, "IMPORT_NAME": 2,
}  # fmt: skip


@lru_cache(10_000)
def names_in(code: CodeType) -> CodeNames:
    """The names that a function's code reads.

    A text may name an attribute, as in ``getattr(cfg, "rate")``.
    """
    found: tuple[dict[str, None], ...] = ({}, {}, {})
    for each in dis.get_instructions(code):
        kind = _KINDS.get(each.opname)
        if kind is not None:
            found[kind][str(each.argval)] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for known, more in zip(found, names_in(constant), strict=True):
                known.update(dict.fromkeys(more))
        elif isinstance(constant, str) and constant.isidentifier():
            found[1][constant] = None
    return CodeNames(*map(tuple, found))
