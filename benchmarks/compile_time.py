"""Seconds, memory and source lines of compiling models of full size, ahead of time.

Run ``python -m benchmarks.compile_time``: the weights are on the meta device in bf16, and every
case runs in a process of its own: Llamas under fsdp+megatron on dp=8 x tp=8, then models and
numbers of H100s for which ``plan="auto"`` chooses mesh and plan.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import partc
from benchmarks.machine import machine
from partc import api
from partc.passes import runner

MESH, PLAN, BATCH = "dp=8,tp=8", "fsdp+megatron", 8
MACHINE = "dgx-h100"
WIDTHS: dict[int, dict[str, int]] = {  # by number of layers: Llama-3-8B, 70B and 405B
    32: {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    80: {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    126: {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
}
MIXTRAL = {"num_hidden_layers": 32, "num_local_experts": 8, "vocab_size": 32000, **WIDTHS[32]}


@dataclass(frozen=True)
class Task:
    """A model, by its layers or as Mixtral-8x7B, and for how many devices it is compiled."""

    name: str
    layers: int  # 0: Mixtral
    batch: int
    seq: int
    devices: int = 0  # 0: the mesh and the plan are given

    def model(self) -> nn.Module:
        return build_model(self.layers, self.seq) if self.layers else build_mixtral(self.seq)

    def mesh(self) -> str | partc.Mesh:
        return partc.Mesh.load(MACHINE, devices=self.devices) if self.devices else MESH

    @property
    def plan(self) -> str:
        return "auto" if self.devices else PLAN


AUTO = (
    Task("Llama-3-8B", 32, 128, 4096, 64),
    Task("Llama-3-70B", 80, 1024, 8192, 1024),
    Task("Llama-3-405B", 126, 2048, 8192, 16384),
    Task("Mixtral-8x7B", 0, 512, 4096, 256),
)


@dataclass
class Stopwatch:
    """Seconds by stage of the compile, nested stages under the one that calls them."""

    seconds: dict[tuple[str, ...], float] = field(default_factory=dict)
    running: tuple[str, ...] = ()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with what it takes added to its stage."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            outside, self.running = self.running, (*self.running, name)
            here, start = self.running, time.perf_counter()
            self.seconds.setdefault(here, 0.0)
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[here] += time.perf_counter() - start
                self.running = outside

        return run

    @contextmanager
    def on_passes(self) -> Iterator[None]:
        """Time every pass that the runner runs, those on copies too, which are tried and dropped;
        under the search those that it runs.
        """
        run_one = runner._run_one

        def timed(state: Any, row: int, each: runner.Pass) -> None:
            self.timed(each.name, run_one)(state, row, each)

        with patch.object(runner, "_run_one", timed):
            yield


@dataclass(frozen=True)
class Case:
    """What one compile took. ``lines`` by the name of the role's file."""

    name: str
    plan: str
    total_s: float
    peak_rss_bytes: int
    before_rss_bytes: int
    lines: dict[str, int]
    stages: dict[tuple[str, ...], float]

    def __str__(self) -> str:
        roles = ", ".join(f"{name} {count} lines" for name, count in self.lines.items())
        added = self.peak_rss_bytes - self.before_rss_bytes
        lines = [
            f"{self.name}: {self.total_s:.1f} s from the model to saved sources; {roles}",
            f"  {self.plan}",
            f"  peak memory {self.peak_rss_bytes / 1e9:.2f} GB, of it {added / 1e9:.2f} compiling",
        ]
        for stage, seconds in self.stages.items():
            share = 100 * seconds / self.total_s
            if share < 0.5:
                continue
            lines.append(
                f"  {'  ' * (len(stage) - 1) + stage[-1]:<28}{seconds:7.2f} s {share:4.0f} %"
            )
        return "\n".join(lines)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's own next-token loss."""
    loss: Tensor = model(ids, labels=ids).loss
    return loss


def build_model(layers: int, seq: int) -> nn.Module:
    """A Llama-3 on the meta device in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        num_hidden_layers=layers, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=seq, use_cache=False, **WIDTHS[layers],
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).train()


def build_mixtral(seq: int) -> nn.Module:
    """A Mixtral-8x7B on the meta device in bf16."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config: Any = MixtralConfig(
        num_key_value_heads=8, max_position_embeddings=seq, use_cache=False, **MIXTRAL
    )
    with torch.device("meta"):
        model: nn.Module = MixtralForCausalLM(config)
    return model.to(torch.bfloat16).train()


def measure(task: Task) -> Case:
    """Compile and save once, in this process."""
    model = task.model()
    ids = torch.zeros(task.batch, task.seq, dtype=torch.long, device="meta")
    before, start, watch = _peak_rss_bytes(), time.perf_counter(), Stopwatch()
    with tempfile.TemporaryDirectory() as folder, watch.on_passes():
        program = api.compile(model, task.mesh(), (ids,), loss=loss_of, plan=task.plan)
        watch.timed("save", program.save)(folder + "/program")
    total_s = time.perf_counter() - start
    lines = {name: len(text.splitlines()) for name, text in sorted(program.sources.items())}
    chosen = partc.Plan.parse(program.plan)
    plan = f"{chosen.preset} on {program.mesh}, {chosen.microbatches} microbatches"
    return Case(task.name, plan, total_s, _peak_rss_bytes(), before, lines, watch.seconds)


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> int:
    """Print one case after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="*", type=int, choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--auto", nargs="*", choices=[task.name for task in AUTO], metavar="MODEL",
                        default=[task.name for task in AUTO])  # fmt: skip
    parser.add_argument("--seq", type=int, default=4096)
    options = parser.parse_args()
    print(f"{machine()}; partc {partc.__version__}, bf16\n")
    given = [Task(f"{layers} layers", layers, BATCH, options.seq) for layers in options.layers]
    for task in (*given, *(task for task in AUTO if task.name in options.auto)):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            print(pool.submit(measure, task).result(), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
