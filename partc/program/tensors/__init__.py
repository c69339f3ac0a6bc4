"""The tensors of a stage: a rank's pieces, and the DTensors that a script sees over them.

In: the shards that a role lists. Out: parameters that tools of torch understand. Start:
`rank_tensors.py` for the pieces, `stage_tensors.py` for the DTensors. Never: a pass, or codegen.
"""
