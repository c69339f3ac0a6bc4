"""Prints the program of each rank: scheduled graphs become readable Python that imports only torch.

In: scheduled graphs, a pipeline schedule, a plan. Out: the source of one file for each role, a
role being the ranks that run the same text. Start: ``files/emit.py``; this folder itself has
``text.py`` (lines that fit the page) and ``safety.py`` (what a program may do). Never: a decision,
or a figure of a machine: both stand in the plan and the graphs.
"""

if __name__ != "partc.codegen":  # a second import under another name would register twice
    raise ImportError("import partc.codegen, not codegen")
