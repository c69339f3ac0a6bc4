"""`partc doctor`: whether these ranks can run a program, as fast as was predicted.

In: this process, or the ranks of torchrun, and perhaps a saved program. Out: findings, each with
what to do. Start: `doctor.py`; `here.py` and `variables.py` look at one rank, `between.py` and
`links.py` at all together. Never: a change of anything that it looks at.
"""
