"""What a step is called with and what it gives back, in the forms that scripts have.

In: the arguments of a call on a rank. Out: this rank's tensors for the text, and losses, results
and errors as the script knows them. Start: `given.py`, `step_loss.py`. Never: a pass, or codegen.
"""
