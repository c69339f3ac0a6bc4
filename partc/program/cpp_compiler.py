"""Check that torch.compile can work on this machine: its CPU kernels need a C++ compiler."""

from __future__ import annotations

import os
import shutil
import sys

from partc.errors import RunError
from partc.program.role import Role


def check_compiler(role: Role) -> None:
    """RunError if a role uses torch.compile, and there is no C++ compiler."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    disabled = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    if role.compiles and not disabled and shutil.which(name) is None:
        raise RunError(
            where="torch.compile",
            what=f"there is no C++ compiler {name!r}",
            why='the program was compiled with compile="inductor", whose kernels are C++',
            do="Install one, name yours in CXX, or set TORCH_COMPILE_DISABLE=1 to run it eagerly.",
        )
