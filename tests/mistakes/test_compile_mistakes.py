"""Mistakes in calls of ``compile`` and ``verify``: each answer names the culprit and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import DataLoader, TensorDataset

import partc
from tests.mistakes.things import Mistake, Net, batch_of, check, compiled, loss_of, program

X, Y = batch_of()


def of(name: str, given: Any, *words: str) -> Mistake:
    """``compile`` with one argument that is wrong."""
    return partial(compiled, **{name: given}), words


def lazily(name: str, make: Callable[[], Any], *words: str) -> Mistake:
    return (lambda: compiled(**{name: make()})), words


def verified(*words: str, **changed: Any) -> Mistake:
    right = {"program": None, "model": Net(), "inputs": (X, Y), "loss": loss_of}

    def make() -> None:
        given = {**right, **changed}
        given["program"] = given["program"] or program()
        partc.verify(**given).check()

    return make, words


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


def wider(hidden: int = 6) -> Net:
    model = Net()
    model.up, model.down = nn.Linear(4, hidden), nn.Linear(hidden, 4)
    return model


def of_predictions(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).mean()


class OfPredictions(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return of_predictions(output, target)


class Bare(nn.Module):
    def __init__(self) -> None:
        self.width = 4


class Listed(Net):
    """A model whose layers no parameter list knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layers[0](x))


