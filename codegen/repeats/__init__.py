"""Which blocks do the same, so that one class is printed for all of them.

In: a scheduled graph. Out: runs of equal blocks, and what differs from block to block. Start:
`blocks.py`; `equal.py` compares two. Never: text.
"""
