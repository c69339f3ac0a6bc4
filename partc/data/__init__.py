"""Which rows of a dataset a rank reads, in which order, and loaders that read them.

In: the plan's cuts of the batch, a dataset. Out: a sampler or a DataLoader of one rank.
Start: `share.py` and `order.py`; `loader.py` has the workers. Never: a graph, a pass or a program.
"""
