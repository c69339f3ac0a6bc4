"""Whether what a person sees of a program is what the program does: ``python -m tests.surface``."""
