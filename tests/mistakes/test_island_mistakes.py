"""What is said of islands that the plan does not allow, or explain, and of edits of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.audit.audit import audit
from partc.errors import CheckError, PartcError, PlanError, UsageError
from partc.plan import Plan
from partc.program import Program
from partc.traced import Traced
from partc.verification.verification import verify
from partc.wrappers.said import check_said
from tests.texts import everywhere, one_role, with_role

PLAN = 'preset = "ddp"\nallow = ["local_steps"]\n[local_steps]\nperiod = 4\n'
STALE = 'preset = "ddp"\nallow = ["stale"]\n[stale]\nsteps = 1\ncompensation = 0.5\n'
OUTER = PLAN.replace("period = 4", 'period = 4\nouter = "nesterov"\nfragments = 2\nstart_step = 2')


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        result: Tensor = self.norm(x)
        return result


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).sin().square().mean()
    return mean


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


@cache
def step() -> Traced:
    return Traced(model(), (X,), loss)


@cache  # the texts of programs are edited in copies
def compiled(mesh: str, plan: str) -> Program:
    return compile(step(), mesh, plan=plan)


@pytest.mark.parametrize(
    ("mesh", "plan", "said"),
    [
        ("island=2,dp=2", 'preset = "ddp"', "does not say how often they meet"),
        ("island=2,dp=2", PLAN.replace("allow", "notes"), "nothing allows it"),
        ("dp=2", PLAN, "has no islands"),
        ("dp=2,island=2", PLAN, "is not the first axis"),
        ("island=2", PLAN.replace("period", "every"), "there is no entry 'every'"),
        ("island=2", PLAN.replace("period = 4", ""), "does not say how often islands meet"),
        ("island=2", PLAN.replace("4", "0"), "period = 0 means nothing"),
        ("island=2", PLAN + "fragments = 3", "are not divided evenly"),
        ("island=2", PLAN.replace("4", "16") + "fragments = 16", "the model has 5 parts"),
        ("island=2", PLAN + "outer_lr = 0.5", 'outer = "mean" reads no outer_lr'),
        ("island=2", PLAN + 'outer = "adam"', "it is one of 'mean', 'nesterov'"),
        ("island=2", PLAN + 'outer = "nesterov"\nouter_momentum = 1', "from 0 to below 1"),
        ("island=2", PLAN + 'wire = "int8"', 'outer = "mean" reads no wire'),
        ("island=2", PLAN + 'outer = "nesterov"\nwire = "sign"', "one of 'int8', 'fp8'"),
        ("island=2", PLAN + 'outer = "nesterov"\nblock = 64', "nothing reads block"),
        ("island=2", PLAN + "overlap = 1", 'outer = "mean" reads no overlap'),
        ("island=2", PLAN + 'outer = "nesterov"\noverlap = 4', "one part is under way at a time"),
        ("island=2", PLAN + 'outer = "nesterov"\nmix = 0.5', "nothing reads mix"),
        ("island=2", PLAN + 'outer = "nesterov"\noverlap = 1\nmix = 1.5', "from 0 to below 1"),
        ("island=2", PLAN + 'outer = "nesterov"\noverlap = 1\nwire = "int8"', "two transfers"),
        ("island=2", PLAN + 'partners = "rings"', "Did you mean 'ring'"),
        ("island=4", PLAN + 'outer = "nesterov"\npartners = "ring"', "all islands have to know"),
    ],
)
def test_islands_are_said_and_allowed_or_refused(mesh: str, plan: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        compiled(mesh, plan)
    assert said in str(error.value)
    assert "local_steps" in str(error.value)


def test_a_plan_in_python_is_checked_as_a_text_is() -> None:
    with pytest.raises(PlanError, match=r"partc\.plan\.local_steps\.LocalSteps\(16\)"):
        compile(model(), "island=2", (X,), loss=loss, plan=Plan(local_steps={"period": 2}))  # type: ignore[arg-type]


def test_what_is_allowed_and_not_said_is_told() -> None:
    with pytest.warns(UserWarning, match="all ranks train one model"):
        compiled("dp=2", 'preset = "ddp"\nallow = ["local_steps"]')


def test_wrappers_refuse_islands() -> None:
    with pytest.raises(UsageError, match=r"stage\.loader"):
        check_said("Trainer", "island=2,dp=2", PLAN, None)


def test_a_plan_with_islands_replays() -> None:
    program = compiled("island=2,dp=2", OUTER)
    again = compile(model(), "island=2,dp=2", (X,), loss=loss, plan=program.plan)
    assert again.sources == program.sources
    assert str(Plan.parse(program.plan)) == program.plan


# edits --------------------------------------------------------------------------------------------
def island(program: Program) -> tuple[str, list[str]]:
    """The file's text up to its last class, and the lines of that."""
    _, text = one_role(program)
    begin = text.rindex("\nclass ") + 1
    return text[:begin], text[begin:].splitlines()


