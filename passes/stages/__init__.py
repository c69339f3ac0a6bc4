"""Pipeline parallelism: where each stage begins, one graph per stage, and the schedule of all.

In: the local graph of all stages together, and the plan. Out: one graph per stage, its cost, and
the simulated step. Start: `schedule_stages.py`; `split_stages.py` splits the graph. Never: printed
text.
"""
