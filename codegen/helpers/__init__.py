"""Code that is printed into programs as it stands, and which of it a program needs.

In: the names of functions that a program calls. Out: their source. Start: `needed.py`;
`printed.py` holds the functions. Never: a graph; these functions import only torch.
"""
