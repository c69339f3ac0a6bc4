"""What a program will hold in memory, counted before any text is printed.

In: scheduled graphs, a schedule's actions. Out: the peak of each rank (`Memory`). Start: `step.py`
for a step without pipeline stages, `ranks.py` for a pipeline. The account goes through the calls as
the program will make them: `function.py` has the statements of a function and its `del` lines,
`execution.py` the loops over blocks, `transfers.py` what buckets and gathered weights hold. Never:
text, and no tensor, not even a fake one.
"""
