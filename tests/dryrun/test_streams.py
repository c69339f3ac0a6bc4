"""Programs whose transfers race with what is computed meanwhile are refused, line by line."""

from __future__ import annotations

import pytest

from partc.api import compile
from partc.dryrun.run import dry_run
from partc.errors import CheckError
from partc.program.role import Role
from tests.dryrun.hand_program import SOURCE
from tests.texts import load_role
from tests.zoo import MODELS

STEP = """\
    @torch.no_grad()
    def step(self, x):
        y = x * self.w
        whole = torch.empty(8, 100)
        done = dist.all_gather_single(whole, y, group=self.tp, async_op=True)
        BODY
        return z.sum()
"""


def run(body: str) -> None:
    before, _, _ = SOURCE.partition("    @torch.no_grad()")
    step = STEP.replace("BODY", body.replace("; ", "\n        "))
    dry_run(Role.load(before + step, "hand.py"))


@pytest.mark.parametrize(
    "body",
    [
        "z = y * 2; done.wait(); z += whole.sum()",  # what is sent may be read
        "pieces = whole.view(2, 4, 100); done.wait(); z = pieces[0]",  # a view reads nothing
        "z = torch.zeros_like(whole); done.wait()",  # a shape is no memory
        "half = whole[:0]; z = half + 1; done.wait()",
    ],
)
def test_what_is_ordered(body: str) -> None:
    run(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("z = whole + 1; done.wait()", "reads memory of all_gather under way"),
        ("z = whole[4:].sum(); done.wait()", "reads memory of all_gather under way"),
        ("y.add_(1); done.wait(); z = whole", "writes memory of all_gather under way"),
        ("torch.add(x, x, out=whole[:4]); done.wait(); z = y", "writes memory of all_gather"),
        ("dist.all_reduce(y, group=self.tp); done.wait(); z = y", "all_reduce writes memory"),
        ("z = y", "nobody waits for all_gather"),
    ],
)
def test_what_races(body: str, message: str) -> None:
    with pytest.raises(CheckError, match=message) as caught:
        run(body)
    assert "hand.py:" in str(caught.value)


def test_no_wait_of_a_program_is_too_many() -> None:
    """Each line of a step that waits for a transfer is needed."""
    case = MODELS["llama"]()
    program = compile(case.model, "dp=2,tp=2", case.inputs, loss=case.loss, plan="fsdp+megatron")
    lines = program.source(0).splitlines(keepends=True)
    waits = [
        i for i, line in enumerate(lines) if line.partition("  #")[0].rstrip().endswith(".wait()")
    ]
    assert len(waits) > 5
    for i in waits:
        indent = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
        without = "".join([*lines[:i], f"{indent}pass\n", *lines[i + 1 :]])
        with pytest.raises(CheckError, match=r"under way|nobody waits"):
            dry_run(load_role(program, without, f"without_{i}.py"))
