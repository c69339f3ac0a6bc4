"""Functions, block classes and loops as text.

In: the calls of a phase and which of them repeat. Out: the lines of methods and classes. Start:
`body.py`, then `classes.py` and `step.py`. Never: the file around them.
"""
