"""Passes: one rewrite of a graph, or one decision about it, per file, in rooms by what they do.

``partc/lowering.py`` has the table of them in the order in which they run.
"""

if __name__ != "partc.passes":  # a second import under another name would register each pass twice
    raise ImportError("import partc.passes, not passes")
