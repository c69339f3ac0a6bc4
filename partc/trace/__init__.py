"""Model, loss and batch to the joint graph of forward and backward, as recorded.

In: an `nn.Module`, example inputs, a loss. Out: a `Graph` of ATen ops, some of them in place, that
know their module and source line. Start: `record.py`, class `Source`; `capture.py` runs the step on
fake tensors. Never: a pass; `partc/lowering.py` says what follows.
"""
