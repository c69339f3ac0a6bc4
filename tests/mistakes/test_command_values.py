"""Values that an option cannot have: names of other kinds, impossible numbers, two for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes.test_command_mistakes import COMPILE, MODELS, build, said

__all__ = ["build"]  # the fixture
MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a PNG": (("picture", "BUILD", "-o", "x.png"), ("-o x.png: it ends in .png", "Name x.svg.")),
    "a PDF": (("report", "BUILD", "-o", "x.pdf"), ("-o x.pdf", "HTML", "Name x.html.")),
    "a trace": (("simulate", "BUILD", "--trace", "x.svg"), ("--trace x.svg", "Name x.json.")),
    "a picture": (("simulate", "BUILD", "--svg", "x.json"), ("--svg x.json", "Name x.svg.")),
    "a page": (("watch", "BUILD", "-o", "run.md"), ("-o run.md", "Name run.html.")),
    "a measured trace": (("bench", "BUILD", "--trace", "x.txt"), ("Name x.json.",)),
    "a machine": (("calibrate", "-o", "mesh.json"), ("-o mesh.json", "Name mesh.toml.")),
    "a comparison": (("compare", "BUILD", "-o", "x.csv"), ("-o x.csv", "Name x.svg.")),
    "time that was": (("doctor", "--links", "-3"), ("--links: '-3' is no number of seconds",)),
    "no time": (("doctor", "--links", "nan"), ("'nan' is no number of seconds from 0 on",)),
    "endless time": (
        ("doctor", "--links=inf"),
        ("'inf' is more seconds than the most, 100,000,000",),
    ),
    "no number": (
        ("verify", "BUILD", "--model", MODELS + "right", "--tolerance", "nan"),
        ("--tolerance nan", "such as 1e-9"),
    ),
    "too many layers": (
        ("compile", "hf:llama", *COMPILE[2:], "--layers", "1000000000"),
        ("--layers 1000000000", "from 1 to 10,000"),
    ),
    "too many rows": (
        ("compile", "hf:llama", *COMPILE[2:], "--layers", "1", "--batch", "10000000000"),
        ("batch of 10000000000", "does not fit", "--batch or --seq"),
    ),
    "too many processes": (("calibrate", "--ranks", "99999999"), ("--ranks 99999999", "1,024")),
    "an endless wait": (("bench", "BUILD", "--timeout", "inf"), ("'inf' is more seconds",)),
    "endless pauses": (("watch", "BUILD", "--every", "inf"), ("--every inf", "Write --every 2.")),
    "two files": (
        ("plan", "--from", "a.json", "--from", "b.json"),
        ("--from is given twice, as 'a.json' and as 'b.json'", "Give it once."),
    ),
    "anything goes": (
        ("verify", "BUILD", "--model", MODELS + "right", "--tolerance", "inf"),
        ("--tolerance inf: any gradient would pass",),
    ),
    "some ranks": (
        ("verify", "BUILD", "--model", MODELS + "right", "--processes", "2"),
        ("--processes takes no value, and '2' stands behind it", "leave the number out"),
    ),
    "some ranks, =": (("verify", "BUILD", "--processes=2"), ("leave the number out",)),
    "a script's option": (
        ("launch", "BUILD", "--emit", "slurm", "--script", "t.py", "--epochs", "3"),
        ("'--epochs'", 'go in one word: --args="--epochs 3".'),
    ),
    "a script's options": (
        ("launch", "BUILD", "--args", "--epochs", "3", "--emit", "slurm"),
        ("--args: expected one argument", 'go in one word: --args="--epochs 3".'),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_impossible_value_gets_a_sentence(
    mistake: str, build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "hf:llama" in MISTAKES[mistake][0]:
        pytest.importorskip("transformers")
    arguments, words = MISTAKES[mistake]
    places = {"BUILD": str(build), "OUT": str(tmp_path / "out")}
    text = said(tuple(places.get(each, each) for each in arguments), capsys)
    assert [word for word in words if word not in text] == [], text
    assert not [*tmp_path.iterdir()]
