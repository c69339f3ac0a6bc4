"""The search for shardings over `tp`, written as a problem for the solver.

In: a joint graph and what of it is pinned. Out: entries of a plan. Start: `tensor_shardings.py`;
`sharding_problem.py` makes the tables. Never: pipelines, or the seconds of a whole step.
"""
