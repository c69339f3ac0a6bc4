"""Passes of a user's own package, as the page "Add a pass" tells: installed, listed, run, refused.

The package is a folder on the path of another process, with a dist-info that names its passes.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from partc.errors import CheckError
from partc.passes import own_passes
from tests.docs.pages import blocks
from tests.house import HERE
from tests.installed import Folder

MODULE = "their_passes"
BEGIN = """\
import torch
import partc
from partc.graph import Graph, is_call
from partc.graph.graph_edits import drop_dead

aten = torch.ops.aten
"""
PAGE = [each.text for each in blocks(HERE / "docs" / "how-to" / "add-a-pass.md")]


def shown(pattern: str) -> str:
    """What the page shows at the only place of this form."""
    (found,) = re.findall(pattern, "".join(PAGE), re.MULTILINE)
    return str(found)


DECORATOR = shown(r"^@partc.*$")
ENTRY = shown(r'^multiply_by_powers = "mypackage.passes:(.*)"$')
GROUP = shown(r'^\[project.entry-points."(.*)"\]$')
WRITTEN = next(text for text in PAGE if "def multiply_by_powers" in text)
MULTIPLY = WRITTEN.replace("def multiply_by_powers", f"{DECORATOR}\ndef multiply_by_powers")
NOTE = '''
@partc.graph_pass(after="insert_collectives")
def {name}(graph, plan, mesh):
    """Say that it ran."""
    print("{name}", mesh, plan.preset, len(list(graph.calls())) > 0)
'''
TRAIN = """
import torch
from torch import nn


def loss_of(model, x, target):
    return nn.functional.mse_loss(model(x), target)


