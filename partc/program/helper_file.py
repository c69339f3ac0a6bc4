"""``helpers.py`` beside a saved program's roles: the functions that roles import from it.

A role says ``from .helpers import gather, join``. Both files are loaded into one module, so that
whoever replaces what a role calls, such as ``dist``, replaces it for its helpers too.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

MODULE = "helpers"
NAME = f"{MODULE}.py"


def imports_helpers(node: ast.AST) -> bool:
    """Whether a statement is ``from .helpers import gather, join``, which takes no other names."""
    if not isinstance(node, ast.ImportFrom) or (node.module, node.level) != (MODULE, 1):
        return False
    return all(each.asname is None and each.name.isidentifier() for each in node.names)


def imported(tree: ast.Module) -> frozenset[str]:
    """The names that a role imports from the file."""
    imports = [each for each in tree.body if imports_helpers(each)]
    return frozenset(a.name for each in imports for a in each.names)  # type: ignore[attr-defined]


def without_import(tree: ast.Module) -> ast.Module:
    """A role without that statement, to be run where the functions stand already."""
    kept = [each for each in tree.body if not imports_helpers(each)]
    return ast.Module(kept, tree.type_ignores)


def helpers_of(sources: Mapping[str, str]) -> str:
    """The text of the file among those of a program; empty where its roles need none."""
    return sources.get(NAME, "")