def without_one(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Each statement that is left out, and the text without it."""
    begin = next(i for i, line in enumerate(lines) if "def __init__" in line)
    for i, line in enumerate(lines[begin:], start=begin):
        code = line.strip()
        words = ("def ", "@", '"""', "for ", "if ", "return", "super().__init__", "class ")
        if code and not code.startswith(words) and not code.endswith('"""'):
            yield code, "\n".join([*lines[:i], *lines[i + 1 :]])


@pytest.mark.exhaustive
def test_check_refuses_every_edit_of_how_islands_meet() -> None:
    program = compiled("island=2", OUTER)
    audit(program)
    before, lines = island(program)
    edits = [*without_one(lines)]
    assert len(edits) > 20
    for _, text in edits:
        edited = with_role(program, f"{before}{text}\n")
        with pytest.raises(PartcError):
            audit(edited)
    for old, new in (
        ("FRAGMENTS = (", "FRAGMENTS = ()\nNONE = ("), ("Step = NetStepIsland", "Step = NetStep"),
        ("flat /= num", "flat *= num"), ("_outer_island", "_other"),
    ):  # fmt: skip
        with pytest.raises(PartcError):
            audit(everywhere(program, old, new))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("flat /= num", "pass"),  # the sum in place of the mean
        ("flat /= num", "flat /= 1"),
        ("begun % 2", "begun % 4"),  # half as often
        ("begun // 2 % 2", "0"),  # the other part never
        ("momentum.mul_(0.9)", "momentum.mul_(1)"),
        ("alpha=0.7", "alpha=0.6"),
        ("delta + 0.9 * momentum", "momentum"),  # without Nesterov's look ahead
        ("            param.copy_(outer)", "            pass"),
        ("self.taken < 2", "self.taken < 1"),  # gradients are shared once too seldom
        ("self.taken < 2", "self.taken < 3"),
        ("if begun < 0 or self.taken == self.met", "if begun < 0"),  # twice
        ("[*params.values(), *changed]", "[*params.values()]"),  # without running statistics
        (".copy_(param)\n", ".copy_(0 * param)\n"),  # from the wrong place
    ],
)
def test_verify_refuses_islands_that_meet_otherwise(old: str, new: str) -> None:
    program = compiled("island=2", OUTER)
    changed = everywhere(program, old, new)
    report = verify(changed, model(), (X,), loss=loss)
    with pytest.raises(CheckError, match="island"):
        report.check()


@pytest.mark.exhaustive
def test_verify_finds_them_right() -> None:
    report = verify(compiled("island=2", OUTER), model(), (X,), loss=loss).check()
    assert {"meeting of islands", "gradient of islands"} <= set(report.kinds())


GOSSIP = PLAN + 'start_step = 2\nfragments = 2\npartners = "pairs"\n'


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(1 + len(others))", "2.5"),
        ("sum(arrived, flat)", "sum(arrived)"),  # what arrives takes the place of its own
        ("self.island_rank, 4, self.pairs", "self.island_rank, 4, self.island_rank"),  # its own
        ("self.pairs, self.taken", "self.pairs, 0"),  # always the same pairs
        ("paired_with(self.island_rank, 4, self.pairs, self.taken)", "[]"),
        ("begun // 2 % 2", "0"),
        ("[*params.values(), *changed], self.island", "[*params.values()], self.island"),
    ],
)
def test_verify_refuses_gossip_that_mixes_otherwise(old: str, new: str) -> None:
    program = compiled("island=4", GOSSIP)
    changed = everywhere(program, old, new)
    with pytest.raises(PartcError, match="island"):  # ranks may also wait for each other
        verify(changed, model(), (X,), loss=loss).check()


