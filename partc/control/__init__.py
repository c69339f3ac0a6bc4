"""A controller: it watches the steps of a run, and another plan sends gradients where that pays.

In: a stage of a program with variants. Out: which variant runs next, the same on every rank, and a
log of every switch. Start: `controller.py`; `meter.py` measures a step, `prices.py` predicts what
each variant takes now, `decide.py` chooses, `left_over.py` ends a variant. Never: a graph, or a
decision that not all ranks make from the same numbers.
"""

from partc.control.controller import Controller as Controller
from partc.control.variants import with_variants as with_variants
