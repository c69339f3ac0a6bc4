"""Minimisation of a sum of small cost tables over discrete variables, exactly or with a bound.

In: a `Problem`: variables with a few choices each, and tables of what choices cost together. Out:
one choice per variable, its cost, and a lower bound on the least cost. Start: `problem.py`, then
`solve.py`; each method has a file. Never: a graph, a plan or torch.
"""
