"""examples/life.py with few steps: kills, a lost rank, and the same loss in plain transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_a_run_survives_and_transformers_reads_what_it_learned(tmp_path: Path) -> None:
    line = [sys.executable, str(ROOT / "examples" / "life.py"), "40"]
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=5 * patience(), check=False
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert told.count("is killed") == 2
    begun = [line.split() for line in told.splitlines() if " go on behind step " in line]
    assert [int(words[0]) for words in begun] == [4, 4, 4, 3]
    at = [int(words[-1]) for words in begun]  # a save under way when a rank is killed is lost
    assert at == sorted(at)
    assert at[-1] == 30
    assert "in transformers" in told
