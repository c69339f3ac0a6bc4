"""Passes turn a Graph into a Graph, one pass per file."""

if __name__ != "partc.passes":  # a second import under another name would register each pass twice
    raise ImportError("import partc.passes, not passes")
