"""The files with which a cluster starts a saved program: `partc launch build/ --emit slurm`.

In: a saved program, and what the user says of the cluster. Out: short text files, by name. Start:
`job.py` says what follows from the program, `targets.py` which files there are, `templates/` has
one for each. Never: a start of a job, or of anything else; the files are the user's to run.
"""
