"""Measured times: `partc bench` of a program, `partc calibrate` of a machine.

In: a saved program, or the ranks of this machine. Out: measured beside predicted, or a mesh.toml.
Start: `bench.py` and `calibrate.py`. Never: a pass.
"""
