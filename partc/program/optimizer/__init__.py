"""Optimizers over a stage's parameters: steps on pieces or whole tensors, clipping, states.

In: an optimizer of torch over a stage's DTensors. Out: the steps and states of one device. Start:
`optimizers.py`; `whole_states.py` for state dicts. Never: a pass, or codegen.
"""
