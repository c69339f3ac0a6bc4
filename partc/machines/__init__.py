"""Devices and the links between them, and what a collective takes on them.

In: a machine's figures, from a file here or a user's own. Out: a `Topology`, seconds of transfers.
Start: `topology.py`; then `collective_formulas.py`. Never: a mesh, a plan or a graph.
"""
