"""Damage whatever partc reads, send it what strangers might, kill it, and tell what it does.

``python -m tests.damage KIND --seed S --cases N`` makes N cases of a kind from a seed:
``artefacts`` (a saved file that was damaged), ``hostile`` (input made to do harm), ``kills``
(SIGKILL in the middle of a save, a compile, a checkpoint or a bench). ``--only N`` runs one again.

Each case runs in a process of its own, forked from one that has imported and built everything. Its
working folder is all that it may touch, and it has a limit of time and of memory.
"""
