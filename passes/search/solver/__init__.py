"""Minimises sums of small cost tables, exactly or within a bound.

In: a `Problem`: variables with a few values each, tables of costs, limits. Out: a choice and a
proof of how good it is. Start: `problem.py`, then `solve.py`; one method a file. Never: a graph, a
plan or torch.
"""
