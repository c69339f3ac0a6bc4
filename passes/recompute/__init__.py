"""What the backward computes again instead of keeping it from the forward.

In: a local graph and the plan's `recompute`. Out: the graph with copies of forward calls in its
backward. Start: `choose.py`; `min_cut.py` finds what to keep. Never: seconds of a machine.
"""
