"""Functions of the user's, beside a saved program, which its text calls by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.audit.audit import audit
from partc.errors import LoadError, PlanError, RunError
from partc.program import Program, load
from partc.program.hooks import NAME, check_hooks, set_hooks

X = torch.randn(8, 6)
ENTRIES = ("layers.*.up", "layers.*.up.grad", "layers.*", "layers.*.grad", "head.grad")
OWN = """
def layers(x):
    return x * 0.5

def layers_grad(d):
    return d * 0.5

def layers_up(x):
    return x.clamp(-0.3, 0.3)

def layers_up_grad(d):
    return d * 2

def head_grad(d):
    return d.clamp(-0.002, 0.002)
"""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class Tower(nn.Module):
    def __init__(self, edited: bool = False) -> None:
        super().__init__()
        self.edited = edited
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if not self.edited else _edited(layer, x)
        y = self.head(x)
        if self.edited:
            y = own(y, lambda x: x, lambda d: d.clamp(-0.002, 0.002))
        loss: Tensor = y.pow(2).mean()
        return loss


class _Own(torch.autograd.Function):
    """A value through one function, its gradient through another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Any, grad: Any) -> Any:
        ctx.grad = grad
        return value(x).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.grad(grads[0]), None, None


def own(x: Tensor, value: Any, grad: Any) -> Tensor:
    through: Tensor = _Own.apply(x, value, grad)  # type: ignore[no-untyped-call]
    return through


def _edited(layer: Any, x: Tensor) -> Tensor:
    """What the functions of OWN make of a layer."""
    up = own(layer.up(x), lambda x: x.clamp(-0.3, 0.3), lambda d: d * 2)
    return own(x + layer.down(F.gelu(up)), lambda x: x * 0.5, lambda d: d * 0.5)


def saved(folder: Path, mesh: str, preset: str, **fields: object) -> Program:
    plan = partc.Plan(preset=preset, hooks=ENTRIES, **fields)  # type: ignore[arg-type]
    torch.manual_seed(0)
    program = partc.compile(Tower(), mesh, (X,), plan=plan)
    program.save(folder)
    return program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hooks") / "build"
    saved(place, "dp=2", "fsdp")
    return place


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("mesh", "preset", "fields"),
    [
        ("dp=2,tp=2", "fsdp+megatron-sp", {}),
        ("pp=2,dp=2", "zero1", {"microbatches": 2}),
        ("dp=2", "ddp", {"recompute": "block", "profiler_ranges": True}),
    ],
)
def test_functions_do_what_the_same_edit_of_the_model_does(
    mesh: str, preset: str, fields: dict[str, object], tmp_path: Path
) -> None:
    program = saved(tmp_path / "build", mesh, preset, **fields)
    model, other = Tower(), Tower(edited=True)
    other.load_state_dict(model.state_dict())
    partc.verify(
        program, model, (X,)
    ).check()  # in the process that compiled it they change nothing
    partc.verify(
        load(tmp_path / "build"), model, (X,)
    ).check()  # nor does the file as it is written
    (tmp_path / "build" / NAME).write_text(OWN)
    program = load(tmp_path / "build")
    partc.verify(program, other, (X,)).check()
    assert partc.verify(program, model, (X,)).worst.error > 1e-2
    assert f"what your functions in {NAME} compute: head_grad, layers, " in str(audit(program))


@pytest.mark.exhaustive
def test_a_recompile_leaves_the_file_alone(folder: Path) -> None:
    mine = (folder / NAME).read_text() + "\nMINE = 1\n"
    (folder / NAME).write_text(mine)
    load(folder).save(folder)
    saved(folder, "dp=2", "ddp")
    assert (folder / NAME).read_text() == mine
    partc.compile(Tower(), "dp=2", (X,), plan="ddp").save(folder)  # which calls none
    assert (folder / NAME).read_text() == mine
    assert load(folder).hooks is None
    saved(folder, "dp=2", "fsdp")


@pytest.mark.exhaustive
def test_further_programs_call_the_same_functions(folder: Path, tmp_path: Path) -> None:
    (folder / NAME).write_text(OWN)
    model = Tower()
    program = partc.with_model(load(folder), model)
    more = program.for_shapes((X[:4],), modes=("train", "forward"))
    assert [each.hooks for each in more.others] == [OWN, OWN]
    more.save(tmp_path / "build")  # a folder of its own has a file of its own
    (tmp_path / "build" / NAME).write_text(OWN)
    assert [each.hooks for each in load(tmp_path / "build").others] == [OWN, OWN]


@pytest.mark.exhaustive
def test_a_program_of_the_cache_has_no_file(tmp_path: Path) -> None:
    plan = partc.Plan(preset="ddp", hooks=("head",))
    for _ in range(2):
        program = partc.compile(Tower(), "dp=2", (X,), plan=plan, cache=tmp_path)
        assert "hooks.head(" in program.source()
        assert program.hooks is None


@pytest.mark.exhaustive
def test_what_is_missing_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    program = saved(tmp_path / "build", "dp=2", "fsdp")
    with pytest.raises(RunError, match="there is no function head_grad"):
        check_hooks(program.sources.values(), program.hooks)
    for text, said in (
        (OWN.replace("def head_grad", "def heads_grad"), "has no function head_grad"),
        (
            OWN.replace("def head_grad", "def head_grad("),
            r"cannot be read .SyntaxError: .*, at hooks\.py:14: def head_grad.* Mend that line",
        ),
    ):
        (tmp_path / "build" / NAME).write_text(text)
        with pytest.raises(LoadError, match=said):
            load(tmp_path / "build")
    (tmp_path / "build" / NAME).write_text(f"{OWN}\nlimit = 1 / 0\n")
    with pytest.raises(LoadError, match=r"ZeroDivisionError: .*, at hooks\.py:17: limit = 1 / 0"):
        load(tmp_path / "build").role(0)
    (tmp_path / "build" / NAME).unlink()
    with pytest.raises(LoadError, match="cannot be read"):
        load(tmp_path / "build")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return x.sum()", r"it returns \\(\\) torch.float32"),
        ("return x.mul_(2)", "it writes to its argument"),
        ("return None", "it returns NoneType"),
    ],
)
def test_what_a_function_may_not_do(folder: Path, body: str, said: str) -> None:
    text = OWN.replace("return x * 0.5", body)
    role = load(folder).role(0)
    set_hooks(role.module, load(folder).source(0), text)
    with pytest.raises(RunError, match=said.replace("\\\\", "\\")):
        role.module.hooks.layers(X.clone())


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("layers.*.upp", "no such module"),
        ("layers.0.up", "one module of a list"),
    ],
)
def test_entries_that_mean_nothing(entry: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        partc.compile(Tower(), "dp=2", (X,), plan=partc.Plan(preset="ddp", hooks=(entry,)))


def test_not_within_compiled_functions() -> None:
    plan = partc.Plan(preset="ddp", hooks=("head",), compile="inductor")
    with pytest.raises(PlanError, match="inductor"):
        partc.compile(Tower(), "dp=2", (X,), plan=plan)
