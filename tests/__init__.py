"""Tests, in folders with the names of the rooms that they test; ``whole/`` tests all rooms at once.

To write a test, look here first for what it needs:

- a model: ``zoo`` (tiny ones of twenty families), ``pipelines`` (a toy for stages), ``deep``,
  ``towers`` and ``llamas`` (large ones without memory, for searches);
- a graph of one rank, written by hand: ``build``; the same run on all ranks: ``simulate``;
- a program written by hand: ``example_program``; a program's peak memory: ``dry_runs``;
- eager PyTorch to compare with: ``compare``, ``interpret``; measured memory: ``allocations``;
- a mesh with slow links between machines: ``pairs``; a time-out: ``patience``;
- text to compare with a file: the fixture ``golden`` in ``conftest``.

A test file's name is unique in all folders: its golden files stand in ``golden/<that name>/``.
"""