OVERLAPPED = OUTER.replace("period = 4", "period = 8") + "overlap = 2\nmix = 0.25\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('outer_sum_island") / 4', 'outer_sum_island")'),  # the sum in place of the mean
        ("self.taken - self.met == 2", "True"),  # what did not begin here ends too
        ("begun % 4 == 2", "begun % 4 == 3"),  # a step too late
        ("param.lerp_(outer, 1 - 0.25)", "param.copy_(outer)"),
        ("1 - 0.25", "0.25"),
        ('_outer_island") - p for', '_outer_island") + p for'),
        ("momentum.mul_(0.9)", "momentum.mul_(1)"),
        ("alpha=0.7", "alpha=0.6"),
        ("        self.drain()\n        for name", "        for name"),  # before the sum is there
        ("average_over([*changed], 4, self.island)\n            ways", "ways"),
    ],
)
def test_verify_refuses_islands_that_go_on_otherwise(old: str, new: str) -> None:
    program = compiled("island=4", OVERLAPPED)
    changed = everywhere(program, old, new)
    with pytest.raises(PartcError):  # of islands, or of sums that nobody waits for
        verify(changed, model(), (X,), loss=loss).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", [GOSSIP, OVERLAPPED])
def test_check_refuses_edits_of_other_meetings(plan: str) -> None:
    program = compiled("island=4", plan)
    audit(program)
    before, lines = island(program)
    for _, text in without_one(lines):
        with pytest.raises(PartcError):
            audit(with_role(program, f"{before}{text}\n"))


@pytest.mark.parametrize("partners", ["ring", "pairs"])
def test_bytes_to_partners_are_those_of_the_plan(partners: str) -> None:
    """In a ring twice the parameters and running statistics, of two islands once; in pairs once."""
    kept = 4 * sum(x.numel() for x in model().parameters()) + 4 * 2 * 8  # of running statistics
    for num, share in ((2, 1), (4, {"ring": 2, "pairs": 1}[partners])):
        plan = PLAN + f'partners = "{partners}"\n'
        traffic = compiled(f"island={num}", plan).cost.as_json()["traffic"]
        [sent] = [each for each in traffic if each["axis"] == "island"]
        assert sent["kind"] == "send, in 1 of 4 steps"
        assert sent["sent_bytes"] == share * kept // 4


WIRE = OUTER + 'wire = "int8"\nblock = 8\n'
EXACT = """class Exact(Int8Sum):
    def encode(self, x: Tensor) -> Tensor:
        return x

    def decode(self, sent: Tensor) -> Tensor:
        return sent


class NetStepIsland"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(total.flat / num)", "total.flat"),  # the sum in place of the mean
        ("in_blocks(ways, 8), 2, 8", "in_blocks(ways, 16), 2, 16"),
        ("Int8Sum(in_blocks", "Exact(in_blocks"),  # exact
        ("[*deltas.values()]", "[*deltas.values()][1:]"),  # one is not shared
        ('.get_buffer(f"{n}_outer_island") - p', '.get_buffer(f"{n}_outer_island") + p'),
    ],
)
def test_verify_refuses_outer_gradients_that_are_rounded_otherwise(old: str, new: str) -> None:
    program = compiled("island=2", WIRE)
    changed = everywhere(program, old, new)
    text = one_role(changed)[1].replace("class NetStepIsland", EXACT)
    report = verify(with_role(changed, text), model(), (X,), loss=loss)
    with pytest.raises(CheckError, match="island"):
        report.check()


@pytest.mark.exhaustive
def test_verify_lets_each_meeting_begin_with_the_same_numbers() -> None:
    """What is a little off is off by no more in the next: a number at an edge is rounded alike."""
    program = compiled("island=2", WIRE)
    assert verify(program, model(), (X,), loss=loss).check()
    _, text = one_role(program)
    last, off = "            params[name].copy_(outer)", 2**-36
    assert last in text
    edited = text.replace(last, f"            outer.mul_(1 + {off})\n{last}")
    report = verify(with_role(program, edited), model(), (X,), loss=loss)
    worst = max(row.error for row in report.rows if row.kind == "meeting of islands")
    assert off / 2 < worst < 1.5 * off


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.turn)


@pytest.mark.parametrize("plan", [WIRE.replace("fragments = 2", ""), STALE])
def test_complex_parameters_are_not_rounded(plan: str) -> None:
    with pytest.raises(PlanError, match="defined for real numbers"):
        compile(Turned(), "island=2", (X,), loss=loss, plan=plan)
