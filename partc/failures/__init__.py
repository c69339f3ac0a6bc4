"""A training run that meets failures: what watches its ranks, and what refuses a bad step.

In: the processes of a launcher, or a stage and its steps. Out: a rank that stands still is ended
by name, a step with NaN is left out on all ranks alike. Start: `watchdog.py`, `guard.py`. Never: a
pass, or codegen.
"""
