"""Rewrites of the traced graph into fewer kinds of calls, which sharding rules and passes know.

In: the training step of one device as traced. Out: a graph of the same step without in-place ops,
in canonical calls (`sum` and `div` for `mean`). Start: `canonicalize.py` lists the passes in order.
Never: a mesh or a plan, as no tensor is sharded yet.
"""
