"""A schedule that is a user's own function: its programs replay where nobody has the function,
a package that is installed is found, and what is wrong with a function or its options is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.errors import PlanError, UsageError
from partc.plan import Plan
from partc.schedules import make
from partc.schedules.actions import Action
from partc.schedules.blocks import Orders, numbered
from partc.schedules.named import NAMES, schedule
from partc.verification.verification import verify
from tests.forked_scripts import run_ranks
from tests.installed import Folder
from tests.pipelines import compiled, toy

WAVES = """
from partc.schedules.blocks import numbered
from partc.schedules.named import schedule


@schedule("waves")
def orders(ranks, microbatches, chunks=1):
    ahead = [min(microbatches, 2 * (ranks - rank) - 1) for rank in range(ranks)]
    return [
        numbered([(rank, kind) for kind in "F" * n + "BF" * (microbatches - n) + "B" * n])
        for rank, n in enumerate(ahead)
    ]
"""
IMPORTS = "import waves\nfrom train import setup\n"
COMPILE = ("--mesh", "pp=2", "--plan", "ddp", "--microbatches", "4", "--schedule", "waves")
POINTS = ("blocks.1",)
Function = Callable[[int, int, int], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.write(waves=WAVES, with_waves=IMPORTS)
    return made


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    """The schedules as they were, once a test is over."""
    before = dict(NAMES.items())
    yield
    NAMES._entries.clear()
    NAMES._entries.update(before)


def turns(ranks: int, microbatches: int, chunks: int) -> Orders:
    """All forwards of a rank, then all backwards."""
    passes = "F" * microbatches + "B" * microbatches
    return [numbered([(rank, kind) for kind in passes]) for rank in range(ranks)]


def v_turns(ranks: int, microbatches: int, chunks: int) -> Orders:
    """One microbatch after the other, through the ranks and back, with split backwards."""
    rows = []
    for rank in range(ranks):
        first, second = rank, 2 * ranks - 1 - rank
        one = [(first, "F"), (second, "F"), (second, "I"), (first, "I")]
        rows.append(numbered([*one, (second, "W"), (first, "W")] * microbatches))
    return rows


# replaying ----------------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_a_program_replays_in_a_process_that_has_not_its_schedule(folder: Folder) -> None:
    folder.partc("compile", "with_waves:setup", *COMPILE, "--out", "build")
    (folder.path / "waves.py").unlink()
    plan = Plan.load(folder.path / "build" / "plan.toml")
    assert (plan.schedule, plan.order.splitlines()[1]) == (
        "waves",
        "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3",
    )
    assert "whole" in folder.partc("check", "build")
    folder.partc("verify", "build", "--model", "train:setup")
    assert "waves: 2 ranks, 4 microbatches" in folder.partc("simulate", "build")
    again = ("--mesh", "pp=2", "--plan", "build/plan.toml", "--out", "again")
    folder.partc("compile", "train:setup", *again)
    assert folder.texts("again") == folder.texts("build")
    ran = run_ranks(folder.path / "build" / "run.py", "--device", "cpu")
    assert any("step 2" in each.text for each in ran), ran


@pytest.mark.exhaustive
def test_stages_in_a_v_and_split_backwards_replay_from_rows() -> None:
    case = toy()
    schedule("vs", chunks=(2, 2), split=True, placement="v")(v_turns)
    plan = Plan(preset="ddp", schedule="vs", microbatches=3, virtual_stages=2)
    program = partc.compile(case.step, "pp=2", plan=plan)
    verify(program, case.model, case.inputs, case.loss).check(1e-9)
    del NAMES._entries["vs"]
    again = partc.compile(case.step, "pp=2", plan=program.plan)
    assert (again.plan, again.sources) == (program.plan, program.sources)


@pytest.mark.exhaustive
def test_only_a_schedule_of_ones_own_stands_in_the_plan_row_by_row() -> None:
    ours = compiled(toy(), "pp=2", Plan(preset="ddp", stages=POINTS), "gpipe", 3)
    assert Plan.parse(ours.plan).order == ""
    schedule("turns")(turns)
    own = compiled(toy(), "pp=2", Plan(preset="ddp", stages=POINTS), "turns", 3)
    assert Plan.parse(own.plan).order == own.schedule == ours.schedule


def test_rows_are_made_anew_for_another_number_of_microbatches() -> None:
    case = toy()
    schedule("turns")(turns)
    first = partc.compile(
        case.step, "pp=2", plan=Plan(preset="ddp", stages=POINTS), schedule="turns", microbatches=3
    )
    more = partc.compile(case.step, "pp=2", plan=first.plan, microbatches=4)
    assert "0F3" in Plan.parse(more.plan).order
    del NAMES._entries["turns"]
    with pytest.raises(PlanError, match=r"import the module whose @schedule\('turns'\) makes it"):
        partc.compile(case.step, "pp=2", plan=first.plan, microbatches=4)


def test_rows_of_other_counts_say_how_they_are_made_anew() -> None:
    plan = Plan(preset="ddp", schedule="turns", order="0F0,0B0\n1F0,1B0\n2F0,2B0\n")
    with pytest.raises(PlanError, match="Delete the plan's order"):
        partc.compile(toy().step, "pp=2", plan=plan)
    with pytest.raises(PlanError, match="Delete the order, or give its name"):
        partc.compile(toy().step, "pp=2", plan=plan.changed(schedule="1f1b"))


def test_a_name_that_no_rank_runs_is_told_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    case = toy()
    schedule("turns")(turns)
    with pytest.warns(UserWarning, match="schedule says nothing here: the mesh pp=1 has one rank"):
        program = partc.compile(case.step, "pp=1", plan="ddp", schedule="turns")
    assert Plan.parse(program.plan).schedule == ""
    program = partc.compile(case.step, "dp=2", plan="auto", schedule="turns", microbatches=1)
    assert Plan.parse(program.plan).schedule == ""
    assert "schedule = 'turns' says nothing here: the search took the mesh dp=2" in caplog.text


# packages -----------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", ["waves", "waves:orders"])
def test_a_schedule_of_an_installed_package_is_found(folder: Folder, entry: str) -> None:
    folder.install("partc.schedules", entry)
    folder.partc("compile", "train:setup", *COMPILE, "--out", "build")
    assert Plan.load(folder.path / "build" / "plan.toml").schedule == "waves"


def test_without_a_package_a_message_says_how_it_is_found(folder: Folder) -> None:
    error = folder.refused("compile", "train:setup", *COMPILE, "--out", "build")
    assert "import the module whose @schedule('waves') makes it" in error["do"]
    assert "entry point of partc.schedules" in error["do"]
    folder.write(broken="1 / 0")
    folder.install("partc.schedules", "broken")
    error = folder.refused("compile", "train:setup", *COMPILE, "--out", "build")
    assert error["where"] == "schedule theirs"
    assert "ZeroDivisionError" in error["why"]
    ours = (*COMPILE[:-1], "gpipe")
    folder.partc("compile", "train:setup", *ours, "--out", "build")  # and nobody else is stopped


@pytest.mark.exhaustive
def test_a_rule_of_an_installed_package_is_found(folder: Folder) -> None:
    folder.write(
        ruled="from partc.rules.table import rule\n"
        'rule("aten._cdist_forward", "...n!k,...m!k->...nm")\n'
        'rule("aten._cdist_backward", "...nm,...nk,...mk,...nm->...nk")\n',
        far="import torch\nfrom train import setup as begin\n"
        "def distances(model, x, y):\n    return torch.cdist(model(x), y).mean()\n"
        "def setup():\n    return (*begin()[:2], distances)\n",
    )
    words = ("compile", "far:setup", "--mesh", "dp=2", "--plan", "ddp")
    folder.partc(*words, "--out", "without")
    folder.install("partc.rules", "ruled")
    folder.partc(*words, "--out", "with")
    before, after = (folder.texts(each)["stage0.py"] for each in ("without", "with"))
    assert ".contiguous()" in before  # an op without a rule gets operands as they were traced
    assert ".contiguous()" not in after


# what is wrong with a function --------------------------------------------------------------------
def extended(ranks: int, microbatches: int, chunks: int) -> Any:
    return [action for row in turns(ranks, microbatches, chunks) for action in row]


FUNCTIONS: dict[str, tuple[Function, tuple[str, ...]]] = {
    "nothing": (lambda r, m, c: None, ("it gives None", "return rows")),
    "rows run together": (
        extended, ("row 0 is the action 0F0, and no row", "rows.append(row), and not rows.extend"),
    ),
    "texts for rows": (lambda r, m, c: ["0F0", "1F0"], ("row 0 is '0F0', and no row", "numbered")),
    "a row by its rank": (
        lambda r, m, c: dict(enumerate(turns(r, m, c))), ("row 0 is 0, and no row",),
    ),
    "one row too few": (
        lambda r, m, c: turns(1, m, c),
        ("1 row for 2 ranks", "is called with (ranks, microbatches, chunks), here (2, 3, 1)"),
    ),
    "ranks and microbatches swapped": (
        lambda m, r, c: turns(r, m, c), ("3 rows for 2 ranks", "(ranks, microbatches, chunks)"),
    ),
    "microbatches and chunks swapped": (
        lambda r, c, m: turns(r, m, c), ("0F1", "(ranks, microbatches, chunks), here (2, 3, 1)"),
    ),
    "stages that there are not": (
        lambda r, m, c: [*turns(3, m, c)[1:]], ("schedule mine", "(ranks, microbatches, chunks)"),
    ),
    "backwards first": (
        lambda r, m, c: [tuple(reversed(row)) for row in turns(r, m, c)],
        ("schedule mine", "it stands before an action of its own rank that it needs", "0F2"),
    ),
    "a number below 0": (lambda r, m, c: [[Action(-1, "F", 0)], []], ("-1F0 is no action",)),
    "parts that are not said": (
        lambda r, m, c: [numbered([(s, k) for k in "FIW"]) for s in range(r)],
        ("0I0 is a part of a backward", "split=True"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", FUNCTIONS)
def test_what_a_function_gives_is_named(mistake: str) -> None:
    function, says = FUNCTIONS[mistake]
    schedule("mine")(function)
    with pytest.raises(PlanError) as caught:
        make("mine", ranks=2, microbatches=3)
    assert all(each in str(caught.value) for each in says), str(caught.value)
    assert all(caught.value.as_dict().values())


# what is wrong with its options -------------------------------------------------------------------
ANY: Any = turns
OPTIONS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "no name": (lambda: schedule(ANY), ("it must be a text", '@schedule("my-schedule")')),
    "a name of partc's": (lambda: schedule("auto"), ("'auto' is made for the costs",)),
    "a file's name": (lambda: schedule("own.csv"), ("what ends in .csv is a file",)),
    "by place": (lambda: schedule("mine", ANY), ("schedule()",)),  # type: ignore[call-arg]
    "another option": (lambda: schedule("mine", splits=True), ("'splits'", "mean 'split'")),
    "a number for a pair": (lambda: schedule("mine", chunks=2), ("it is 2", "chunks=(2, 2)")),
    "a text for a pair": (lambda: schedule("mine", chunks="2"), ("it is '2'", "a pair")),
    "no stages": (lambda: schedule("mine", chunks=(0, 1)), ("it is (0, 1)",)),
    "most before least": (lambda: schedule("mine", chunks=(2, 1)), ("it is (2, 1)",)),
    "another placement": (lambda: schedule("mine", placement="vee"), ("it is 'vee'", '"looped"')),
    "a text for a flag": (lambda: schedule("mine", split="yes"), ("it is 'yes'", "split=True")),
    "a V of one stage": (
        lambda: schedule("mine", placement="v"), ("chunks is (1, 1)", "each rank has two stages"),
    ),
    "no function": (lambda: schedule("mine")(partial(turns, 2)), ("is a partial", "Write a def")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", OPTIONS)
def test_an_option_that_means_nothing_is_refused(mistake: str) -> None:
    call, says = OPTIONS[mistake]
    with pytest.raises(UsageError) as caught:
        call()
    assert all(each in str(caught.value) for each in says), str(caught.value)
    assert "mine" not in NAMES


def test_a_list_is_a_pair_too() -> None:
    schedule("vs", chunks=[2, 2], split=True, placement="v")(v_turns)
    assert NAMES["vs"].chunks == (2, 2)
    assert make("vs", ranks=2, microbatches=2).stages == 4
