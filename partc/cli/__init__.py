"""The command `partc`: one file for the words of a command line, others for what commands do.

In: the words of a command line. Out: printed results, an exit code. Start: `main.py`; `options.py`
has the parsers, `commands.py` and the files beside it the commands. Never:
torch before a command needs it; no other room imports this one.
"""
