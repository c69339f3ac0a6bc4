"""Time to a fixed loss: a short training of all kinds of variants, its rows and its picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.netlab.network import Link
from benchmarks.sync.__main__ import apart, parsed, parts_text
from benchmarks.sync.picture import picture
from benchmarks.sync.predicted import compile_to
from benchmarks.sync.rank import Job, Run
from benchmarks.sync.rows import row, rows, table, target_loss
from benchmarks.sync.variants import DDP, EXACT, ISLAND, WEIGHTS, Variant, variants
from benchmarks.workload import Size
from partc.plan.wires import WIRES
from tests.patience import patience

ISLANDS = {
    "often": "period = 2",
    "later": "period = 1\nstart_step = 3",
    "overlapped": 'period = 3\nouter = "nesterov"\noverlap = 1',
    "pairs": 'period = 2\npartners = "pairs"',
    "ring, later": 'period = 1\nstart_step = 3\npartners = "ring"',
}
KEYS = {"variant", "bytes_predicted", "bytes_counted", "seconds_to_loss", "final_loss", "exposed_s"}
TINY = Size("tiny", hidden=32, layers=2, heads=2, ffn=64, vocab=256, seq=16, batch=1)


def test_every_scheme_that_partc_knows_is_a_variant() -> None:
    assert {EXACT, DDP, *WIRES, *WEIGHTS} < set(variants())
    assert parsed(["--mbit", "50"]).variants == list(variants())


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("names", "islands"),
    [
        ((EXACT, DDP, "int8"), ("overlapped",)),
        pytest.param(
            (EXACT, DDP, "int8", "threshold", "fsdp, weights in int8"), (*ISLANDS,),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["few", "all"],
)  # fmt: skip
def test_a_short_training(tmp_path: Path, names: tuple[str, ...], islands: tuple[str, ...]) -> None:
    """On two ranks: bytes are those that were predicted, and exact sums train as DDP does."""
    known = variants()
    every = [known[name] for name in names]
    every += [Variant(k, 1e-3, ISLAND, f"[local_steps]\n{ISLANDS[k]}") for k in islands]
    every += [Variant("late", 1e-3, ISLAND, "[stale]\nsteps = 1")]
    job = Job(str(tmp_path), tuple(every), (1,), steps=4, every=2, size=TINY)
    predicted = compile_to(job, 2, Link(100.0))
    found = apart(job, 2, timeout_s=patience(240.0))
    runs = [Run(**each) for each in found["runs"]]
    made = rows(runs, predicted, target_loss(runs, 4))
    assert [each.variant for each in made] == [each.name for each in every]
    for each in made:
        assert each.as_json().keys() == KEYS | {"spread"}
        assert abs(each.bytes_off) < 0.02
    exact, ddp = made[:2]
    assert exact.seconds_to_loss is not None
    assert ddp.final_loss[0] == pytest.approx(exact.final_loss[0], rel=1e-5)
    assert len({line.count("|") for line in table(made).splitlines()}) == 1
    assert "times as long" in parts_text(found["parts"], 3.0)
    ET.fromstring(picture(runs, 3.0, "a < b"))


def test_a_variant_that_never_comes_to_the_loss_is_kept() -> None:
    runs = [_run(EXACT, 1, 2.0), _run("slow", 1, 2.5), _run("slow", 2, 2.9)]
    lost = row("slow", 100.0, runs[1:], 2.6)
    assert (lost.reached, lost.seeds, lost.has_lost) == (1, 2, True)
    assert lost.as_json()["seconds_to_loss"] is None
    exact = row(EXACT, 100.0, runs[:1], 2.6)
    assert lost.verdict(exact) == "higher"
    assert "| 1 of 2 seeds |" in table([exact, lost])


def test_the_fixed_loss_is_one_that_exact_sums_reach_with_every_seed() -> None:
    assert target_loss([_run(EXACT, 1, 2.0), _run(EXACT, 2, 2.2), _run("other", 1, 1.0)], 8) == 2.2


def _run(variant: str, seed: int, last: float) -> Run:
    return Run(variant, seed, [(0, 0.0, 5.5), (8, 4.0, last)], 100.0, 100.0, 0.1, 0.5)
