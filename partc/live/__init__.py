"""A run that is going on or over, read from the files that it writes.

In: the folder of a run, with lines of JSON, checkpoints and perhaps a program. Out: what a terminal
shows, or a page. Start: `run_files.py` reads, `run_facts.py` judges, `run_text.py` and
`run_page.py` show. Never: torch, or a file of the run that is written.
"""
