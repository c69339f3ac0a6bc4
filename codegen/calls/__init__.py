"""One call or one transfer of a graph as Python text: names, arguments, torch function, comments.

In: a node of a scheduled graph. Out: the lines of text that compute this node. Start:
`expressions.py`; `spell.py` says which torch function an ATen op is written as, `names.py` how
values are called. Never: whole functions or loops, which `bodies/` makes of these lines.
"""
