"""Checkpoints: saved by all ranks, committed as a whole, loaded on any mesh.

In: a stage, its optimizer, its loader. Out: a folder of safetensors files and a list of them, and
back. Start: `checkpoint.py`. Never: pickle, a pass, or codegen.
"""
