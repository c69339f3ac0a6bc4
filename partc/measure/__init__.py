"""Measure times: `partc bench` those of a program's steps, `partc calibrate` those of a machine.

In: a saved program, or this machine's ranks. Out: measured beside predicted times, or a mesh.toml.
Start: `bench.py` and `calibrate.py`. Never: a pass; measured times change no program.
"""
