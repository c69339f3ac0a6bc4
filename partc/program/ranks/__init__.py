"""How the ranks of a job meet, compare what they must hold alike, and say who is missing.

In: what a rank is about to do. Out: nothing where all do the same, else one error on all of them.
Start: `meeting.py` before a process group, `agreement.py` in steps. Never: a pass, or codegen.
"""
