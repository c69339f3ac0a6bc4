"""Whole files: one for each role of a step or of a pipeline.

In: scheduled graphs, a schedule, a plan. Out: the text of every role's file. Start: `emit.py` for
one stage, `pipeline.py` for several. Never: a decision; the plan and the graphs have them all.
"""
