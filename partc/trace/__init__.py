"""Record a model, its loss and a batch as one joint graph of forward and backward.

In: an `nn.Module`, example inputs, a loss. Out: a `Graph` of ATen ops, some of them in place, each
with its module path and source line. Start: `record.py`, class `Source`; `capture.py` runs the step
on fake tensors. Never: a pass; `partc/lowering.py` has those, in order.
"""
