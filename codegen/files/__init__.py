"""Prints whole files: one for each role, a role being the ranks that run the same text.

In: scheduled graphs, a pipeline schedule, a plan. Out: the text of every role's file. Start:
`emit.py` for a step without pipeline stages, `pipeline.py` for a pipeline. Never: a decision; all
of them stand in the plan and in the graphs.
"""
