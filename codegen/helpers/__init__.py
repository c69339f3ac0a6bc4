"""Helper functions that are printed into programs as they stand here, such as ``gather_weights``.

In: the names of helper functions that a program calls. Out: the source of these and of the helpers
that they call. Start: `needed.py`; `printed.py`, `links.py`, `messages.py` and `attention.py` hold
the functions. Never: a graph; a helper function imports only torch, as programs do.
"""
