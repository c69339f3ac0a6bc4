"""``partc export`` and ``partc replan`` as commands: what they write, print and refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import partc
from partc.cli.main import main

pytestmark = pytest.mark.gloo
TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 24, "intermediate_size": 36,
    "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
    "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()


def told(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, object]:
    capsys.readouterr()
    assert main([*line, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.exhaustive
def test_a_program_is_replanned_and_its_checkpoint_exported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", "hf:tiny.json")
    compile_line = ["compile", "hf:tiny.json", "--batch", "6", "--seq", "8", "--mesh", "dp=2"]
    assert main([*compile_line, "--plan", "fsdp", "--out", "build"]) == 0
    made = told(capsys, "replan", "build", "--devices", "3", *model, "-o", "build-3")
    assert (made["before"], made["mesh"]) == ({"dp": 2}, {"dp": 3})
    assert str(made["note"]).startswith("replanned from dp=2 for dp=3: ")
    assert main(["replan", "build-3", "--mesh", "dp=1", "-o", "build-1"]) == 0  # as it was told
    assert "build-1/run.py" in capsys.readouterr().out
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("tiny.json"))
    stage = partc.load("build-1", plain).module()
    stage.load_full(plain)
    partc.save_checkpoint("run", stage, step=7)
    files = told(
        capsys, "export", "run", "-o", "weights", "--config", "tiny.json", "--max-shard-size", "9KB"
    )["files"]
    assert {*files} == {each.name for each in (folder / "weights").iterdir()}  # type: ignore[misc]
    again = AutoModelForCausalLM.from_pretrained("weights", dtype=torch.float32)
    state = plain.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in again.state_dict().items())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("export nothing -o out", "there is no such folder"),
        ("export build -o out", "It has a program, without weights"),
        ("export tiny.json -o out", "it is a file"),
        ("export build -o out --max-shard-size 5XB", "no size of a file"),
        ("export build -o out --max-shard-size 5", "stands for 5 bytes"),
        ("export build -o out --config nothing.json", "no configuration of a model"),
        ("export build -o build", "will not be replaced"),
        ("replan build -o out --model hf:tiny.json", "neither --devices nor --mesh"),
        ("replan build -o out --model hf:tiny.json --devices 2 --mesh dp=2", "both given"),
        ("replan build -o out --model hf:tiny.json --devices 0", "it counts from 1"),
        ("replan build -o out --model hf:tiny.json --devices 4", "numbers of ranks: 1, 2, 3, 6."),
        ("replan build -o out --model hf:tiny.json --mesh tp=2", "the program has no axis 'tp'"),
        ("replan tiny.json -o out --model hf:tiny.json --devices 2", "Name the folder"),
    ],
)
def test_what_is_refused_says_what_to_do(
    line: str, told: str, built: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(built)
    assert main(line.split()) == 2
    assert told in capsys.readouterr().err
    assert not (built / "out").exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        line = "compile hf:tiny.json --batch 6 --seq 8 --mesh dp=2 --plan fsdp --out build"
        assert main(line.split()) == 0
    return folder
