"""Losses that return ``(loss, extras)``: each extra is the single-device value in any layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import partc
from partc.audit.audit import audit
from partc.errors import PlanError, RunError, TraceError
from partc.plan import Plan
from partc.program import Program, load
from partc.program.step.arguments import Returned
from partc.trace.returns import LOSS
from partc.trace.trees import Tree
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.forked_scripts import run_ranks

BATCH, FEATURES, CLASSES, STEPS = 8, 12, 6, 4
LAYOUTS = (
    ("dp=2", "ddp", 1), ("dp=2", "fsdp", 1), ("tp=2", "megatron", 1), ("dp=2", "fsdp", 2),
    ("pp=2", "ddp", 2), ("pp=2,dp=2", "fsdp", 4),
)  # fmt: skip
Loss = Callable[..., Any]


class Classifier(nn.Module):
    """Residual blocks and a head; a residual crosses the blocks from outside."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, FEATURES))
            for _ in range(3)
        )
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = x
        for block in self.blocks:
            x = x + block(x)
        self.seen += len(first)
        return self.head(x + first), x


def classified(model: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Every kind of extra: rows, counts, means, inputs, weights, buffers, constants, the loss."""
    logits, hidden = model(images)
    loss = F.cross_entropy(logits, labels)
    hit = logits.argmax(-1) == labels
    return loss, {
        "logits": logits, "loss": loss, "correct": hit.sum(), "accuracy": hit.float().mean(),
        "hidden": [hidden, hidden.sum(0), (hidden.square().mean(1),)], "labels": labels,
        "of labels": (labels == 2, (labels == 2).sum()), "largest": logits.amax(1),
        "weight": model.head.weight, "seen": model.seen, "classes": CLASSES, "nothing": None,
        "zeros": torch.zeros(3),
    }  # fmt: skip


@cache
def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "images": torch.randn(BATCH, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (BATCH,), generator=generator),
    }


@cache
def step() -> partc.Traced:
    return partc.Traced(classifier(), images(), classified)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan", "microbatches"), LAYOUTS)
def test_extras_are_the_single_device_values(mesh: str, plan: str, microbatches: int) -> None:
    program = partc.compile(step(), mesh, plan=plan, microbatches=microbatches)
    report = verify(program, classifier(), images(), classified).check(1e-12)
    compared = {row.name for row in report.kinds()["extra"]}
    assert {"logits", "loss", "hidden.2.0", "of_labels.1", "weight", "seen", "zeros"} <= compared
    assert "classes" not in compared
    assert "numbers" in str(audit(program))


@pytest.mark.exhaustive
def test_auto_plans_and_compiled_functions_have_extras_too() -> None:
    program = partc.compile(step(), "dp=2,tp=2")
    verify(program, classifier(), images(), classified).check(1e-12)


class Deep(nn.Module):
    """Equal blocks, and an embedding that the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, FEATURES)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(8))

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = [self.table(ids)]
        for block in self.blocks:
            states.append(states[-1] + block(states[-1]).tanh())
        return states[-1] @ self.table.weight.T, states


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", [[8], [1, 5], range(9)])
def test_blocks_that_are_left_out_give_no_extra_twice(which: list[int]) -> None:
    def of_states(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
        scores, states = model(ids)
        extras = [states[i].square().mean() for i in which]
        return F.cross_entropy(scores, ids), (extras, ids > 3, model.table.weight.square().sum())

    torch.manual_seed(6)
    model, ids = Deep(), torch.arange(BATCH) % CLASSES
    program = partc.compile(model, "pp=4", (ids,), loss=of_states, plan="ddp", microbatches=4)
    verify(program, model, (ids,), of_states).check(1e-12)


@pytest.mark.exhaustive
def test_a_plan_says_what_comes_out_and_replays_to_the_same_text() -> None:
    made = [partc.compile(step(), "dp=2", plan=plan, microbatches=2) for plan in ("fsdp", "ddp")]
    notes = Plan.parse(made[0].plan).notes
    assert "extra logits: f32[8,6], gathered over dp, of all microbatches side by side" in notes
    assert "extra correct: i64[], summed over dp, of all microbatches" in notes
    assert "extra weight: f32[6,12], the same on every rank" in notes
    assert "extra logits" in made[0].source()
    for first in made:
        again = partc.compile(classifier(), "dp=2", images(), loss=classified, plan=first.plan)
        assert (again.plan, again.sources) == (first.plan, first.sources)


@pytest.mark.exhaustive
def test_a_step_without_microbatches_may_compute_with_its_sums() -> None:
    def perplexity(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(images)[0], labels)
        return loss, loss.exp()

    program = partc.compile(classifier(), "dp=2", images(), loss=perplexity, plan="ddp")
    verify(program, classifier(), images(), perplexity).check(1e-12)
    with pytest.raises(PlanError, match=r"needs the whole batch, not one microbatch.*its sums"):
        partc.compile(classifier(), "dp=2", images(), loss=perplexity, plan="ddp", microbatches=2)


@pytest.mark.exhaustive
def test_rows_that_are_not_in_a_row_come_out_in_the_batch_s_order() -> None:
    """With the sequence first, flat rows of one microbatch are spread over the whole."""

    def flat(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)  # [3, 8, 5]
        return F.mse_loss(out, y), out.flatten(0, 1)

    model, shape = nn.Linear(5, 5), (3, BATCH, 5)
    batch = torch.randn(shape), torch.randn(shape)
    for microbatches, cuts in ((1, "dp = 1"), (2, "dp = 1, mb = 1")):
        plan = f'preset = "ddp"\n[inputs]\n"*" = {{ {cuts} }}\n'
        program = partc.compile(
            model, "dp=2", batch, loss=flat, plan=plan, microbatches=microbatches
        )
        verify(program, model, batch, flat).check(1e-12)


def assert_close(one: Any, other: Any) -> None:
    plain = tree_map_only(Tensor, Tensor.detach, other)  # a loss may return a parameter
    torch.testing.assert_close(one, plain, rtol=1e-12, atol=1e-12)


# in processes, as scripts have them ---------------------------------------------------------------
def steps_in_structure(folder: Path, batch: dict[str, Tensor]) -> None:
    stage = load(folder).module()
    model = Classifier().double()
    model.load_state_dict(torch.load(folder.parent / "weights.pt"))
    stage.load_full(model)
    ways: list[Callable[[], Any]] = [
        lambda: stage.step(**batch),
        lambda: stage.step(batch["images"], labels=batch["labels"]),
    ]
    if stage.pipeline is None:
        ways.append(lambda: stage(**batch))
    for way in ways:
        expected, wanted = classified(model, **batch)
        loss, extras = way()
        assert_close(loss, expected)
        assert list(extras) == list(wanted)
        assert extras["classes"] == CLASSES
        assert extras["nothing"] is None
        assert isinstance(extras["hidden"][2], tuple)
        for name in ("logits", "correct", "labels", "of labels", "weight", "loss"):
            assert_close(extras[name], wanted[name])
        plain = extras["logits"], extras["loss"], extras["weight"]
        assert not any(x.requires_grad for x in plain)
    assert loss.requires_grad == (stage.pipeline is None)


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("at", [1, 3])
def test_steps_give_the_structure_of_the_loss(world: Processes, tmp_path: Path, at: int) -> None:
    mesh, plan, microbatches = LAYOUTS[at]
    model, batch = Classifier().double(), images()
    batch["images"] = batch["images"].double()
    partc.compile(
        model, mesh, batch, loss=classified, plan=plan, microbatches=microbatches
    ).save(tmp_path / "made")  # fmt: skip
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    world.run(steps_in_structure, tmp_path / "made", batch, num=2)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_pipelines_of_processes_give_extras(world: Processes) -> None:
    program = partc.compile(
        classifier(), "pp=2,dp=2", images(), loss=classified, plan="fsdp", microbatches=2
    )
    verify(program, classifier(), images(), classified, processes=True).check(1e-12)


def test_the_script_of_a_saved_program_prints_the_loss_alone(tmp_path: Path) -> None:
    made = tmp_path / "made"
    partc.compile(classifier(), "dp=1", images(), loss=classified, plan="ddp").save(made)
    (done,) = run_ranks(made / "run.py", "--steps", "1", "--device", "cpu", num=1)
    assert done.code == 0
    assert "step 0  loss " in done.text


def test_a_class_that_a_process_lacks_is_named() -> None:
    loss, rows = Tree("tensor", name=LOSS), Tree("tensor", name="rows")
    extras = Tree("fields", entries=(("rows", rows),), of="train_script:Metrics")
    returned = Returned(Tree("tuple", entries=((0, loss), (1, extras))))
    with pytest.raises(RunError, match=r"the loss returns a Metrics.*Import train_script before"):
        returned.whole(returned.loss((torch.ones(()), {"rows": torch.ones(2)})))


# a state that goes on -----------------------------------------------------------------------------
class Tagger(nn.Module):
    """An LSTM whose state goes from one step into the next."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        out, state = self.rnn(x, state)
        return self.head(out), state


def tagged(model: nn.Module, x: Tensor, y: Tensor, state: Any) -> tuple[Tensor, Any]:
    scores, state = model(x, state)
    return F.cross_entropy(scores.flatten(0, 1), y.flatten()), state


def texts(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(BATCH, STEPS, 5, generator=generator, dtype=torch.float64),
            torch.randint(3, (BATCH, STEPS), generator=generator),
        )
        for _ in range(num)
    ]  # fmt: skip


def first_state() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, BATCH, 6, dtype=torch.float64), torch.zeros(1, BATCH, 6).double()


def tagger() -> Tagger:
    torch.manual_seed(3)
    return Tagger().double()


def trained(step: Callable[..., Any], params: Any, backward: bool) -> list[float]:
    optimizer, losses, state = torch.optim.SGD(params, lr=0.5), [], first_state()
    for x, y in texts(3):
        optimizer.zero_grad()
        loss, state = step(x, y, tuple(each.detach() for each in state))
        if backward:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_tagger(program: Program) -> list[float]:
    stage = program.module()
    stage.load_full(tagger())
    return trained(stage.step, stage.parameters(), False)


PINNED = 'preset = "{}"\n[inputs]\n"state.*" = {{ dp = 1 }}\n'


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "plan"),
    [("dp=2", PINNED.format("ddp")), ("dp=2", PINNED.format("fsdp")), ("tp=2", "megatron")],
)
def test_a_hidden_state_goes_into_the_next_step(world: Processes, mesh: str, plan: str) -> None:
    model = tagger()
    expected = trained(lambda *a: tagged(model, *a), model.parameters(), True)
    batch = (*texts(1)[0], first_state())
    program = partc.compile(tagger(), mesh, batch, loss=tagged, plan=plan)
    verify(program, tagger(), batch, tagged).check(1e-12)
    for losses in world.run(train_tagger, program, num=2):
        assert losses == pytest.approx(expected, rel=1e-12)


# what a GAN looks at ------------------------------------------------------------------------------
def discriminated(model: nn.Module, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As a script has it: the loss, D(x) and D(G(z))."""
    on_real, on_fake = model(real), model(fake)
    loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
    return loss, on_real.sigmoid().mean(), on_fake.sigmoid().mean()


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan", "microbatches"), LAYOUTS)
def test_what_a_discriminator_says(mesh: str, plan: str, microbatches: int) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1)
    )
    batch = torch.randn(BATCH, FEATURES), torch.randn(BATCH, FEATURES)
    program = partc.compile(
        model, mesh, batch, loss=discriminated, plan=plan, microbatches=microbatches
    )
    report = verify(program, model, batch, discriminated).check(1e-12)
    assert {row.name for row in report.kinds()["extra"]} == {"1", "2"}


