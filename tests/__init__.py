"""Tests, each in the folder of the room that it tests; ``whole/`` holds what crosses all rooms.

What several folders use stands beside this file: models (``zoo``, ``pipelines``), graphs written by
hand (``build``), a program written by hand (``example_program``), comparisons with eager PyTorch.
Names of test files are unique, since golden files stand in folders of these names.
"""