MISTAKES: dict[str, Mistake] = {
    "a class": of("model", Net, "the class Net", "Net(...)"),
    "a function": of("model", loss_of, "a function", "the module itself"),
    "a name": of("model", "m:Net", "'m:Net'", "partc compile"),
    "weights": lazily("model", lambda: Net().state_dict(), "an OrderedDict", "load_full"),
    "layers": lazily("model", lambda: [Net(), Net()], "a list", "nn.Sequential"),
    "forward": lazily("model", lambda: Net().forward, "a method", "without .forward"),
    "a program": lazily("model", program, "a Program"),
    "torch.compile": lazily("model", lambda: torch.compile(Net()), "Optimized", "model._orig_mod"),
    "DataParallel": lazily("model", lambda: nn.DataParallel(Net()), "Pass model.module"),
    "a compiled model as loss": lazily(
        "loss", lambda: torch.compile(Net()), "torch.compile", "inductor"
    ),
    "a compiled loss": lazily("loss", lambda: torch.compile(loss_of), "torch.compile", "inductor"),
    "wrapped inside": lazily(
        "model", lambda: nn.Sequential(nn.DataParallel(Net())), "model's 0", "model.0.module"
    ),
    "lazy": lazily(
        "model",
        lambda: nn.Sequential(nn.LazyLinear(4)),
        "LazyLinear",
        "once before",
        "loss(model, *inputs)",
    ),
    "doubles": lazily("model", lambda: Net().double(), "up", "float64 and float32", "x.double()"),
    "halves": lazily("model", lambda: Net().bfloat16(), "bfloat16 and float32"),
    "no inputs": of("inputs", None, "Net", "tuple of tensors"),
    "an empty tuple": of("inputs", (), "'x'", "example tensors for (x, target)"),
    "a loader": of("inputs", DataLoader(TensorDataset(X)), "DataLoader", "next(iter(loader))"),
    "shapes": of("inputs", ((8, 4), (8, 4)), "no tensor", "torch.empty"),
    "lists": of("inputs", (X.tolist(), Y.tolist()), "no tensor", "torch.as_tensor"),
    "numpy": of("inputs", (X.numpy(), Y.numpy()), "input x", "ndarray", "torch.from_numpy"),
    "one of two": of("inputs", X, "'target'", "(x, y)"),
    "one too many": of("inputs", (X, Y, X), "too many", "(x, target)"),
    "no rows": of("inputs", batch_of(0), "input x", "no rows", "DataLoader"),
    "whole numbers": of("inputs", (X.long(), Y.long()), "float32 and int64", "dtype"),
    "sparse": of("inputs", (X.to_sparse(), Y), "input x", "it is a sparse tensor", "to_dense"),
    "loss by name": of("loss", "mse", "'mse'", "lambda model, x, y"),
    "a tensor as loss": of("loss", torch.ones(()), "a Tensor", "lambda model, x, y"),
    "mesh of a digit that is none": of("mesh", "dp=\u00b2", "not an axis", "dp=2,tp=4"),
    "mesh of 5,000 digits": of("mesh", "dp=" + "9" * 5000, "not an axis", "dp=2,tp=4"),
    "a machine as mesh": of("mesh", "dgx-h100", "'dgx-h100'", "Mesh.load('dgx-h100'"),
    "no mesh file": of("mesh", "no.toml", "no.toml", "partc calibrate -o no.toml"),
    "a mesh without end": of("mesh", {"dp": 10**12}, "dp=1000000000000", "fewer ranks"),
    "a misspelt preset": of("plan", "fdsp", "'fdsp'", "Did you mean 'fsdp'"),
    "a misspelt auto": of("plan", "auot", "'auot'", "Did you mean 'auto'"),
    "upper case": of("plan", "FSDP", "Write 'fsdp'"),
    "commas": of("plan", "fsdp,megatron", "Write 'fsdp+megatron'"),
    "another word": of("plan", "zero3", "Write 'fsdp'"),
    "an axis": of("plan", "tp", "Write 'megatron'"),
    "auto and more": of("plan", "auto+megatron", "'auto' stands alone"),
    "a folder": of("plan", "build/", "plan.toml"),
    "json": of("plan", "plan.json", "partc plan --from plan.json"),
    "plan=None": of("plan", None, "plan is None", '"auto"'),
    "plan=3": of("plan", 3, "plan is 3", "plan='fsdp'"),
    "a dim without an axis": of(
        "plan", '[params]\n"up.weight" = 0', 'Write "up.weight" = { dp = 0 }'
    ),
    "a dict": of("plan", {"preset": "ddp"}, "plan is a dict", "Write it as TOML"),
    "a program's plan": lazily("plan", program, "a Program", "program.plan"),
    "a plan that is a folder": of("plan", Path(), "a directory", "plan.toml"),
    "text": of("microbatches", "4", "microbatches = '4'", "without quotation marks"),
    "half": of("microbatches", 2.5, "microbatches = 2.5", "whole number"),
    "far too many": of("microbatches", 10**6, "microbatches = 1000000", "65,536"),
    "a misspelt argument": of("microbatch", 2, "'microbatch'", "Did you mean 'microbatches'"),
    "an argument of others": of("optimizer", None, "'optimizer'", "Leave it out"),
    "no such schedule": of(
        "schedule", "interleaved", "Did you mean", "interleaved-1f1b", "import the module whose"
    ),
    "schedule=5": of("schedule", 5, "schedule = 5", '"1f1b"'),
    "a stage": of("stages", "down", "stages = 'down'", 'stages = ["'),
    "numbered stages": of("stages", [1], "stages = (1,)", "list of texts"),
    "virtual stages without end": of(
        "virtual_stages", 10**9, "virtual_stages = 1000000000", "10,000"
    ),
    "memory with a unit": of("memory_bytes", "16GB", "'16GB'", "16_000_000_000"),
    "memory=inf": of("memory_bytes", math.inf, "memory_bytes = inf", "whole number"),
    "recompute=True": of("recompute", True, "recompute = True", "'block'"),
    "recompute=full": of("recompute", "full", "'full'", "Write 'block': each block"),
    "recompute=False": of("recompute", False, "Write 'none'."),
    "recompute=selective": of("recompute", "Selective", "Write 'attention'"),
    "compile=True": of("compile", True, "Write 'inductor'."),
    "batch_norm=sync": of("batch_norm", "sync", "Write 'global'"),
    "a loss of predictions": of(
        "loss",
        lambda output, target: (output - target).mean(),
        "test_compile_mistakes.py:",
        "it takes (output, target), and is given the model and x, y",
        "loss=lambda model, x, y: F.cross_entropy(model(x), y)",
    ),
    "a named loss of predictions": of(
        "loss", of_predictions, "loss=of_predictions", "loss=lambda model, x, y: of_predictions("
    ),
    "a module of predictions": lazily("loss", OfPredictions, "lambda model, x, y", "the model and"),
    "a loss of the output": (
        lambda: compiled(inputs=(X,), loss=lambda out: out.mean()),
        ("lambda model, x: criterion",),
    ),
    "a loss that has no model in it": of(
        "loss",
        lambda out, x, y: (out - y).mean(),
        "the model stands",
        "F.cross_entropy(model(x), y)",
    ),
    "torch's loss of a model": of(
        "loss", lambda out, x, y: nn.functional.mse_loss(out, y), "the model stands"
    ),
    "a loss of a batch": of("loss", lambda model, batch: model(batch[0]), "((x, y),)"),
    "no loss of a target": of("loss", None, "lambda model, x, y: F.cross_entropy(model(x), y)"),
    "recompute=[3]": of("recompute", [3], "recompute = (3,)", "'attention'"),
    "misspelt recompute": of("recompute", "blocks", "'blocks'", "Did you mean 'block'"),
    "batch=8": of("batch", 8, "batch = 8", "'global'"),
    "one pass": of("disable", "fuse_loss", "disable is 'fuse_loss'", "disable=['fuse_loss']"),
    "dump=3": of("dump", 3, "compile(dump=...)", "3 is no path"),
    "cache=True": of("cache", True, "compile(cache=...)", "True is no path"),
    "another width": of("inputs", batch_of(8, 6), "do not fit", "x float32[8, 6]"),
    "texts": of("inputs", (["a"] * 8, Y), "must be Tensor", "tokenizer"),
    "a number of rows": of("inputs", 8, "int", "torch.zeros(8, 256)"),
    "labels of floats": of(
        "loss", lambda m, x, y: nn.functional.cross_entropy(m(x), y[:, 0]), "int64", ".long()"
    ),
    "a partial loss": of(
        "loss", partial(nn.functional.mse_loss, reduction="sum"), "the model stands", "m"
    ),
    "backward inside": of("loss", lambda m, x, y: backward(m(x).sum()), "gradients", "backward()"),
    "its own device": of("loss", lambda m, x, y: m(x.to("cuda")).sum(), "device", "module(device"),
    "no init": lazily("model", Bare, "a Bare", "super().__init__()"),
    "a list of layers": lazily("model", Listed, "layers[0].weight", "nn.ModuleList"),
    "no forward": lazily("model", lambda: nn.ModuleList([Net()]), "nn.Sequential"),
    "mesh=4": of("mesh", 4, "4 does not describe", "'dp=4'"),
    "sizes alone": of("mesh", (2, 2), "(2, 2)", "'dp=2,tp=2'"),
    "inputs for the mesh": of("mesh", (X, Y), "a tuple", "compile(model, mesh, inputs"),
    "another axis": of("mesh", "data=2", "'data'", "Call it dp"),
    "upper case axis": of("mesh", "DP=2", "'DP'", "Did you mean 'dp'"),
    "two presets": of("plan", ["fsdp", "megatron"], "'megatron'", "plan='fsdp+megatron'"),
    "torch's strategy": lazily("plan", lambda: ShardingStrategy.FULL_SHARD, "FULL_SHARD", "fsdp"),
    "an int in a Plan": lazily("plan", lambda: partc.Plan(preset=3), "preset = 3"),  # type: ignore[arg-type]
    "a cut in a Plan": lazily("plan", lambda: partc.Plan(params={"up.weight": {"dp": 0}}), "text"),  # type: ignore[dict-item]
    "a device": of("device", "cuda", "'device'", "program.module(device=...)"),
    "a world": of("world_size", 4, "'world_size'", 'mesh="dp=4"'),
    "kind": lazily("model", lambda: partc.Traced(Net(), (X, Y), loss_of), "traced step"),
    "verify without inputs": ((lambda: partc.verify(program(), Net())), ("'inputs'", "verify()")),  # type: ignore[call-arg]
    "verify a folder": verified("'build'", "partc.load('build')", program="build"),
    "verify a class": verified("the class Net", "Net(...)", model=Net),
    "verify a wrapper": verified("model._orig_mod", model=torch.compile(Net())),
    "verify another width": verified("3 of its tensors", "Compile again", model=wider()),
    "verify a dtype's name": verified("'float64'", "torch.float64", dtype="float64"),
    "verify another model": verified("[8, 5]", "[8, 4]", model=Net(5), inputs=batch_of(8, 5)),
    "verify whole numbers": verified("input x", "int64", "dtype", inputs=(X.long(), Y.long())),
    "verify downhill": verified("lr=", "-1", "from 0 on", lr=-1),
    "verify another loss": verified(
        "differ", "the loss that were compiled", loss=lambda m, x, y: (m(x) - y).abs().mean()
    ),
    "verify what is no number": verified(
        "the input x has NaN", "finite", inputs=(torch.full((8, 4), math.nan), Y)
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str) -> None:
    check(MISTAKES[mistake])


def test_a_wrong_kind_of_step_is_named() -> None:
    step = partc.Traced(Net(), (X, Y), loss_of, kind="train")  # type: ignore[arg-type]
    check((step.graph, ("kind='train'", "step, loss, forward")))


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'compile'"):
        _ = partc.complie  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "words"), [("save", "program.save"), ("bench", "partc bench")])
def test_a_name_of_partc_that_is_elsewhere_is_told(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(partc, name)


def test_ranks_that_divide_nothing_are_told() -> None:
    with pytest.warns(UserWarning, match="tp=2 cuts no weight"):
        compiled(model=wider(7), mesh="tp=2", plan="megatron")


class Unregistered(nn.Module):
    """Its layer is in a list, which registers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("plan", ["fsdp", "auto"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Net().requires_grad_(False), r"requires_grad.* model\.requires_grad_\(True\).*no_grad"),
        (
            Unregistered(),
            r"Unregistered: no parameter has requires_grad, as the model has none.*nn\.ModuleList",
        ),
    ],
)
def test_a_step_that_trains_nothing_is_told(model: nn.Module, said: str, plan: str) -> None:
    with pytest.warns(UserWarning, match=said):
        compiled(model=model, plan=plan)


def test_the_axes_of_a_mesh_are_pairs() -> None:
    check((lambda: partc.Mesh("dp=2"), ("'dp=2'", 'Mesh.of("dp=2,tp=4")')))  # type: ignore[arg-type]


def test_a_machine_is_meant() -> None:
    check((lambda: partc.Mesh.load("dgx-h10", 8), ("'dgx-h10'", "Did you mean 'dgx-h100'")))
