"""Is the search for shardings exact? Its results beside brute force, HiGHS and the joint optimum.

Run ``python -m benchmarks.sharding_search``. Random small steps are compared with every plan there
is; one block of a Llama and of a T5 on one axis with what HiGHS proves; on two and three axes,
which the search decides in turns, with the optimum of all of them at once, where that can be
computed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.joint_shardings import joint_problem, search_shardings
from benchmarks.machine import machine
from partc.graph import Graph
from partc.lowering import trace
from partc.machines.topology import Topology
from partc.passes.search.solver.milp import milp
from partc.passes.search.solver.solve import solve
from partc.plan.mesh import Mesh
from tests.search.random_steps import BruteForce, random_step

CLOSE = 1e-9  # relative
MACHINE = "dgx-h100"


def llama_block(seq: int) -> Graph:
    """The step of a Llama with one layer as wide as an 8B's, and a small vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        num_hidden_layers=1, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=4096, max_position_embeddings=seq, use_cache=False,
    )  # fmt: skip
    return traced(lambda: LlamaForCausalLM(config), seq, lambda m, ids: m(ids, labels=ids).loss)


def t5_block(seq: int) -> Graph:
    """The step of a T5 with a layer of encoder and decoder each."""
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config(
        num_layers=1, num_decoder_layers=1, d_model=1024, d_ff=4096, num_heads=16, d_kv=64,
        vocab_size=4096, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip

    def loss(model: nn.Module, ids: Tensor) -> Any:
        return model(input_ids=ids, labels=ids).loss

    return traced(lambda: T5ForConditionalGeneration(config), seq, loss)


def mlp_block(seq: int) -> Graph:
    """Two products, whose joint problem on two axes is small enough to be solved."""
    return of_features(seq, 1024, 4096, 1024)


def product_block(seq: int) -> Graph:
    """One, for three axes."""
    return of_features(seq, 1024, 4096)


def of_features(seq: int, *sizes: int) -> Graph:
    layers = [nn.Linear(a, b, bias=False, device="meta") for a, b in pairwise(sizes)]
    model = nn.Sequential(*layers).bfloat16()
    x = torch.zeros(8, seq, sizes[0], device="meta", dtype=torch.bfloat16)
    return trace(model, (x,), lambda m, x: m(x).float().square().mean())


def traced(build: Callable[[], nn.Module], seq: int, loss: Callable[..., Any]) -> Graph:
    with torch.device("meta"):
        model = build()
    ids = torch.zeros(8, seq, dtype=torch.long, device="meta")
    return trace(model.bfloat16().train(), (ids,), loss)


BLOCKS: dict[str, Callable[[int], Graph]] = {
    "llama": llama_block, "t5": t5_block, "mlp": mlp_block, "product": product_block,
}  # fmt: skip


def random_steps(num: int) -> str:
    """How many of so many small steps are laid out as well as any plan can."""
    equal, worst = 0, 0.0
    for seed in range(num):
        ranks = (2, 3, 4)[seed % 3]
        name = (MACHINE, "p4d-ethernet")[seed % 2]
        mesh = Mesh((("x", ranks),), Topology.load(name, ranks) if ranks != 3 else None)
        graph = random_step(seed, 5)
        found = search_shardings(graph, mesh, tie=False).seconds
        least = BruteForce(graph, mesh).least()
        off = abs(found - least) / least if least else found
        equal, worst = equal + (off <= CLOSE), max(worst, off)
    return f"{equal} of {num} random steps equal brute force (worst {worst:.1e})"


def one_axis(name: str, axis: tuple[str, int]) -> str:
    """The search's optimum on one axis beside that of HiGHS."""
    graph, mesh = BLOCKS[name](1024), Mesh((axis,), Topology.load(MACHINE, axis[1]))
    began = time.perf_counter()
    problem = joint_problem(graph, mesh).problem
    found = solve(problem)
    ours_s = time.perf_counter() - began
    oracle = milp(problem)
    off = (found.cost - oracle.cost) / oracle.cost
    return (
        f"{name} block, {mesh}: {1e3 * found.cost:.4f} ms, {found.how} in {ours_s:.2f} s; "
        f"HiGHS {1e3 * oracle.cost:.4f} ms (at least {1e3 * oracle.bound:.4f}) in "
        f"{oracle.seconds:.1f} s: off by {100 * off:.4f} %"
    )


def several_axes(name: str, axes: Sequence[tuple[str, int]], seconds: float) -> str:
    """What deciding axes in turns loses against deciding all at once."""
    ranks = 1
    for _, size in axes:
        ranks *= size
    graph, mesh = BLOCKS[name](1024), Mesh(tuple(axes), Topology.load(MACHINE, ranks))
    began = time.perf_counter()
    found = search_shardings(graph, mesh, tie=False)
    turns_s, began = time.perf_counter() - began, time.perf_counter()
    joint = solve(joint_problem(graph, mesh).problem, milp_seconds=seconds)
    gap = (found.seconds - joint.cost) / joint.cost
    sure = (found.seconds - joint.bound) / joint.bound
    return (
        f"{name} block, {mesh}: in turns {1e3 * found.seconds:.4f} ms in {turns_s:.1f} s; at once "
        f"{1e3 * joint.cost:.4f} ms ({joint.how}, at least {1e3 * joint.bound:.4f}) in "
        f"{time.perf_counter() - began:.1f} s: gap {100 * gap:.2f} %, at most {100 * sure:.2f} %"
    )


def main() -> int:
    """Print one line per comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=200, help="random steps")
    parser.add_argument("--seconds", type=float, default=60.0, help="for HiGHS per joint problem")
    options = parser.parse_args()
    print(machine())
    print(random_steps(options.graphs), flush=True)
    for name in ("llama", "t5"):
        print(one_axis(name, ("tp", 8)), flush=True)
    for name, axes in (
        ("mlp", (("dp", 2), ("tp", 4))),
        ("product", (("dp", 2), ("cp", 2), ("tp", 2))),
    ):
        print(several_axes(name, axes, options.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
