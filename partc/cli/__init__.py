"""The command `partc`: compile, passes, explain, simulate, bench, calibrate, verify, check, diff,
launch, doctor.

In: the words of a command line. Out: printed results, an exit code. Start: `main.py`; `options.py`
has the parsers, `commands.py` the commands. Never: torch before a command needs it; no other room
imports this one.
"""
