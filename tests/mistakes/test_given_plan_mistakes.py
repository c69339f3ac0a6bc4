"""Plans in the form of other tools, and meshes and numbers that are none: what to write instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel

import partc
from tests.mistakes.things import Mistake, check, compiled, program

DEEPSPEED = {
    "train_batch_size": 16, "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 2, "overlap_comm": True}, "gradient_clipping": 1.0,
}  # fmt: skip
OF_DEEPSPEED = (
    "a configuration of DeepSpeed", '\'preset = "zero2"\\nmicrobatches = 4\'',
    'zero_optimization.stage = 2: preset = "zero2"', "partc plan --from",
)  # fmt: skip
anything: Any = partc


def plan(given: Any, *words: str) -> Mistake:
    return (lambda: compiled(plan=given)), words


def replanned(given: Any, *words: str) -> Mistake:
    return (lambda: anything.replan(program(), given)), words


def mesh(given: Any, *words: str) -> Mistake:
    return (lambda: compiled(mesh=given)), words


MISTAKES: dict[str, Mistake] = {
    "JSON": plan('{"preset": "fsdp"}', "it is JSON, with the keys of a plan", "a plan is TOML",
                 "plan='preset = \"fsdp\"'"),
    "a dict": plan({"preset": "fsdp", "microbatches": 2}, "plan is a dict",
                   "'preset = \"fsdp\"\\nmicrobatches = 2'"),
    "a plan of torch's": plan({"up": ColwiseParallel()}, "parallelize_plan", 'plan="megatron"'),
    "other quotation marks": plan("preset = \u201cfsdp\u201d", "plain quotation marks"),
    "a dict of tables": plan({"params": {"up.weight": {"dp": 0}}}, "Write these keys as TOML"),
    "misspelt keys": plan({"presett": "fsdp"}, "presett: Did you mean 'preset'", "as TOML"),
    "other keys": plan({"a": 1}, "a plan is TOML", 'partc.Plan(preset="fsdp"'),
    "half of JSON": plan('{"preset": "fsdp"', "begins as JSON does, and is none"),
    "DeepSpeed's dict": plan(DEEPSPEED, *OF_DEEPSPEED),
    "DeepSpeed's JSON": plan(json.dumps(DEEPSPEED), *OF_DEEPSPEED),
    "stage 3": plan({"zero_optimization": {"stage": 3}}, 'preset = "fsdp"'),
    "DeepSpeed's TOML": plan("[zero_optimization]\nstage = 1", 'preset = "zero1"'),
    "a mesh": plan({"dp": 2, "tp": 2}, "with axes of a mesh", 'mesh="dp=2,tp=2"'),
    "a path of JSON": plan(Path("ds_config.json"), "partc plan --from ds_config.json"),
    "a path of YAML": plan("accelerate.yaml", "partc plan --from accelerate.yaml"),
    # numbers of ranks
    "a text of ranks": replanned("4", "'4' is no number of ranks", "Write replan(program, 4)."),
    "half of ranks": replanned(2.0, "2.0 is no number of ranks", "Write replan(program, 2)."),
    "no ranks": replanned(0, "1 or more"),
    "True ranks": replanned(True, "True is no number of ranks"),
    "nothing": replanned(None, "None is no number of ranks", "Write replan(program, 2)."),
    "no number": replanned(float("nan"), "nan is no number of ranks"),
    "another axis": replanned("tp=4", "no axis 'tp'"),
    "ranks as a mesh": mesh("4", 'Name the axis: "dp=4".'),
    "float as a mesh": mesh(4.0, "Name the axes, for example 'dp=4'"),
}  # fmt: skip
NUMBERS = {
    "bucket_mb": (-1, "from 0"), "microbatches": (0, "from 1 to 65,536"),
    "prefetch": (-1, "from 0 to 10,000"), "overlap_pieces": (-2, "from 0"),
    "virtual_stages": (-1, "from 0"), "memory_bytes": (-1, "0 or more"),
    "scatter.tp": (-1, "counted from 0"), "early_sums": ([-1], "counted from 0"),
    "grad_parts.dp": (0, "from 1"), "flops_per_byte.dp": (-1, "from 0"),
    "hierarchical.dp.tp": (-1, "from 0"), "bucket_copy_mb.dp.all_gather": (-0.5, "from 0"),
    "sends.forward": (-1, "from 0"), "mesh.dp": (-2, "one rank or more"),
    "compress.least_mb": (-1, "from 0"), "compress.start_step": (-1, "from 0"),
    "compress.block": (0, "from 8"), "compress.share": (2, "at most 1"),
    "compress.rank": (0, "from 1"), "local_steps.period": (0, "from 1"),
    "local_steps.overlap": (-1, "from 0"), "local_steps.mix": (1, "below 1"),
    "local_steps.outer_lr": (0, "above 0"), "stale.steps": (0, "from 1"),
    "stale.compensation": (-1, "from 0"), "servers.count": (0, "from 1"),
    "servers.max_steps_late": (-1, "0 to"), "uneven.microbatches": (0, "from 1"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_plan_gets_a_sentence(mistake: str) -> None:
    check(MISTAKES[mistake])


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_says_its_range(name: str) -> None:
    given, words = NUMBERS[name]
    make: Callable[[], Any] = lambda: partc.Plan.parse(f"{name} = {json.dumps(given)}")  # noqa: E731
    check((make, (name.partition(".")[0], words)))


def test_axes_under_mesh_are_told(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[mesh]\ndp = 2\n")
    check((lambda: compiled(mesh=path), ("[mesh] is no table of a mesh.toml", "Write [axes]")))


def test_a_plan_file_of_json_is_told(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(json.dumps(DEEPSPEED))
    check((lambda: partc.Plan.load(path), ("plan.toml", *OF_DEEPSPEED)))
