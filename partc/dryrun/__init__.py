"""A printed program run line by line on tensors without data: what it holds at its worst.

In: a role's source. Out: its peak and the line where that stands. Start: `run.py`; `turns.py`
stands in for the microbatches of a long schedule. Never: the graph that the source came from.
"""
