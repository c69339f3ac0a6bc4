"""A program against the model that it was compiled from, in threads or processes.

In: a program, the model, a batch. Out: the largest difference of every kind of result. Start:
`verification.py`, function `verify`. Never: a pass or a graph: it runs what was printed.
"""
