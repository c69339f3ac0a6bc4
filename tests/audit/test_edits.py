"""Edits of saved programs: what no run can judge has to stand, what a run can judge is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from partc.audit.audit import audit
from partc.audit.edits import accept_edits
from partc.audit.fixed import check_fixed
from partc.codegen.safety import check_source
from partc.errors import CheckError, PartcError
from partc.program import Program, load
from partc.program.tensorfile import write_tensors
from tests.audit.test_audit import Noisy, edited, made
from tests.example_program import example_program
from tests.texts import roles_of


@cache
def program(kind: str) -> Program:
    """A program that draws, one with attention, or one of the toy's."""
    if kind == "draws":
        return partc.compile(Noisy(), "dp=2", (torch.zeros(8, 8),), plan="ddp")
    if kind == "attention":
        return partc.compile(Attends(), "dp=2", (torch.zeros(4, 2, 6, 8),), plan="fsdp")
    return made(kind)


class Attends(nn.Module):
    """Attention between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        y: torch.Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return y.square().mean()


DEVICE = "decides on the device, or the library"
DRAWS = "decides on which random numbers"
DTYPE = "decides on the dtype"
FIXED = [
    ("attention", "if q.is_cuda:\n", "if q.is_cuda:\n        k, v = v, k\n", DEVICE),
    ("attention", "(q, k, v, mask, True", "(q, v, k, mask, True", DEVICE),
    ("attention", "return loss\n", "return loss * 2 if x.is_cuda else loss\n", DEVICE),
    ("attention", "x.chunk(2)", "(x * 2 if x.device.type[0] == 'c' else x).chunk(2)", DEVICE),
    ("attention", "x.chunk(2)", "(x * 2 if 'cuda' in str(x) else x).chunk(2)", "a value as text"),
    ("attention", "x.chunk(2)", "(x * 2 if 'cuda' in f'{x}' else x).chunk(2)", "a value as text"),
    ("attention", "x.chunk(2)", "x.bfloat16().float().chunk(2)", DTYPE),
    ("attention", "x.chunk(2)", "x.to(self.out_bias.dtype).chunk(2)", DTYPE),
    ("fsdp", '"float64": torch.float64', '"float64": torch.float32', DTYPE),
    ("fsdp", "ids.chunk(2)", "(ids + torch.cuda.device_count()).chunk(2)", DEVICE),
    ("fsdp", "Step = T", "def scatter_grads(*x):\n    return x\n\n\nStep = T", "a name"),
    ("fsdp", "import torch\n", "import torch\nfrom torch import clone as empty\n", "a name stands"),
    ("fsdp", "        return loss\n", "        for empty in [weight_grad]:\n            pass\n"
     "        return loss\n", "a name stands"),
    ("pipeline", "self.links.meet(ids.device)", "pass", "self.links.meet.* is gone"),
    ("pipeline", 'ALIASES = {"head.weight": "embed.weight"}', "ALIASES = {}", "which tensors are"),
    ("pipeline", '"head.weight": "embed', '"head.weight": "blocks.0.up', "which tensors are one"),
    ("draws", ', self.dp_rank))', "))", DRAWS),
    ("draws", 'self.rng("drop"', 'self.rng("other"', DRAWS),
    ("draws", "step + 1, device", "step, device", DRAWS),
    ("draws", "self.rng.step = seed, step", "self.rng.step = seed, 0", DRAWS),
    ("draws", '{self.seed} {self.step}', "{self.step}", DRAWS),
    ("draws", "        self.rng.begin(x.device)\n",
     "        if x.shape[0] > 1:\n            self.rng.begin(x.device)\n", DEVICE),
    ("draws", "    @torch.no_grad()\n", "    def seed(self, *x: int) -> None:\n        pass\n\n"
     "    @torch.no_grad()\n", "which function a name stands for"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "old", "new", "said"), FIXED)
def test_what_no_run_can_judge_has_to_stand(kind: str, old: str, new: str, said: str) -> None:
    with pytest.raises(CheckError, match=said) as caught:
        check_fixed(edited(program(kind), old, new))
    assert ".py" in caught.value.where


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["attention", "draws", "fsdp", "pipeline", "ddp+megatron"])
def test_comments_docstrings_and_what_runs_can_judge_are_free(kind: str) -> None:
    whole = program(kind)
    noted = {
        name: text.replace('"""Add ', '"""Noted. ').replace("    # ", "    # noted: ")
        for name, text in whole.sources.items()
    }
    assert check_fixed(replace(whole, sources=noted)) == check_fixed(whole)
    check_fixed(edited(whole, "return loss\n", "loss = loss * 1\n        return loss\n"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "old", "new", "said"),
    [
        ("draws", ', self.dp_rank))', "))", "none of its own"),
        ("draws", 'self.rng("drop"', 'self.rng("other"', "none of its own"),
        ("draws", "self.step + 1, device", "self.step, device", "none of its own"),
        ("draws", '{self.seed} {self.step}', "0 {self.step}", "none of its own"),
        ("draws", "self.rng.step = seed, step", "self.rng.step = seed, 0", "none of its own"),
        ("draws", "        return loss\n", "        self.first_bias.zero_()\n        return loss\n",
         "first_bias: the step changes this tensor"),
        ("draws", "        return loss\n", "        x.zero_()\n        return loss\n",
         "x: the step changes this tensor"),
        ("pipeline", "if here < rank else reversed(ways)", "if here <= rank else ways",
         "for ever"),
    ],
)  # fmt: skip
def test_runs_find_wrong_keys_changed_parameters_and_sends_that_meet(
    kind: str, old: str, new: str, said: str
) -> None:
    sources = dict(program(kind).sources)
    roles = roles_of(program(kind))
    edited = roles if any(old in text for text in roles.values()) else sources
    sources |= {name: text.replace(old, new) for name, text in edited.items()}
    assert sources != program(kind).sources
    with pytest.raises(PartcError, match=said):
        audit(replace(program(kind), sources=sources, fixed=None))


@pytest.mark.parametrize(("kind", "said"), [
    ("pipeline", "sums: no axis but pp"), ("draws", "draws: 1 sites, each rank and step"),
])  # fmt: skip
def test_the_output_says_what_was_checked(kind: str, said: str) -> None:
    assert said in str(audit(program(kind)))


class InTwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(8, dtype=torch.bfloat16), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x.bfloat16()).float()).square().mean()  # type: ignore[no-any-return]


def test_programs_in_two_dtypes_say_what_no_number_tells() -> None:
    mixed = partc.compile(InTwoDtypes(), "dp=2", (torch.zeros(8, 8),), plan="ddp")
    (told,) = audit(mixed).unchecked
    assert "in which of bfloat16, float32 a call between two casts computes" in told
    with pytest.raises(CheckError, match=DTYPE):
        check_fixed(edited(mixed, ".to(torch.float32", ".to(torch.bfloat16"))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)))
        return y.square().mean()


@pytest.mark.exhaustive
def test_the_true_reason_for_no_numbers_is_given(tmp_path: Path) -> None:
    with_pieces = partc.compile(Normed(), "dp=2", (torch.randn(8, 4),), plan="ddp", microbatches=2)
    with_pieces.save(tmp_path)
    assert "each piece of the batch has its own statistics" in str(audit(load(tmp_path)))


# files --------------------------------------------------------------------------------------------
def change(name: str, how: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(how((folder / name).read_text()))


def other_constants(file: Path) -> None:
    write_tensors(file, {"scale": torch.tensor(3.0), "rows": torch.arange(4)})


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "comments": (change("role0.py", lambda text: text + "# mine\n"), ""),
    "comments of the plan": (change("plan.toml", lambda text: "# mine\n" + text), ""),
    "another plan": (change("plan.toml", lambda text: 'preset = "fsdp"\n' + text), "other entries"),
    "no plan": (change("plan.toml", lambda text: "= ="), "not TOML"),
    "a deep key": (change("plan.toml", lambda text: "a." * 100_000 + "a = 1"), "than 50 parts"),
    "run.py": (change("run.py", lambda text: text + "# mine\n"), "no check can judge it"),
    "constants": (lambda folder: other_constants(folder / "constants.safetensors"), "no check can"),
    "another program": (
        change("role0.py", lambda text: text.replace("(2 / 96)", "(1 / 96)")), "Give the model",
    ),
    "bytes": (lambda folder: (folder / "role0.py").write_bytes(b"\xff"), "is not a text"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_only_what_was_judged_is_accepted(tmp_path: Path, case: str) -> None:
    how, said = FILES[case]
    example_program().save(tmp_path)
    how(tmp_path)
    before = (tmp_path / "program.json").read_bytes()
    if not said:
        accept_edits(tmp_path)
        load(tmp_path)
        return
    with pytest.raises(PartcError, match=said):
        accept_edits(tmp_path)
    assert (tmp_path / "program.json").read_bytes() == before


@pytest.mark.parametrize("line", ["print(x)", "with x:\n    pass", "y = getattr(x, 'shape')",
                                  "assert x.zero_()", "x = ("])  # fmt: skip
def test_lines_that_do_not_compute_are_named_as_edits(line: str) -> None:
    with pytest.raises(CheckError, match=r"stage0.py:2: .*Undo the edit of this line"):
        check_source(f"x = 1\n{line}\n", "stage0.py")
    shows = "print in hooks.py; or return it beside the loss"
    with pytest.raises(CheckError, match=shows if "print" in line else r"\.$"):
        check_source(line, "stage0.py")
    check_source("x = []\nassert x.shape == (1, 2) and x.size(0) == 1, x.shape\n", "stage0.py")


@pytest.mark.parametrize("line", [
    "torch.ones(1).numpy().tofile('a')", "torch.ones(1).numpy().dump('a')",
    "torch.from_file('a', shared=True, size=4)", "torch.ops.load_library('a.so')",
    "torch.classes.load_library('a.so')", "torch.UntypedStorage.from_file('a', True, 16)",
    "torch.onnx.export(x, y, 'a')", "torch.profiler.profile().export_chrome_trace('a')",
    "torch.distributed.FileStore('a', 1)", "torch._C._jit_pass_lint(x)",
    "torch.cuda.memory._dump_snapshot('a')",
])  # fmt: skip
def test_what_of_torch_reads_or_writes_files_is_refused(line: str) -> None:
    with pytest.raises(CheckError, match="programs only compute with torch"):
        check_source(f"import torch\nx = y = torch.ones(1)\n{line}\n", "stage0.py")


def test_the_log_of_torch_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckError, match="cannot be run"):
        audit(edited(program("draws"), "d_second @ self.second_weight", "d_second @ d_second"))
    assert "fake_tensor" not in capfd.readouterr().err
