"""Check the text of a saved program as it stands, edited or not, from its folder alone.

In: a Program whose sources nobody has checked. Out: an `Audit`, which says what was checked, or an
error with file and line. Start: `audit.py`. Never: anything that makes or prints programs; a check
that shared code with these would share their mistakes.
"""
