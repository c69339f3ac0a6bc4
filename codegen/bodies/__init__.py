"""The functions of a program as text: methods of block classes, and the loops that call them.

In: the calls of a phase (forward, backward), with runs of equal blocks as loops. Out: the lines of
methods and classes. Start: `body.py` (one function), then `classes.py` (the class of equal blocks)
and `step.py` (the loop over them). Never: the file around these functions, which `files/` prints.
"""
