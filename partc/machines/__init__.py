"""The machines: devices, the links between them, and the time of a collective on these links.

In: a machine's data sheet, from a TOML file here or of the user. Out: a `Topology` (devices and
levels of links), and formulas for the seconds of a collective.
Start: `topology.py`; then `collective_formulas.py`. Never: a mesh, a plan or a graph.
"""
