"""One call or one transfer as text: names, arguments, spelling, comments.

In: a node of a scheduled graph. Out: lines. Start: `expressions.py`; `spell.py` says which torch
function an ATen op is written as. Never: whole functions, or how often a line runs.
"""
