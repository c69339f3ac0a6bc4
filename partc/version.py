"""The package's version: pyproject.toml and the headers of printed programs read it."""

__version__ = "0.1.0"
