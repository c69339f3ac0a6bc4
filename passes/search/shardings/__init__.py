"""The search for the fastest shardings over `tp`, written as a problem for the solver.

In: a joint graph and the entries of a plan that the user pins. Out: further entries of that plan.
Start: `tensor_shardings.py`; `sharding_problem.py` makes the cost tables. Never: pipelines, or the
seconds of a whole step.
"""
