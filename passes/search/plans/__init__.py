"""`plan="auto"`: candidate plans, an estimate of time and memory for each, and the best ones.

In: a joint graph, the machines, and the user's pins. Out: the best plans in order, with reasons.
Start: `choose_plan.py`; `estimate.py` estimates a candidate from the scaling model that
`read_scaling_model.py` reads off one partitioned graph. Never: printed text.
"""
