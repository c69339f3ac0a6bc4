"""Batches of any structure: dicts, lists, named tuples, dataclasses, None and numbers."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.cli.main import main
from partc.errors import LoadError, RunError, TraceError
from partc.lowering import trace
from partc.plan import Plan
from partc.program import Program, load
from partc.program.step.arguments import tensors_given
from partc.trace.arguments import Arguments, Given
from partc.trace.trees import Names, Tree, TreeError, filled, tensors_of, tree_of
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.program.test_bad_input import rewrite_manifest as rewrite

SIZE, WIDE = 8, 6


class Boxes(NamedTuple):
    """Of every image its boxes and what they are."""

    places: Tensor
    kinds: Tensor


@dataclass(frozen=True)
class Batch:
    """As a collate function returns it."""

    images: list[Tensor]
    target: dict[str, Any]
    boxes: Boxes
    scale: float = 0.5
    mask: Tensor | None = None
    name: str = field(default="train")


class Encoding(UserDict[str, Tensor]):
    """A mapping that is no dict, as tokenizers return."""


class Detector(nn.Module):
    """Two inputs of the same model, with a parameter named as an input is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, 10), nn.Linear(WIDE, 10)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: list[Tensor]) -> Tensor:
        y: Tensor = self.scale * (self.first(images[0]) + self.second(images[1]).relu())
        return y


def detected(model: nn.Module, batch: Batch, power: float = 2.0, *, reduce: str = "mean") -> Any:
    assert batch.mask is None
    out = model(batch.images)
    target = batch.target.pop("values")  # what a loss does to its batch changes nothing
    near = (out - target).abs() ** power * batch.scale + (out - batch.boxes.places).square()
    picked = F.cross_entropy(out, batch.boxes.kinds)
    return getattr(near, reduce)() + picked


def batch_of(seed: int = 0, **changes: Any) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    images = [torch.randn(SIZE, WIDE, generator=draw) for _ in range(2)]
    values, places = (torch.randn(SIZE, 10, generator=draw) for _ in range(2))
    boxes = Boxes(places, torch.randint(10, (SIZE,), generator=draw))
    made: dict[str, Any] = {
        "images": images,
        "target": {"values": values, "ids": 7},
        "boxes": boxes,
    }
    return Batch(**made | changes)


def detector() -> Detector:
    torch.manual_seed(1)
    return Detector()


NAMES = [
    "batch.images.0", "batch.images.1", "batch.target.values", "batch.boxes.places",
    "batch.boxes.kinds",
]  # fmt: skip


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("mesh", "plan", "microbatches"),
    [("dp=2", "ddp", 1), ("dp=2", "fsdp", 2), ("tp=2", "megatron", 1), ("pp=2", "ddp", 2)],
)
def test_a_nested_batch_computes_as_on_one_device(mesh: str, plan: str, microbatches: int) -> None:
    given = (batch_of(), 3.0)
    program = partc.compile(
        detector(), mesh, given, loss=detected, plan=plan, microbatches=microbatches
    )
    assert list(program.inputs) == NAMES
    assert "batch_images_0: Tensor" in program.source()
    if "dp" in mesh:
        assert Plan.parse(program.plan).inputs["batch.boxes.kinds"]["dp"].dim == 0
    verify(program, detector(), given, detected).check(1e-12)
    with pytest.raises(RunError, match=r"batch\.scale: it was the number 0\.5 when compiled"):
        _tensors(program, batch_of(scale=0.25), 3.0)


def _tensors(program: Program, *args: Any, **kwargs: Any) -> Any:
    return tensors_given(program.arguments, args, kwargs)


@pytest.fixture(scope="module")
def program() -> Program:
    return partc.compile(detector(), "dp=2", (batch_of(),), loss=detected, plan="fsdp")


