"""The texts of a program in tests: its roles alone, and edits of the file that has the words."""

from __future__ import annotations

import re
from dataclasses import replace

from partc.program import Program
from partc.program.helper_file import NAME as HELPERS
from partc.program.helper_file import helpers_of
from partc.program.role import Role


def roles_of(program: Program) -> dict[str, str]:
    """The files that ranks run, without that of the helper functions."""
    return {name: text for name, text in program.sources.items() if name != HELPERS}


def one_role(program: Program) -> tuple[str, str]:
    """The name and the text of the file that all ranks run."""
    [found] = roles_of(program).items()
    return found


def edited(program: Program, pattern: str, new: str) -> Program:
    """The program with the first match of a pattern replaced, in a role if one has it."""
    for name, text in [*roles_of(program).items(), *program.sources.items()]:
        fresh, num = re.subn(pattern, new, text, count=1)
        if num:
            return replace(program, sources={**program.sources, name: fresh})
    raise AssertionError(f"no file has {pattern}")


def everywhere(program: Program, old: str, new: str) -> Program:
    """The program with some words replaced in all of its files."""
    texts = {name: text.replace(old, new) for name, text in program.sources.items()}
    assert texts != program.sources, f"no file has {old}"
    return replace(program, sources=texts)


def with_role(program: Program, text: str, name: str = "") -> Program:
    """The program with another text of a role; without a name of the one that all ranks run."""
    return replace(program, sources={**program.sources, name or one_role(program)[0]: text})


def load_role(program: Program, text: str, name: str = "edited.py") -> Role:
    """A text in the place of a role, with the program's helpers beside it."""
    return Role.load(text, name, helpers=helpers_of(program.sources))
