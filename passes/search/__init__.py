"""Exact and bounded minimisation of sums of small cost tables; it knows nothing of graphs or plans.

`problem.py` says what is minimised, `solve.py` is the way in; between them one method per file.
"""
