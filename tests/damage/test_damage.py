"""The command of this package: what it tells of cases, and a fixed sample of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from partc.program.tensorfile import TensorFile
from tests.damage.artefacts import Made
from tests.damage.built import Built
from tests.damage.cases import run_case
from tests.damage.spoil import BYTES, TEXT, spoil_entry
from tests.damage.verdicts import BAD, Found, Verdict, table
from tests.forked_scripts import run_script
from tests.house import HERE
from tests.patience import patience

CONTENT = b'a = 1\n"b" = { dp = 0 }\nword = 12\n'


def make_lost() -> None:
    Path("in/mine.txt").unlink()


def make_ran() -> None:
    Path("ran").touch()


def make_left() -> None:
    (Path("..") / "tmp/left").touch()


def make_raw() -> None:
    raise KeyError("raw")


def make_refused() -> None:
    TensorFile("nowhere")


WORDS = {
    "harmless": lambda: None, "lost": make_lost, "ran": make_ran, "left": make_left,
    "raw": make_raw, "refused": make_refused, "wrong": lambda: Verdict("wrong"),
}  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_every_verdict_is_told(word: str, tmp_path: Path) -> None:
    def make(rng: random.Random, built: Built, place: Path) -> Made:
        place.mkdir(exist_ok=True)
        (place / "mine.txt").write_text("mine")
        return Made("none", WORDS[word])

    found = run_case({"it": make}, Built(tmp_path), tmp_path / "case", 1, 0)
    assert found.verdict.word == word, found
    assert not (tmp_path / "case").exists()


def test_damage_changes_what_it_says_and_is_the_same_for_a_seed() -> None:
    for how in (*BYTES, *TEXT):
        first, told_first = how(random.Random(7), CONTENT)
        assert (first, told_first) == how(random.Random(7), CONTENT)
    changed = Counter(how(random.Random(s), CONTENT)[0] != CONTENT for how in BYTES for s in (1, 2))
    assert changed[True] > changed[False]
    fields = {"a": [1, 2], "b": {"c": "d"}}
    assert spoil_entry(random.Random(3), fields)
    assert fields != {"a": [1, 2], "b": {"c": "d"}}


def test_the_table_counts_each_artefact() -> None:
    found = [Found(0, "plan", "", Verdict("refused")), Found(1, "plan", "", Verdict("raw"))]
    lines = table(found).splitlines()
    assert lines[1].split() == ["plan", "2", "1", "-", "-", "-", "1", "-", "-", "-", "-"]
    assert set(lines[0].split()) >= {*BAD} - {"as it says"}


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_a_stopped_rank_of_a_run_is_recovered() -> None:
    """Named by a watchdog and ended; the run goes on as one without a failure, bit for bit."""
    options = ["--small", "--seed", "3", "--cases", "1", "--row", "stop of torchrun's", "--all"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.damage", "recoveries", *options],
        cwd=HERE, env=os.environ | {"PYTHONPATH": str(HERE)}, capture_output=True, text=True,
        timeout=patience(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HARMLESS  stop of torchrun's" in done.stdout
    assert "it is stopped, for " in done.stdout


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "num"), [("artefacts", 10), ("misuses", 10), ("ranks", 2)])
def test_a_sample_meets_nothing_bad(kind: str, num: int, tmp_path: Path) -> None:
    script = tmp_path / "damages.py"
    script.write_text(
        "import sys\nfrom tests.damage.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = run_script(script, kind, "--small", "--seed", "3", "--cases", f"{num}")
    assert done.code == 0, done.text
    counts = done.text.splitlines()[-1].split()
    assert counts[:2] == ["all", f"{num}"]
    refused = int(counts[2])
    assert refused == num if kind == "ranks" else 4 <= refused < num  # some damage is harmless
