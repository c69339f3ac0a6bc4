"""What becomes of types of Hugging Face models: ``python -m tests.hub [TYPE ...]`` prints a table.

Each is made from its default configuration with two layers, on the meta device, and compiled under
two layouts; nothing is downloaded or run.
"""
