"""What a pass is, and how passes run; the passes themselves stand in rooms by what they do.

In: a `State`, a step on its way from a model to programs. Out: the same state, one pass further.
Start: `runner.py`; `partc/lowering.py` has the table of all passes in order, `own_passes.py` those
of a user's package. Never: a room of passes.
"""

if __name__ != "partc.passes":  # a second import under another name would register each pass twice
    raise ImportError("import partc.passes, not passes")
