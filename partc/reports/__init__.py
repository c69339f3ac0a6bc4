"""Tables, pictures and explanations of a program.

In: a program with its tapes and its plan. Out: text, SVG, JSON. Start: `cost.py` and
`explanation.py`. Never: a pass; nothing is decided here.
"""
