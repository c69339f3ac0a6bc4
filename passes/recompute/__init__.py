"""Recomputation (activation checkpointing): forward values that the backward computes again.

In: a local graph and the plan's `recompute`. Out: the graph with copies of forward calls in its
backward. Start: `choose.py`; `copy_forward.py` writes the copies. Never: how fast a machine is.
"""
