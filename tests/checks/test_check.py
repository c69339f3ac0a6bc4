"""Static checks accept sound graphs and find what was spoiled in them; numbers find the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partc.checks.local_graph import check
from partc.errors import CheckError
from partc.graph import Graph, collectives, ops, tensor_args, update
from partc.lowering import partition, trace
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import R, U, cut
from tests.build import Build, aten, mlp
from tests.checks.mutate import NUMERIC, STATIC, mutants
from tests.simulate import simulate
from tests.zoo import MODELS


def gathers() -> Graph:
    """A weight stored in pieces over dp, gathered for use, its gradient scattered: ZeRO-3."""
    b = Build("dp=2,tp=2")
    w = b.tensor("param", "w", [16, 12], dp=cut(0))
    x = b.tensor("input", "x", [8, 12])
    mine = b.collective(collectives.keep_piece, x, "dp", dim=0, after=cut(0))
    whole = b(collectives.wait, b.collective(collectives.all_gather, w, "dp", dim=0))
    y = b(aten.mm.default, mine, b(aten.t.default, whole), dp=cut(0))
    total = b(aten.sum.dim_IntList, b(aten.mul.Tensor, y, y, dp=cut(0)), [0, 1], dp=U)
    loss = b.reduced(total, "dp")
    b.phase = "B"
    d_y = b(aten.mul.Tensor, y, 2, dp=cut(0))
    d_w = b(aten.mm.default, b(aten.t.default, d_y, dp=cut(1)), mine, dp=U)
    piece = b.collective(collectives.reduce_scatter, d_w, "dp", dim=0, after=cut(0))
    return b.done(loss=loss, grads={"w": b(collectives.wait, piece, dp=cut(0))})


def joined() -> Graph:
    """Two weights of one type gathered, and their gradients scattered, in one transfer each."""
    b = Build("dp=2,tp=2")
    w, v = (b.tensor("param", name, [16, 12], dp=cut(0)) for name in "wv")
    x = b.tensor("input", "x", [8, 12])
    mine = b.collective(collectives.keep_piece, x, "dp", dim=0, after=cut(0))
    cuts: dict[str, Any] = {"dims": [0, 0], "outers": [1, 1]}
    whole = b.joined(collectives.all_gather_joined, [w, v], "dp", R, **cuts)
    y, z = (b(aten.linear.default, mine, weight, dp=cut(0)) for weight in whole)
    y_z = b(aten.mul.Tensor, y, z, dp=cut(0))
    total = b(aten.sum.dim_IntList, b(aten.mul.Tensor, y_z, y, dp=cut(0)), [0, 1], dp=U)
    loss = b.reduced(total, "dp")
    b.phase = "B"
    d_y, d_z = b(aten.mul.Tensor, y_z, 2, dp=cut(0)), b(aten.mul.Tensor, y, y, dp=cut(0))
    d_w, d_v = (b(ops.weight_grad, d, mine, dp=U) for d in (d_y, d_z))
    pieces = b.joined(collectives.reduce_scatter_joined, [d_w, d_v], "dp", cut(0), **cuts)
    return b.done(loss=loss, grads=dict(zip("wv", pieces, strict=True)))


GRAPHS: dict[str, Callable[[], Graph]] = {"mlp": mlp, "zero3": gathers, "joined": joined}


def whole_tensors(graph: Graph) -> dict[str, Tensor]:
    torch.manual_seed(0)
    named = graph.params | graph.inputs
    return {name: torch.randn(shape_of(node), dtype=torch.float64) for name, node in named.items()}


def shape_of(node: fx.Node) -> tuple[int, ...]:
    shape: tuple[int, ...] = node.meta["value"].shape
    return shape


def expected(name: str, given: dict[str, Tensor]) -> list[Tensor]:
    """Loss and gradients by eager autograd."""
    x, *weights = (given[n].clone() for n in ("x", *(k for k in given if k != "x")))
    for weight in weights:
        weight.requires_grad_()
    y = x @ weights[0].T
    if name == "mlp":
        y = torch.relu(y) @ weights[1].T
    loss = (y * y * (x @ weights[1].T if name == "joined" else 1)).sum()
    loss = loss / 80 if name == "mlp" else loss
    return [loss.detach(), *torch.autograd.grad(loss, weights)]


def is_right(name: str, graph: Graph) -> bool:
    given = whole_tensors(graph)
    out = simulate(graph, given)
    got = [out["loss"], *(out["grads"][n] for n in graph.params)]
    return all(
        torch.allclose(a, b, rtol=1e-10) for a, b in zip(got, expected(name, given), strict=True)
    )


@pytest.mark.parametrize("name", GRAPHS)
def test_sound_graphs_pass(name: str) -> None:
    graph = GRAPHS[name]()
    check(graph)
    assert is_right(name, graph)


def found(graph: Graph) -> str:
    """The message of the static checks, or nothing."""
    try:
        check(graph)
    except CheckError as error:
        return str(error)
    return ""


def test_kill_rate(golden: Callable[..., None]) -> None:
    """What types show is found wherever the mistake can be made; numbers find all the rest."""
    lines = ["mistake                                   places  static  numbers"]
    for mistake, mutator in (STATIC | NUMERIC).items():
        spoiled = [(name, g) for name, make in GRAPHS.items() for _, g in mutants(make, mutator)]
        left = [(name, graph) for name, graph in spoiled if not found(graph)]
        wrong = sum(not is_right(name, graph) for name, graph in left)
        assert spoiled, f"{mistake} was made nowhere"
        assert wrong == (0 if mistake in STATIC else len(left)), mistake
        assert mistake in NUMERIC or not left, mistake
        lines.append(f"{mistake:<40}  {len(spoiled):6}  {len(spoiled) - len(left):6}  {wrong:7}")
    golden("\n".join(lines))


def test_messages(golden: Callable[..., None]) -> None:
    """One message per mistake, as a user sees it."""
    texts = []
    for mistake, mutator in STATIC.items():
        _, graph = next((n, g) for make in GRAPHS.values() for n, g in mutants(make, mutator))
        texts.append(f"{mistake}\n    {found(graph)}")
    golden("\n".join(texts))


@lru_cache
def compiled() -> Graph:
    """A scheduled graph with weights gathered over dp, cut over tp, and windows of indices."""
    case = MODELS["llama"]()
    graph = trace(case.model, case.inputs, case.loss)
    graph.mesh = Mesh.parse("dp=2,tp=2")
    return partition(graph, Plan(preset="fsdp+megatron"))[1]


def copy_of(graph: Graph) -> Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph.fx, {}))
    return replace(graph, fx=new)


@pytest.mark.exhaustive
def test_compiled_graph_passes() -> None:
    check(copy_of(compiled()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", [m for m in STATIC if m != "gradient of another parameter"])
def test_mistakes_in_a_compiled_graph(mistake: str) -> None:
    """One mistake of each kind, in the middle of the step."""
    for i in range(len(list(compiled().calls())) // 3, len(list(compiled().calls()))):
        graph = copy_of(compiled())
        if STATIC[mistake](graph, list(graph.calls())[i]):
            assert found(graph)
            return
    pytest.fail(f"{mistake} was made nowhere")


@pytest.mark.parametrize("change", ["rows", "axis", "unwindowed"])
def test_windows_of_indices(change: str) -> None:
    graph = copy_of(compiled())
    window = next(n for n in graph.calls() if n.target is ops.window)
    given: Any = window.args
    ids, index, rows, *rest = given
    if change == "rows":
        window.args = (ids, index, rows // 2, *rest)
    elif change == "axis":
        index.kwargs = {"axis": "dp", "num": 2}
    else:
        window.replace_all_uses_with(ids)
    with pytest.raises(CheckError, match="window"):
        check(graph)


@pytest.mark.parametrize("at", [1, 3])
def test_one_of_several_equal_calls_is_wrong(at: int) -> None:
    """Equal calls are checked once; one that only looks equal is not taken for them."""
    b = Build("dp=2")
    x = b.tensor("input", "x", [8, 12])
    mine = b.collective(collectives.keep_piece, x, "dp", dim=0, after=cut(0))
    y = b(aten.sum.dim_IntList, mine, [0], dp=U)
    for i in range(4):
        y = b(aten.mul.Tensor, y, 2, dp=U if i < at else R)
    with pytest.raises(CheckError, match=r"no rule of aten.mul.Tensor takes \(U\) to \(R\)"):
        check(b.done(results={"y": y}))


def test_reduced_before_the_last_contribution() -> None:
    b = Build("dp=2")
    x = b.tensor("input", "x", [8, 12])
    w = b.tensor("param", "w", [12])
    mine = b.collective(collectives.keep_piece, x, "dp", dim=0, after=cut(0))
    first = b.reduced(b(aten.sum.dim_IntList, mine, [0], dp=U), "dp")
    second = b(aten.sum.dim_IntList, mine, [0], dp=U)
    graph = b.done(grads={"w": b(aten.add.Tensor, first, second)})
    assert w.name in graph.fx.find_nodes(op="placeholder")[1].name
    with pytest.raises(CheckError, match=r"no rule of aten.add.Tensor takes \(R, U\)"):
        check(graph)


def test_not_linear_in_a_sum() -> None:
    b = Build("tp=2")
    x = b.tensor("input", "x", [8, 12])
    mine = b.collective(collectives.keep_piece, x, "tp", dim=1, after=cut(1))
    total = b(aten.sum.dim_IntList, mine, [1], tp=U)
    graph = b.done(results={"y": b(aten.relu.default, total, tp=U)})
    with pytest.raises(CheckError, match="Finish sums before ops that are not linear in them"):
        check(graph)


def test_gather_of_an_outer_cut() -> None:
    b = Build("dp=2,tp=2")
    w = b.tensor("param", "w", [8, 3], dp=cut(0), tp=cut(0))
    whole = b(aten.add.Tensor, w, 1, dp=cut(0), tp=cut(0))
    gathered = b.collective(collectives.all_gather, whole, "tp", dim=0)
    graph = b.done(results={"y": b(collectives.wait, gathered, dp=cut(0))})
    with pytest.raises(CheckError, match="another axis cuts inside tp's pieces"):
        check(graph)


def test_loss_is_whole() -> None:
    b = Build("dp=2")
    x = b.tensor("input", "x", [8])
    mine = b.collective(collectives.keep_piece, x, "dp", dim=0, after=cut(0))
    graph = b.done(loss=b(aten.sum.dim_IntList, mine, [0], dp=U))
    with pytest.raises(CheckError, match=r"the loss is f32\[\]\{U:dp\}"):
        check(graph)


def test_dtype_is_derived() -> None:
    graph = mlp()
    node = next(n for n in graph.calls() if n.target is aten.relu.default)
    update(node, dtype=torch.bfloat16)
    with pytest.raises(CheckError, match=r"it gives torch.float32, but is noted as torch.bfloat16"):
        check(graph)


def test_unscheduled_graphs_have_no_waits() -> None:
    graph = mlp()
    for node in [n for n in graph.calls() if n.target is collectives.wait]:
        node.replace_all_uses_with(tensor_args(node)[0])
        graph.fx.erase_node(node)
    check(graph, scheduled=False)
    with pytest.raises(CheckError, match="is waited for 0 times"):
        check(graph)
