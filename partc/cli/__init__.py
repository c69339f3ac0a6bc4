"""The command line: `partc compile | explain | simulate | calibrate | verify | check | diff`.

In: words. Out: an exit code, and what commands print. Start: `main.py` has the parsers,
`commands.py` what they call. Never: imported by any other room; torch only once a command needs it.
"""
