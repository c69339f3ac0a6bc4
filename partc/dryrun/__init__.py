"""Run a printed program line by line on tensors without data, to find its peak of memory.

In: a role's source. Out: the peak in bytes, and the source line of the peak. Start: `run.py`;
`turns.py` replaces most microbatches of a long schedule. Never: the graph the source is made from.
"""
