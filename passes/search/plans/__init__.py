"""`plan="auto"`: candidates, what each takes, and the plan that is chosen.

In: a joint graph and machines. Out: the best plans in order, with reasons. Start:
`choose_plan.py`; `estimate.py` prices a candidate from the laws that `profile.py` read off a graph.
Never: printed text.
"""
