"""Scheduled graphs to Python text; here the words that all its rooms use: lines, and what is safe.

In: scheduled graphs, a schedule, a plan. Out: the source of every role. Start: ``files/emit.py``;
``text.py`` and ``safety.py`` here. Never: a decision, or a number of a machine.
"""

if __name__ != "partc.codegen":  # a second import under another name would register twice
    raise ImportError("import partc.codegen, not codegen")
