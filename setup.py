"""Two conditions of every build, beside pyproject.toml: all of partc is there, nothing else is."""

import runpy
from tempfile import TemporaryDirectory

from setuptools import setup

if half := runpy.run_path("partc/checkout.py")["refusal"]("partc"):
    raise SystemExit(half)  # a wheel would lack two thirds of the compiler and exit with 0

with TemporaryDirectory() as fresh:  # build/ of an earlier build may hold modules that are gone
    setup(options={"build": {"build_base": fresh}})
