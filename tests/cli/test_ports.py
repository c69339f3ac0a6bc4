"""Configurations of Accelerate, DeepSpeed and torchtitan become plans, key by key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partc import Plan
from partc.cli.main import main
from partc.errors import UsageError
from partc.plan.ports import TOOLS, read_config
from partc.plan.ports.draft import Draft

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_sharding_strategy: {strategy}
  fsdp_version: 1
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
DEEPSPEED = {
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e7},
    "bf16": {"enabled": True},
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
TORCHTITAN = """
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 1
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""


def axes(plan: Plan) -> dict[str, int]:
    return dict(plan.mesh.axes) if plan.mesh else {}


def read(folder: Path, name: str, text: str, devices: int | None = None) -> tuple[Draft, Plan]:
    (folder / name).write_text(text, encoding="utf-8")
    draft = read_config(folder / name, devices)
    return draft, Plan.parse(str(draft))


@pytest.mark.parametrize(
    ("strategy", "preset", "mesh"),
    [
        ("FULL_SHARD", "fsdp", {"dp": 16}),
        ("SHARD_GRAD_OP", "zero2", {"dp": 16}),
        ("NO_SHARD", "ddp", {"dp": 16}),
        ("HYBRID_SHARD", "hsdp", {"dp_replicate": 2, "dp_shard": 8}),
        ("1", "fsdp", {"dp": 16}),
    ],
)
def test_accelerate(tmp_path: Path, strategy: str, preset: str, mesh: dict[str, int]) -> None:
    pytest.importorskip("yaml")
    draft, plan = read(tmp_path, "a.yaml", ACCELERATE.format(strategy=strategy))
    assert (plan.preset, axes(plan), plan.recompute) == (preset, mesh, "block")
    assert draft.tool == "Accelerate"
    assert draft.left_out == ["precision bf16"]
    assert len(draft.told) == 8


def test_accelerate_by_axes(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    names = {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 4, "cp_size": 1}
    rows = [f"  parallelism_config_{name}: {size}" for name, size in names.items()]
    text = "\n".join(["num_processes: 16", "distributed_type: FSDP", "parallelism_config:", *rows])
    _, plan = read(tmp_path, "a.yaml", text)
    assert axes(plan) == {"dp_replicate": 2, "dp_shard": 2, "tp": 4}
    assert plan.preset == "hsdp+megatron"
    with pytest.raises(UsageError, match=r"24 devices: .* have 16 ranks"):
        read(tmp_path, "a.yaml", text.replace("16", "24"))


def test_deepspeed(tmp_path: Path) -> None:
    draft, plan = read(tmp_path, "ds.json", json.dumps(DEEPSPEED), devices=8)
    assert (plan.preset, plan.microbatches, plan.bucket_mb) == ("fsdp", 4, 200)
    assert axes(plan) == {"dp": 8}
    assert draft.left_out == ["bf16"]
    assert "the Trainer fills it in" in draft.told['gradient_clipping = "auto"']
    _, open_mesh = read(tmp_path, "ds.json", json.dumps(DEEPSPEED))
    assert open_mesh.mesh is None


def test_torchtitan(tmp_path: Path) -> None:
    _, plan = read(tmp_path, "t.toml", TORCHTITAN, devices=16)
    assert (plan.preset, plan.schedule) == ("fsdp+megatron-sp", "interleaved-1f1b")
    assert (plan.recompute, plan.compile) == ("block", "inductor")
    assert axes(plan) == {"pp": 2, "dp": 4, "tp": 2}
    for devices, why in ((None, "leave the data axis open"), (6, "no multiple of the 4 ranks")):
        with pytest.raises(UsageError, match=why):
            read(tmp_path, "t.toml", TORCHTITAN, devices)


def test_what_no_plan_says_is_named(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("parallel_degree = 1", "parallel_degree = 2") + "[odd]\nkey = 3\n"
    draft, _ = read(tmp_path, "t.toml", text, devices=8)
    assert draft.left_out == ["context parallelism"]
    assert draft.unknown == ["odd.key"]
    assert "#   odd.key = 3: unknown to partc: look up what it does in torchtitan" in str(draft)


def test_a_misspelt_key_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 3}, "odd": 1}')
    assert main(["plan", "--from", str(path)]) == 2
    told = capsys.readouterr().err
    assert "ds.json: zero_optimisation.stage: DeepSpeed has no such key" in told
    assert "Did you mean 'zero_optimization.stage'?" in told
    for text, near in (
        ('{"zero_optimization": {"stage": 3}, "bf16": {"enable": true}}', "enabled"),
        ('{"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}}', "device"),
        ('{"zero_optimisation": {"stage": 3}}', "zero_optimization.stage"),
    ):
        with pytest.raises(UsageError, match=f"Did you mean '{near}'"):
            read(tmp_path, "ds.json", text)