# refusals -----------------------------------------------------------------------------------------
def with_a_model(model: nn.Module, images: Tensor, labels: Tensor) -> Any:
    return model(images)[0].mean(), {"model": model}


def last(model: nn.Module, images: Tensor, labels: Tensor) -> Any:
    logits = model(images)[0]
    return logits, F.cross_entropy(logits, labels)


def alone(model: nn.Module, images: Tensor, labels: Tensor) -> Any:
    return model(images)[0]


def named(model: nn.Module, images: Tensor, labels: Tensor) -> Any:
    logits = model(images)[0]
    return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def as_a_number(model: nn.Module, images: Tensor, labels: Tensor) -> Any:
    loss = F.cross_entropy(model(images)[0], labels)
    return loss, {"loss": loss.item()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (with_a_model, r"what the loss returns, extras\.model: it is a Classifier"),
        (last, r"the loss is a tuple, and its first entry a tensor.*8, 6.*Return the loss first"),
        (alone, r"the loss is a tensor.*numbers.*loss.mean\(\)"),
        (named, r"the loss is a dict.*Return its loss, or \(loss, extras\)"),
        (as_a_number, r"asks for the value of a tensor.*return the tensor itself"),
    ],
)
def test_what_is_no_loss_says_what_to_do(loss: Loss, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        partc.compile(classifier(), "dp=2", images(), loss=loss, plan="ddp")
