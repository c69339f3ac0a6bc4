"""Overlap of collectives with computing: buckets, early starts, late waits, a block in pieces.

In: the local graph of a step or of one pipeline stage. Out: its calls in the order in which a rank
runs them, with a start and a wait for each collective. Start: `order_step.py` for a step without
stages; then `place_waits.py`. Never: which stages a pipeline has.
"""
