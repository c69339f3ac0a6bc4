"""Transfers joined into buckets, started early and waited for late.

In: a local graph, or a stage's. Out: the same calls in the order in which a rank runs them, each
transfer with a start and a wait. Start: `order_step.py`; then `place_waits.py`. Never: the stages
of a pipeline.
"""
