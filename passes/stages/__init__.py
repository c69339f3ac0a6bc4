"""Where the stages of a pipeline begin, one graph for each, and in what order they run.

In: a local graph of all stages and the plan. Out: stage graphs, their costs, the planned step.
Start: `schedule_stages.py`; `split_stages.py` cuts the graph. Never: printed text.
"""
