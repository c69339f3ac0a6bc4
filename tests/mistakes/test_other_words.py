"""Words of other libraries, entries that changed places, numbers as texts: told as meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import partc
from partc.wrong_calls import help_on
from tests.mistakes.things import (
    Mistake,
    Net,
    batch_of,
    check,
    compiled,
    loss_of,
    one_rank,
    program,
)

X, Y = batch_of()


NESTED = torch.nn.Sequential(
    torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4))), torch.nn.BatchNorm1d(4)
)


def plan(text: str, *words: str, mesh: str = "tp=2") -> Mistake:
    return partial(compiled, plan=text, mesh=mesh), words


def given(*words: str, **named: Any) -> Mistake:
    return partial(compiled, **named), words


def mesh(text: object, *words: str) -> Mistake:
    return partial(compiled, mesh=text), words


def compressed(entry: str, *words: str) -> Mistake:
    return plan(f'allow = ["compress"]\n[compress]\n{entry}', *words)


def islands(entry: str, *words: str) -> Mistake:
    return plan(f'allow = ["local_steps"]\n[local_steps]\n{entry}', *words, mesh="island=2")


def backward(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x, y)
    loss.backward()
    return loss


def load_as(second: Any) -> Callable[[], Any]:
    """``partc.load`` with a second argument, which is looked at before the program is."""
    return lambda: anything.load("no-such-folder", second)


def half_a_layer() -> Net:
    model = Net()
    model.down.half()
    return model


LOADER = DataLoader(TensorDataset(X, Y), batch_size=4)
anything: Any = partc
MISTAKES: dict[str, Mistake] = {
    # inputs and losses
    "a loader": given("a DataLoader stands", "one batch: next(iter(loader))", inputs=LOADER),
    "a loader in a tuple": given("one batch: next(iter(loader))", inputs=(LOADER,)),
    "a dataset": given("DataLoader(dataset, batch_size=16)", inputs=LOADER.dataset),
    "doubles": given("x is float64, up.weight is float32", "x.float().", inputs=(X.double(), Y)),
    "half a model": given("x.half(), or compute under torch.autocast", model=Net().half()),
    "half a layer": given(
        "down.weight is float16", "Cast the layer, model.down.float(), or in this line what is "
        "multiplied with the weights, x.half(), or compute under torch.autocast.",
        model=half_a_layer(),
    ),
    "a whole table beside halves": given(
        "Cast in this line what is multiplied with the weights, x.half(), or compute",
        model=Net().half(), loss=lambda m, x, y: loss_of(m, x + 1.0 * m.up.bias.float().sum(), y),
    ),
    "a loss for each row": given("32 numbers", "loss.mean()", loss=lambda m, x, y: m(x) - y),
    "layers that do not fit": given(
        "[8, 8] X [7, 4]", "1 has weight [4, 7], bias [4]", "correct one of the two",
        model=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(7, 4)),
    ),
    "rows as a batch": given("batch = 8", "Leave it out", "example inputs", batch=8),
    "no axis tp": given("'megatron-sp'", "tp=2, or leave", "plan='fsdp'", plan="megatron-sp"),
    "data beside dp": given("'data'", "one axis with dp", mesh="dp=2,data=2", plan="fsdp"),
    "DeepSpeed's file": given("partc plan --from ds.json --out plan.toml", plan="ds.json"),
    "a device of a load": (load_as("cuda:1"), ("load", "partc.load(folder).module('cuda:1')")),
    "a loss of a load": (load_as(loss_of), ("second argument", "partc.with_model(")),
    "weights of a load": (load_as({}), ("second argument", "stage.load_full(weights)")),
    "its own gradients": given("Return the loss alone", "loss that it returns", loss=backward),
    # entries of a plan
    "dim and axis": plan('[params]\n"up.weight" = { 0 = "tp" }', "up.weight", "Write { tp = 0 }"),
    "a dim as a text": plan('[params]\n"up.weight" = { tp = "0" }', "Write { tp = 0 }, without"),
    "a table of all": plan('[plan]\npreset = "ddp"', "'plan'", "Take the line [plan] away"),
    "of an input": plan('[inputs]\n"x" = { 0 = "tp" }', "inputs.x", "Write { tp = 0 }"),
    "of a value": plan('[values]\n"up:relu" = { 0 = "tp" }', "up:relu", "Write { tp = 0 }"),
    "of gather": plan('[gather]\nuse = "dp"', "gather.use", 'Write gather.dp = "use"'),
    "of scatter": plan('[scatter]\n1 = "tp"', "scatter.1", "Write scatter.tp = 1"),
    "accumulation in a plan": plan("gradient_accumulation = 4", "Leave it out: microbatches = 4"),
    "precision in a plan": plan('precision = "bf16"', "'precision'", "torch.autocast"),
    "checkpointing in a plan": plan("activation_checkpointing = true", 'recompute = "block"'),
    "a strategy in a plan": plan('sharding_strategy = "full"', 'preset = "fsdp" says'),
    "words of a batch": given("Write 'local': each rank is given rows of", batch="per-rank"),
    "no words of a batch": given(
        "'global', every rank is given the whole batch; or 'local', each rank", batch="x"
    ),
    "a sum's k": compressed('wire = "top-k"\nk = 100', "no entry 'k'", "Write share = 0.01"),
    "no entry of a sum": compressed('wire = "top-k"\nfoo = 1', "'foo'", "or leave it out"),
    "how often": islands("sync_every = 16", "'sync_every'", "Write period = 16"),
    "a * for several parts": given(
        "between dots * stands for one part", "Write '0.*.*.weight'",
        model=NESTED, plan='[params]\n"0.*.weight" = { tp = 0 }', mesh="tp=2",
    ),
    "a buffer": given(
        "'1.running_mean'", "it is a buffer", "Drop the entry", mesh="tp=2",
        model=NESTED, plan='[params]\n"1.running_mean" = { tp = 0 }',
    ),
    "another op": given(
        "no such value (it has 0.*.*:linear", "a module's path, a colon and an op", mesh="tp=2",
        model=NESTED, plan='[values]\n"0.*:matmul" = { tp = 1 }',
    ),
    "a scheme": compressed('wire = "topk"', "'topk'", "Did you mean 'top-k'"),
    "an outer": islands('period = 4\nouter = "nestrov"', "Did you mean 'nesterov'"),
    "a period": islands('period = "16"', "'16'", "Write period = 16, without quotation marks"),
    "a share": compressed('wire = "top-k"\nshare = "0.1"', "Write share = 0.1, without"),
    "allow": plan('allow = "compress"\n[compress]\nwire = "int8"', 'Write allow = ["compress"]'),
    "allow of a Plan": given('Write allow = ["compress"]', plan=anything.Plan(allow="compress")),
    # axes of a mesh
    "-1 ranks": mesh("dp=-1", "dp: -1 is not a size", '"dp=4" for 4 processes'),
    "-1 in a dict": mesh({"dp": -1}, "dp: -1 is not a size", '"dp=4" for 4 processes'),
    "half a rank": mesh("dp=2.5", "dp: 2.5 is not a size", "whole number from 1"),
    "ranks as a text": mesh({"dp": "2"}, "Write 2, without quotation marks"),
    "cp": mesh("dp=2,cp=2", "'cp'", "megatron-sp", "context parallelism"),
    "ep": mesh("ep=2", "'ep'", "expert parallelism", "Call it tp"),
    "data": mesh("data=2", "'data'", "Call it dp"),
    "pipe": mesh("pipe=2", "'pipe'", "Call it pp"),
    # arguments
    "islands": given("'local_steps'", 'allow = ["local_steps"]', "period = 16", local_steps=4),
    "compress": given("'compress'", '[compress]', compress="int8"),
    "inputs by place": (
        lambda: anything.compile(Net(), "dp=2", X, Y), ("(x, y), loss=loss_of",),
    ),
    "inputs of verify": (
        lambda: anything.verify(program(), Net(), X, Y, loss_of), ("(x, y), loss_of",),
    ),
    "a target as loss": (lambda: anything.Traced(Net(), X, Y), ("a Tensor", "(x, y)")),
    "local_batch": given('batch="local"', local_batch=True),
    "a scheduler": given("'scheduler'", "over the optimizer", scheduler=object()),
    "a learning rate": given("'learning_rate'", "of the optimizer", learning_rate=0.1),
    "a scale": given("'loss_scale'", "stage.step(..., scale=...)", loss_scale=2.0),
    "autocast": given("'amp'", "torch.autocast", amp=True),
    "clipping": given("stage.clip_grad_norm_", grad_clip=1.0),
    "accumulation": given("microbatches=4", accumulation_steps=4),
    "checkpointing": given('recompute="block"', gradient_checkpointing=True),
    "sharding": given('plan="fsdp"', sharding_strategy="FULL_SHARD"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str) -> None:
    check(MISTAKES[mistake])


def test_a_scale_of_a_step_has_its_name() -> None:
    with one_rank():
        stage: Any = compiled(mesh="dp=1").module()
        check((lambda: stage.step(X, Y, loss_scale=2.0), ("'loss_scale'", "mean 'scale'")))


def test_other_functions_have_their_own_words() -> None:
    check((lambda: anything.Mesh.load("dgx-h100", gpus=8), ("'gpus'", "machine, devices")))


def checked_calls() -> dict[str, Callable[..., Any]]:
    """Every function of partc whose arguments are checked, by its full name."""
    found = {}
    root = Path(partc.__file__).parent
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if not re.search(r"^ *@known_(arguments|fields)", text, re.M) or "wrappers" in path.parts:
            continue
        dotted = path.relative_to(root.parent).with_suffix("").as_posix().replace("/", ".")
        module = import_module(dotted.removesuffix(".__init__"))
        for each in [*vars(module).values()]:
            if getattr(each, "__module__", "") == module.__name__:
                for one in (each, *(vars(each).values() if isinstance(each, type) else ())):
                    one = getattr(one, "__func__", one)
                    if hasattr(one, "__wrapped__"):
                        found[f"{module.__name__}.{one.__qualname__}"] = one
    return found


def test_messages_point_at_what_help_knows() -> None:
    calls = checked_calls()
    assert len(calls) > 20
    with one_rank():
        stage = compiled(mesh="dp=1").module()
        for name, call in calls.items():
            pointer = help_on(call)
            named = pointer.removeprefix("help(").removesuffix(")")
            if named.startswith("partc.") and named.split(".")[1] not in partc.__all__:
                import_module(call.__module__)
            assert eval(named, {"stage": stage, "partc": partc}) is not None, (name, pointer)
    assert {help_on(calls["partc.program.stage.runtime.Stage.seed"])} == {"help(stage.seed)"}
