"""Proofs that one rank's graph is right: shapes, layouts, sums, waits.

In: a local graph, as passes left it. Out: nothing, or a CheckError that names the call. Start:
`local_graph.py`, function `check`. Never: anything of `partc/passes`: a proof that shared code
with what it proves would share its mistakes.
"""
