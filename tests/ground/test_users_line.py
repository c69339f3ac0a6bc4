"""Warnings stand at a line of the user's, wherever in partc or a library they are given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import partc
from partc.users_line import is_users, warn

LIBRARY = str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")
PACKAGE = "/usr/lib/python3/dist-packages/transformers/trainer.py"
OURS = str(Path(partc.__file__).parent / "api.py")
SCRIPT = "/home/ada/train.py"


def called_from(file: str, inner: Callable[[], object], name: str) -> Callable[[], object]:
    """A function in a file of a module of this name, which calls another on its second line."""
    scope: dict[str, Any] = {"inner": inner, "__name__": name}
    exec(compile("def call():\n    inner()", file, "exec"), scope)
    made: Callable[[], object] = scope["call"]
    return made


def warned(*files: str, name: str = "some", aside: bool = False) -> tuple[str, int]:
    """Where a warning stands that is given below frames of these files, the outermost first."""
    call: Callable[[], object] = partial(warn, "text")
    for file in reversed(files):
        call = called_from(file, call, name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread = Thread(target=call)
        thread.start() if aside else call()
        thread.join() if aside else None
    [each] = told
    assert each.category is UserWarning
    return each.filename, each.lineno


@pytest.mark.parametrize("files", [(OURS,), (LIBRARY, OURS), (PACKAGE, OURS, LIBRARY, OURS)])
def test_frames_of_partc_and_of_libraries_are_skipped(files: tuple[str, ...]) -> None:
    assert warned(SCRIPT, *files) == (SCRIPT, 2)


def test_the_innermost_line_of_the_users_counts() -> None:
    assert warned(SCRIPT, LIBRARY, "/home/ada/model.py", OURS) == ("/home/ada/model.py", 2)


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<ipython-input-1-0123>"])
def test_a_cell_of_a_notebook_is_the_users(file: str) -> None:
    assert warned(file, OURS, name="__main__") == (file, 2)


def test_where_no_line_of_the_users_runs_it_is_that_which_warns() -> None:
    assert warned(LIBRARY, OURS, aside=True) == (OURS, 2)


def test_a_file_beside_partc_whose_name_begins_like_it_is_the_users() -> None:
    assert is_users(str(Path(OURS).parents[1] / "partc_train.py"))
    assert not is_users(OURS)
