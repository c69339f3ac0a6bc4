"""The model of a script beside its stage: what it may still do, and what is refused in words.

In: the model that was compiled. Out: modules that look like its own, and refusals of changes that a
program would ignore. Start: `raw_model.py`, `user_modules.py`. Never: a pass, or codegen.
"""
