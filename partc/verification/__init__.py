"""Run a program on all its ranks, and compare the results with the single-device model's.

In: a program, the model, a batch. Out: a `Verification` with the error of every tensor. Start:
`verification.py`, function `verify`. Never: a pass or a graph: the printed text is what runs.
"""
