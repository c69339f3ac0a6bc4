"""Which blocks of a model compute the same, so that one class and a loop print all of them.

In: a scheduled graph. Out: runs of equal blocks (`Run`), and for each value that a block reads from
outside, where every iteration of the loop finds that value (`Slot`). Start: `blocks.py`; `equal.py`
compares two blocks, `kin.py` finds those that differ in sizes alone, `slots.py` makes the slots.
Never: text; `bodies/` prints the classes.
"""
