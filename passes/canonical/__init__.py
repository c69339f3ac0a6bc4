"""Recorded graph to canonical joint graph: the few forms that rules, passes and printing know.

In: the graph of one device as recorded. Out: the same graph without in-place ops, in fewer kinds of
calls. Start: `canonicalize.py`, the ordered list. Never: a mesh or a plan: nothing is cut here yet.
"""
