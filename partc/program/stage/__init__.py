"""A rank's `Stage`: the nn.Module that runs the programs of a model over one set of weights.

In: a `Program`, loaded on this rank. Out: a module with the model's names, whose calls are steps.
Start: `runtime.py`, class `Stage`; `family.py` has its programs. Never: a pass, or codegen.
"""
