"""A machine's file with a misplaced key, or a figure in another unit, says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from partc.errors import PlanError
from partc.plan.mesh import Mesh

FILE = """name = "mine"

[[devices]]
name = "one"
count = 2
memory_bytes = 80_000_000_000
memory_bytes_per_s = 2e12
launch_s = 5e-6
watts = 700
[devices.flops_per_s]
f32 = 312e12

[[levels]]
name = "link"
size = 2
bytes_per_s = 25e9
latency_s = 1e-6
"""
SECOND = FILE[FILE.index("[[levels]]") :]
WRONG = {
    "axes on top": ("dp = 2\n" + FILE, "below a line [axes]: dp = 2"),
    "a device's key on top": ("memory_bytes = 8\n" + FILE, "below its line [[devices]]"),
    "misspelt": (FILE.replace("memory_bytes =", "memory_byte ="), "Did you mean 'memory_bytes'"),
    "TFLOPS": (FILE.replace("312e12", "312"), "312 TFLOP/s are 312e12"),
    "GB": (FILE.replace("80_000_000_000", "80"), "80 GB are 80_000_000_000"),
    "TB/s": (FILE.replace("= 2e12", "= 2"), "2 TB/s are 2e12"),
    "GB/s": (FILE.replace("25e9", "25"), "25 GB/s are 25e9"),
    "one pair of brackets": (FILE.replace("[[levels]]", "[levels]"), "Write [[levels]] over each"),
    "twice": ((FILE + SECOND).replace("[[levels]]", "[levels]"), "Write [[levels]] over each"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_a_machine_says_what_to_write(mistake: str, tmp_path: Path) -> None:
    text, do = WRONG[mistake]
    path = tmp_path / "mesh.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        Mesh.of(str(path))
    assert do in str(caught.value)


def test_the_right_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(FILE, encoding="utf-8")
    assert Mesh.of(str(path)).topology is not None