def setup():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    return model, (torch.randn(8, 16), torch.randn(8, 16)), loss_of
"""
COMPILE = ["compile", "train:setup", "--mesh", "tp=2", "--plan", "megatron"]


class Package(Folder):
    """What a user installed: a module of passes, and its entry points."""

    def made_of(self, *passes: str, entry: str = MODULE) -> None:
        self.install(GROUP, entry)
        self.write(**{MODULE: BEGIN + "".join(passes), "train": TRAIN})


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def source_of(folder: Path) -> str:
    """The rank programs in a folder."""
    return "".join(path.read_text() for path in sorted(folder.glob("*.py")))


@pytest.mark.exhaustive
def test_it_is_listed_runs_and_may_be_left_out(package: Package) -> None:
    package.made_of(MULTIPLY, entry=f"{MODULE}:{ENTRY}")
    listed = json.loads(package.partc("passes", "--json"))["passes"]
    names = [each["name"] for each in listed]
    row = names.index("multiply_by_powers")
    assert names[row - 1] == "insert_collectives"
    assert listed[row] == {
        "name": "multiply_by_powers", "only": "", "leaves": "local graph",
        "why": "a product takes less time than a quotient", "where": MODULE, "optional": True,
    }  # fmt: skip
    train = ["compile", "train:setup", "--mesh", "dp=2", "--plan", "ddp"]
    package.partc(*train, "--out", "with", "--dump", "dump")
    package.partc(*train, "--out", "without", "--disable", "multiply_by_powers")
    package.partc("verify", "with", "--model", "train:setup")
    ours, plain = source_of(package.path / "with"), source_of(package.path / "without")
    assert "/ 128" in plain
    assert "/ 128" not in ours
    assert "* 0.0078125" in ours
    plan = (package.path / "with" / "plan.toml").read_text()
    assert plan.startswith(f"# passes of others: multiply_by_powers ({MODULE})\n")
    plain = (package.path / "without" / "plan.toml").read_text()
    assert plain == plan.replace(plan.splitlines()[0], "# left out: multiply_by_powers")
    again = [*train[:-1], "with/plan.toml", "--out", "again"]
    package.partc(*again)
    assert source_of(package.path / "again") == ours
    parts = package.refused(*again, "--disable", "multiply_by_powers")
    assert parts["what"] == f"it was made with the pass multiply_by_powers ({MODULE})"
    dumped = package.path / "dump" / f"{row + 1:02}-multiply_by_powers.txt"
    before = package.path / "dump" / f"{row:02}-insert_collectives.txt"
    assert dumped.read_text().startswith("# after multiply_by_powers (")
    assert "div.Tensor(" in before.read_text()
    assert "mul.Tensor(" in dumped.read_text()


@pytest.mark.exhaustive
def test_passes_behind_one_pass_run_as_they_were_registered(package: Package) -> None:
    last = NOTE.format(name="last").replace("insert_collectives", "first")
    package.made_of(last, NOTE.format(name="first"), NOTE.format(name="second"))
    told = package.partc(*COMPILE, "--out", "build").splitlines()[:3]
    assert told == [f"{name} tp=2 megatron True" for name in ("first", "last", "second")]


BROKEN = {
    "reads what is made later": (
        '''
@partc.graph_pass(after="insert_collectives")
def broken(graph):
    first, *_, last = graph.calls()
    last.append(first)
''',
        "which it reads",
    ),
    "says nothing of a call": (
        '''
@partc.graph_pass(after="insert_collectives")
def broken(graph):
    first = next(graph.calls())
    with graph.fx.inserting_after(first):
        graph.fx.call_function(aten.neg.default, (first,))
''',
        "says nothing of its result, as it has no Value: call set_like(new, old)",
    ),
    "raises": (
        '''
@partc.graph_pass(after="insert_collectives")
def broken(graph):
    graph.calls() + 1
''',
        "TypeError: unsupported operand",
    ),
    "asks for what nobody made": (
        '''
@partc.graph_pass(after="insert_collectives")
def broken(graph, weather): ...
''',
        "it asks for 'weather'",
    ),
    "gives what is no part of a step": (
        '''
@partc.graph_pass(after="insert_collectives")
def broken(graph):
    return "done"
''',
        "it gives 'done'",
    ),
    "forgets a sum": (
        '''
from partc.graph import collectives

@partc.graph_pass(after="insert_collectives")
def broken(graph):
    for node in list(graph.calls()):
        if is_call(node, collectives.all_reduce):
            node.replace_all_uses_with(node.args[0])
    drop_dead(graph)
''',
        "",
    ),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", [name for name in BROKEN if name != "forgets a sum"])
def test_a_pass_that_breaks_the_graph_is_named(package: Package, mistake: str) -> None:
    text, says = BROKEN[mistake]
    package.made_of(text)
    parts = package.refused(*COMPILE, "--out", "build")
    assert parts["where"] == f"pass broken ({MODULE})"
    assert says in parts["why"]
    assert "--disable" in parts["do"]
    assert not (package.path / "build").exists()


def test_a_refusal_inside_of_a_pass_names_it_too(package: Package) -> None:
    package.made_of(
        """
@partc.graph_pass(after="insert_collectives")
def asks(graph):
    return None if is_call(next(graph.calls()), torch.relu) else None
