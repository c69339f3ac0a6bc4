"""What a call, a transfer and a step take: FLOPs, bytes, memory, seconds.

In: a graph, and for seconds the machines under its mesh. Out: numbers with units, and `StepEvents`:
calls and transfers of a step, as plain data. Start: `flops.py`, `bytes.py`, `memory.py` count a
graph; `roofline.py` times a call; `step_walk.py` a step. Never: a pass or printed text.
"""
