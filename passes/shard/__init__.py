"""Joint graph and plan to one rank's local graph with its collectives.

In: a canonical graph and a plan. Out: the complete plan, a sharding for every value, the local
graph. Start: `propagate.py` chooses shardings, `insert_collectives.py` writes the local graph.
Never: the schedule of a pipeline, or where a transfer starts and is waited for.
"""
