"""Prove that one rank's graph is right: shapes, layouts, unfinished sums, waits.

In: a local graph (one rank's shapes), as passes made it. Out: nothing, or a CheckError that names
the wrong call. Start: `local_graph.py`, function `check`. Never: anything of `partc/passes`: a
check that shared code with the passes would share their mistakes.
"""
