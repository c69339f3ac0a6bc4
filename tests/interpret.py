"""Runs a joint graph on whole tensors in one process.

Tests compare passes and programs with its results.
"""

from partc.verification.run_graph import run_graph as run_graph