"""
    )
    parts = package.refused(*COMPILE, "--out", "build")
    assert parts["where"] == f"pass asks ({MODULE}), is_call"
    assert "torch.ops.aten.relu" in parts["do"]


def test_a_pass_that_breaks_the_graph_may_be_left_out(package: Package) -> None:
    package.made_of(BROKEN["raises"][0])
    package.partc(*COMPILE, "--out", "build", "--disable", "broken")
    assert (package.path / "build").exists()


def test_a_pass_that_breaks_the_meaning_is_refused_by_the_proof(package: Package) -> None:
    package.made_of(BROKEN["forgets a sum"][0])
    parts = package.refused(*COMPILE, "--out", "build")
    assert parts["code"] == CheckError.code
    assert not (package.path / "build").exists()


MISPLACED = {
    "no such pass": (
        NOTE.format(name="lost").replace("insert_collectives", "insert_colectives"),
        "no pass that runs has the name 'insert_colectives'",
    ),
    "behind each other": (
        NOTE.format(name="lost").replace("insert_collectives", "other")
        + NOTE.format(name="other").replace("insert_collectives", "lost"),
        "no pass that runs has the name 'other'",
    ),
    "behind the proof itself": (
        NOTE.format(name="lost").replace("insert_collectives", "check"), "'check' is the proof",
    ),
    "behind the proof": (
        NOTE.format(name="lost").replace("insert_collectives", "check_stages"),
        "what was proved stays as it is",
    ),
    "taken by another of theirs": (NOTE.format(name="lost") * 2, f"a pass of {MODULE} has it"),
    "taken by one of partc's": (
        NOTE.format(name="lost") + 'lost.__name__ = "propagate"\n'
        'partc.graph_pass(after="insert_collectives")(lost)\n',
        "a pass of passes/shard/propagate.py has it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISPLACED)
def test_a_pass_without_a_place_or_a_name_is_named(package: Package, mistake: str) -> None:
    text, says = MISPLACED[mistake]
    package.made_of(text)
    parts = package.refused("passes")
    assert "'check' or" not in parts["do"]
    name = "propagate" if mistake == "taken by one of partc's" else "lost"
    assert parts["where"] == f"pass {name} ({MODULE})"
    assert says in parts["why"]


def test_an_entry_point_that_leads_nowhere_is_named(package: Package) -> None:
    package.made_of(entry="their_pases")
    parts = package.refused("passes")
    assert (parts["where"], parts["what"]) == ("pass theirs", "'their_pases' cannot be loaded")
    assert "No module named 'their_pases'" in parts["why"]


NO_PASS = {
    "not registered": (
        f"{MODULE}:mine", "def mine(graph): ...\n",
        f"the function mine of {MODULE} is not registered",
    ),
    "a helper that is imported": (
        f"{MODULE}:drop_dead", "", "the function drop_dead of partc.graph.graph_edits",
    ),
    "no function": (f"{MODULE}:SIZES", "SIZES = 1, 2\n", "it is (1, 2), and passes are functions"),
    "a module without one": (MODULE, "def mine(graph): ...\n", f"of the module {MODULE} is one"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", NO_PASS)
def test_an_entry_point_that_names_no_pass_is_named(package: Package, mistake: str) -> None:
    entry, text, says = NO_PASS[mistake]
    package.made_of(text, entry=entry)
    parts = package.refused("passes")
    assert (parts["where"], parts["what"]) == ("pass theirs", f"{entry!r} is no pass")
    assert says in parts["why"]
    assert "@partc.graph_pass(after=...)" in parts["do"]


def test_a_module_that_fails_is_named_with_its_line(package: Package) -> None:
    package.made_of("size = 1 / 0\n")
    parts = package.refused("passes")
    assert "ZeroDivisionError: division by zero" in parts["why"]


def test_another_group_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def every() -> EntryPoints:
        rules = EntryPoint("mine", MODULE, "partc.rules")
        return EntryPoints([EntryPoint("theirs", MODULE, "partc.pass"), rules])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_passes, "every", every)
        own_passes._load.__wrapped__()
    assert "theirs of the entry points 'partc.pass' is not loaded" in caplog.text
    assert "mine" not in caplog.text, "rules are loaded, and no passes"
    assert "'partc.passes'" in caplog.text


@pytest.mark.exhaustive
def test_a_pipeline_hands_it_the_graph_of_each_stage(package: Package) -> None:
    """Behind a pass that pipelines alone take; a step of one stage takes neither."""
    text = NOTE.format(name="late").replace("insert_collectives", "split_stages")
    package.made_of(text)
    pipeline = [*COMPILE[:2], "--mesh", "pp=2", "--plan", "ddp", "--microbatches", "2"]
    told = package.partc(*pipeline, "--out", "build").splitlines()
    ran = [line for line in told if line.startswith("late ")]
    assert ran
    assert len(ran) % 2 == 0
    assert "late" not in package.partc(*COMPILE, "--out", "whole")
