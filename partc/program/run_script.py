"""The text of ``run.py``, which trains a saved program with nothing but torch installed."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from importlib import resources

import jinja2

from partc.plan.mesh import Mesh
from partc.program.ranks import meeting

STEPS, LEAST_S, MOST_S = 100, 300, 1800  # predicted steps, and bounds: what ranks may wait


def run_script(
    model: str,
    mesh: Mesh,
    *,
    compiles: bool,
    extras: bool,
    decided: tuple[str, ...],
    backend: str,
    row_dims: Sequence[int | None] = (),
    is_beside: bool = False,
) -> str:
    """The text for one program.

    ``model``: its name as it may stand in a docstring; ``backend``: that of which the program has
    the text, "" where it has none. ``row_dims``: where islands compute unequal numbers of
    microbatches, the dim of each input's rows. ``is_beside``: whether the optimizer is that of a
    server beside the program, which the script does not start.
    """
    template = resources.files("partc.program").joinpath("templates/run.py.j2").read_text()
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )  # the output is Python source, so there is nothing to escape for HTML
    return environment.from_string(template).render(
        model=model, mesh=mesh, num_ranks=mesh.num_ranks, compiles=compiles, extras=extras,
        decided=list(decided), backend=backend, row_dims=list(row_dims), is_beside=is_beside,
        meeting=_meeting_text(), steps=STEPS, most=MOST_S,
        least=MOST_S if compiles else LEAST_S,  # torch.compile works in the first step
    )  # fmt: skip


def _meeting_text() -> str:
    """What ``meeting.py`` says behind its imports."""
    text = inspect.getsource(meeting)
    return textwrap.dedent(text[text.index("T = TypeVar") :]).rstrip()
