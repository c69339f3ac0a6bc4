"""Show a program's cost, its predicted step and its choices as tables, pictures and traces.

In: a program with its plan and its `StepEvents`. Out: text, SVG, JSON. Start: `cost.py` and
`explanation.py`. Never: a change of the program; the search is only asked for its estimates.
"""
