"""The named schedules, one per file, each with its paper and its bubble formula.

In: the numbers of pipeline ranks, of microbatches and of stages per rank. Out: every rank's order
of forwards and backwards. Start: `gpipe.py`, the simplest; a file here registers itself by
`@schedule("name")`. Never: costs, a graph or torch.
"""

from importlib import import_module
from pkgutil import iter_modules

# As messages list them, from simple to involved; a file that is not named here comes behind.
_SHOWN = (
    "gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "v_half",
    "v_min", "dualpipe_v", "forward_only",
)  # fmt: skip

for _name in dict.fromkeys((*_SHOWN, *(module.name for module in iter_modules(__path__)))):
    import_module(f"{__name__}.{_name}")