def test_every_key_has_a_comment(tmp_path: Path) -> None:
    draft, _ = read(tmp_path, "ds.json", json.dumps(DEEPSPEED))
    assert [line.split(" = ")[0] for line in draft.told] == [
        "gradient_accumulation_steps", "zero_optimization.stage", "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size", "bf16.enabled", "gradient_clipping",
        "optimizer.type", "optimizer.params.lr",
    ]  # fmt: skip
    assert all(f"#   {key}: {said}" in str(draft) for key, said in draft.told.items())


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.json", "{", "cannot be read"),
        ("a.json", '{\n  // three\n  "x": 1}', "line 2: // three: JSON has no comments"),
        ("a.json", '{"x": 1, # one\n "y": 2}', "line 1: .*: JSON has no comments"),
        ("a.json", '{\n  "x": 1,\n}', 'line 2: "x": 1,: nothing follows this comma'),
        ("a.json", '{"x": [1, 2,]}', "nothing follows this comma"),
        ("a.json", "{'x': 1}", "double quotation marks"),
        ("a.json", '{"x": True}', "JSON writes true, false and null"),
        ("a.json", '{"x": 1, "x": 2}', "the key 'x' stands in it twice"),
        ("a.yaml", "num_processes: 2\nnum_processes: 4\n", "'num_processes' stands in it twice"),
        ("a.json", '{"zero_optimization": {"stage": "three"}}', "stage: 'three' is no value"),
        ("a.json", "[1]", "it has no keys"),
        ("a.json", '{"x": 1}', "none of its keys is one of Accelerate, DeepSpeed, torchtitan"),
        ("a.yaml", "trainer:\n  strategy: ddp\nmodel:\n  lr: 1\n", "configuration of Lightning"),
        ("a.yaml", "model:\n  lr: 1\n", "none of its keys is one of Accelerate"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "stages 0 to 3"),
        ("a.json", '{"gradient_accumulation_steps": "many"}', "'many' is no value"),
        ("a.json", '{"gradient_accumulation_steps": true}', "it counts"),
        ("a.toml", "[parallelism\n", "cannot be read"),
        ("a.toml", "parallelism.fsdp_reshard_after_forward = 3", "default, always or never"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read(tmp_path, name, text)


def test_every_entry_says_something() -> None:
    for tool in TOOLS.values():
        for key, entry in tool.KEYS.items():
            assert callable(entry) or entry, key


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**DEEPSPEED, "novel": 1}), encoding="utf-8")
    out = tmp_path / "plan.toml"
    assert main(["plan", "--from", str(config), "--devices", "8", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(out)
    assert said.err.splitlines() == ["no plan says: bf16", "unknown: novel"]
    assert Plan.load(out).preset == "fsdp"
    assert main(["plan", "--from", str(config), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tool"] == "DeepSpeed"
    assert told["unknown"] == ["novel"]
    assert main(["plan", "--from", str(tmp_path / "no.json")]) == 2
    assert "no.json: it cannot be read" in capsys.readouterr().err