def test_arguments_bind_as_the_loss_binds_them(program: Program) -> None:
    batch = batch_of(3)
    expected = [*batch.images, batch.target["values"], *batch.boxes]
    for args, kwargs in (
        ((batch,), {}), ((), {"batch": batch}), ((batch, 2.0), {"reduce": "mean"}),
        ((batch_of(3, images=tuple(batch.images)),), {}),
    ):  # fmt: skip
        found = _tensors(program, *args, **kwargs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'batch'.*it takes"),
        ((batch_of(), 2.0, 3), {}, "too many positional arguments"),
        ((batch_of(),), {"batch": batch_of()}, "multiple values for argument 'batch'"),
        ((batch_of(),), {"mean": 1}, "there is no argument 'mean'"),
        ((batch_of(), 3.0), {}, "step, power: it was the number 2.0 when compiled, and is the "),
        ((batch_of(),), {"reduce": "sum"}, "reduce: it was the string 'mean' when compiled"),
        ((batch_of(mask=torch.ones(8)),), {}, "mask: it was None when compiled, and is a tensor"),
        ((batch_of(scale=torch.ones(())),), {}, "scale: it was the number 0.5.*is a tensor now"),
        ((batch_of(target={"values": torch.ones(1)}),), {}, "batch.target.ids: it is missing"),
        (
            (batch_of(target={"values": torch.ones(1), "ids": 7, "more": 1}),), {},
            "batch.target.more: there was none when compiled",
        ),
        ((batch_of(images=[torch.ones(1)]),), {}, "batch.images.1: it is missing"),
        ((batch_of(images=None),), {}, "batch.images: it was a list when compiled, and is None"),
        (({"images": 1},), {}, r"it was a Batch when compiled, and is a dict now.*\*\*batch"),
        ((batch_of(target={"values": 0.5, "ids": 7}),), {}, "values: it was a tensor when"),
        ((batch_of(target={"values": torch.ones(1), "ids": True}),), {}, "ids: .* 7 .* True now"),
    ],
)  # fmt: skip
def test_what_differs_is_refused_by_name(
    program: Program, args: Any, kwargs: Any, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        _tensors(program, *args, **kwargs)


# a dict by name -----------------------------------------------------------------------------------
@dataclass
class Output:
    """As transformers' models return."""

    loss: Tensor | None
    logits: Tensor


class Labelled(nn.Module):
    """A model that computes its loss if it has labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, WIDE), nn.Linear(WIDE, 11)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        dtype: torch.dtype = torch.float32, **kwargs: Any,
    ) -> Output:  # fmt: skip
        x = self.table(input_ids).cumsum(1)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(11, (SIZE, 4), generator=torch.Generator().manual_seed(5))
    return {"labels": ids, "input_ids": ids, "attention_mask": (ids > 2).long()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [dict, OrderedDict, Encoding])
def test_a_dict_is_given_by_name(kind: Any) -> None:
    torch.manual_seed(2)
    model, batch = Labelled(), kind(tokens())
    program = partc.compile(model, "dp=2", batch, plan="ddp")
    assert list(program.inputs) == ["input_ids", "attention_mask", "labels"]
    verify(program, model, batch).check(1e-12)
    for other in (tokens(), dict(reversed(tokens().items())), {**tokens(), "dtype": None}):
        if "dtype" not in other:
            assert len(_tensors(program, **other)) == 3
            continue
        with pytest.raises(RunError, match="dtype: it was left out when compiled"):
            _tensors(program, **other)
    assert len(_tensors(program, tokens()["input_ids"], tokens()["attention_mask"],
                        labels=tokens()["labels"])) == 3  # fmt: skip
    with pytest.raises(RunError, match=r"labels: it was given when compiled, and is left out now"):
        _tensors(program, input_ids=tokens()["input_ids"], attention_mask=tokens()["labels"])
    with pytest.raises(RunError, match=r"kwargs\.position_ids: there was none when compiled"):
        _tensors(program, **tokens(), position_ids=tokens()["labels"])


def test_a_dict_of_a_loss_is_given_by_name_too() -> None:
    def loss_of(model: nn.Module, **batch: Tensor) -> Tensor:
        found = model(**batch).loss
        assert isinstance(found, Tensor)
        return found

    torch.manual_seed(2)
    model = Labelled()
    program = partc.compile(model, "dp=2", tokens(), loss=loss_of, plan="ddp")
    assert sorted(program.inputs) == sorted(tokens())
    verify(program, model, tokens(), loss_of).check(1e-12)


def test_names_stay_apart() -> None:
    """Of two keys that spell alike, and of an input that is named as a tensor of the model is."""

    def loss_of(model: nn.Module, first: Any, scale: Tensor) -> Tensor:
        out = model([first["a b"], first["a_b"]])
        found: Tensor = (out * scale).mean() + first[3].mean()
        return found

    x = torch.randn(SIZE, WIDE)
    given = Given.of(detector(), ({"a b": x, "a_b": x, 3: x}, x[:, :1]), loss_of)
    assert given.names == ["first.a_b", "first.a_b_1", "first.3", "input_scale"]
    program = partc.compile(detector(), "dp=2", given, loss=loss_of, plan="ddp")
    verify(program, detector(), given).check(1e-12)


@pytest.mark.parametrize(
    ("inputs", "loss", "message"),
    [
        ((object(),), None, "input input: it is an object"),
        (({"x": {1, 2}},), lambda m, b: m(b["x"]).sum(), "input b.x: it is a set"),
        (({(1, 2): 3},), lambda m, b: m(b).sum(), r"its key is a tuple, no string or number"),
        ({"x": torch.ones(2, WIDE)}, None, r"missing a required argument: 'input'"),
        (
            {"x": torch.ones(2, WIDE)},
            lambda m, b: m(b["x"]).sum(),
            r"As one argument they are \(\{",
        ),
        ((torch.ones(2, WIDE), 3), lambda m, x: m(x).sum(), "too many positional arguments"),
        ((torch.ones(2, WIDE),) * 2, nn.MSELoss(), r"loss=MSELoss: it takes no model.*criterion"),
        ((torch.ones(2, WIDE),) * 2, F.mse_loss, r"loss=mse_loss: it takes no model"),
        ((torch.ones(2, WIDE),), "mse", "loss='mse': it is no function"),
    ],
)
def test_what_is_no_input_is_refused(inputs: Any, loss: Any, message: str) -> None:
    model = nn.Linear(WIDE, 3)
    with pytest.raises(TraceError, match=message):
        trace(model, inputs, loss)


def test_a_tensor_beside_the_fields_of_a_dataclass_is_refused() -> None:
    @dataclass
    class Odd:
        x: Tensor

        def __post_init__(self) -> None:
            self.double = 2 * self.x

    with pytest.raises(TraceError, match=r"input b.double: it is a tensor beside the fields"):
        trace(nn.Linear(WIDE, 3), (Odd(torch.ones(2, WIDE)),), lambda m, b: m(b.double).sum())


# saved --------------------------------------------------------------------------------------------
def test_descriptions_are_plain_data(program: Program, tmp_path: Path) -> None:
    assert Arguments.of_json(program.arguments.as_json()) == program.arguments
    program.save(tmp_path / "made")
    again = load(tmp_path / "made")
    assert again.arguments == program.arguments
    verify(again, detector(), (batch_of(),), detected).check(1e-12)
    tensors = dict(zip(again.inputs, _tensors(again, batch_of()), strict=True))
    args, kwargs = again.arguments.call(tensors)
    assert all(map(torch.equal, _tensors(again, *args, **kwargs), tensors.values()))


@pytest.mark.parametrize(
    "data",
    [
        {"tensor": 3}, {"value": [1]}, {"dict": [[True, {"value": 1}]]}, {"sets": []}, {},
        {"list": [[0, {"value": 1}]], "made": "os:system"}, {"fields": [], "of": 3},
    ],
)  # fmt: skip
def test_other_data_describes_nothing(data: Any) -> None:
    with pytest.raises((ValueError, StopIteration, TypeError, KeyError)):
        Tree.of_json(data)


def test_a_value_is_built_of_its_classes_or_refused() -> None:
    value: dict[str, Any] = {"a": [batch_of(), None], "b": Boxes(torch.ones(1), torch.ones(2))}
    tree = tree_of(value, "", Names(), "")
    tensors = dict(zip(tree.names(), tensors_of(value), strict=True))
    again = Tree.of_json(tree.as_json())
    assert again == tree
    built = again.built(tensors)
    assert isinstance(built["a"][0], Batch)
    assert isinstance(built["b"], Boxes)
    assert [*again.tensors(built, "")] == [*tensors.values()]
    elsewhere = Tree("fields", entries=tree.entries, of="no_such_module:Batch")
    with pytest.raises(TreeError, match="no such class"):
        elsewhere.built(tensors)
    copy = filled(value, iter(tensors.values()))
    assert copy["a"][0] is not value["a"][0]
    assert copy["b"].kinds is tensors["b.kinds"]


def test_damaged_arguments_are_refused(program: Program, tmp_path: Path) -> None:
    program.save(tmp_path / "made")
    rewrite(tmp_path / "made", lambda m: m["arguments"].pop())
    load(tmp_path / "made")  # an argument without tensors
    rewrite(tmp_path / "made", lambda m: m["arguments"].pop(0))
    with pytest.raises(LoadError, match="its arguments are not its inputs"):
        load(tmp_path / "made")


MODULE = """
import torch
from tests.whole.test_batches import detected, batch_of, detector

def setup():
    return detector(), {"batch": batch_of()}, detected
"""


@pytest.mark.exhaustive
def test_the_command_line_takes_a_dict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "with_a_dict.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    out = str(tmp_path / "made")
    assert (
        main(["compile", "with_a_dict:setup", "--mesh", "dp=2", "--plan", "ddp", "--out", out]) == 0
    )
    assert main(["verify", out, "--model", "with_a_dict:setup"]) == 0
    assert main(["check", out]) == 0
    assert "equal" in capsys.readouterr().out
    assert main(["explain", out, "--model", "with_a_dict:setup"]) == 0


# in processes -------------------------------------------------------------------------------------
def steps_of(folder: Path) -> None:
    stage = load(folder).module()
    model = detector()
    stage.load_full(model)
    expected = detected(model, batch_of(3))
    expected.backward()
    for given in ((batch_of(3),), (batch_of(3), 2.0)):
        stage.zero_grad()
        torch.testing.assert_close(stage.step(*given), expected.detach())
    loss = stage(batch=batch_of(3))
    stage.zero_grad()
    loss.backward()
    for name, param in stage.named_parameters():
        grad: Any = param.grad
        torch.testing.assert_close(grad.full_tensor(), model.get_parameter(name).grad)


@pytest.mark.gloo
def test_stages_take_nested_batches(world: Processes, program: Program, tmp_path: Path) -> None:
    program.save(tmp_path / "made")
    world.run(steps_of, tmp_path / "made", num=2)
