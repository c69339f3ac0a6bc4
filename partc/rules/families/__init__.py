"""The sharding rules of ATen's ops: one file for each family of ops.

In: a call's shapes and arguments. Out: rules such as `rule("aten.mm", "mk,kn->mn")` in the table.
Start: `matmul.py`, then `pointwise.py`; a file adds its rules when it is imported, and importing
this package imports all files here. Never: a mesh, a plan or a pass.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
