"""From the joint graph of the whole model to the local graph of one rank, with its collectives.

In: a canonical joint graph and a plan. Out: the plan with every entry filled in, a sharding for
every value, the local graph. Start: `propagate.py` chooses the shardings, `insert_collectives.py`
writes the local graph. Never: the schedule of a pipeline, or where in the program a collective
begins and is waited for.
"""
