"""partc's programs on one GPU: beside the model as it is, and beside what was predicted of them.

Run ``python -m benchmarks.on_gpu`` on a machine with a GPU; ``--machine`` names the machine file
that predicts. A row has the milliseconds of a step's forward and backward: of the model itself, of
the program for one device (both take turns), and of the first rank of larger meshes, whose
collectives do nothing: its kernels and memory are those of a rank of the whole mesh. Beside them
stand the arithmetic and the peak of memory that were predicted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

import partc
from benchmarks.peer_table import ratio
from benchmarks.single import Model, loss_of
from partc.plan.mesh import Mesh
from partc.verification.rendezvous import Group
from partc.verification.threads import ThreadMesh

VOCAB, SEQ, IMAGE, CLASSES = 32000, 2048, 224, 1000
WARM_UP = 3  # steps before the first that counts
Step = Callable[[], Any]


class Done:
    """The handle of a transfer that moves nothing."""

    def wait(self) -> bool:
        return True


class Idle:
    """The functions of ``torch.distributed`` for the first of many ranks: transfers do nothing."""

    ReduceOp, Work, ProcessGroup = c10d.ReduceOp, c10d.Work, c10d.ProcessGroup

    def get_rank(self, group: Group | None = None) -> int:
        return 0

    def get_world_size(self, group: Group) -> int:
        return group.size()

    def new_group(self, ranks: list[int]) -> Group:
        return Group(tuple(ranks))

    def get_global_rank(self, group: Group, group_rank: int) -> int:
        return group.ranks[group_rank]

    def get_backend_config(self, group: Group | None = None) -> str:
        return "cuda:nccl"

    def _nothing(self, *_: Any, **how: Any) -> Done:
        return Done()

    all_reduce = all_to_all_single = broadcast = isend = irecv = _nothing
    all_gather_single = reduce_scatter_single = _nothing


_LLAMA = {"hidden_size": 2048, "num_hidden_layers": 8, "intermediate_size": 5632,
          "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": VOCAB,
          "use_cache": False}  # fmt: skip
_GPT = {"n_embd": 1024, "n_layer": 8, "n_head": 16, "vocab_size": VOCAB, "use_cache": False,
        "n_positions": SEQ, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
_VIT = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "image_size": IMAGE,
        "intermediate_size": 3072, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0}  # fmt: skip
MODELS = {
    "llama": Model(AutoModelForCausalLM, 8, _LLAMA),
    "gpt2": Model(AutoModelForCausalLM, 8, _GPT),
    "vit": Model(AutoModelForImageClassification, 64, _VIT),
    "resnet": Model(AutoModelForImageClassification, 64, {"num_labels": CLASSES}),
}
LAYOUTS = {"dp=8": "fsdp", "tp=8": "megatron-sp", "dp=4,tp=2": "fsdp+megatron-sp"}


def build_model(name: str, device: str = "cuda") -> nn.Module:
    """The model in bf16, with the same weights every time."""
    torch.manual_seed(0)
    found = MODELS[name]
    with torch.device(device):
        model: nn.Module = found.auto.from_config(AutoConfig.for_model(name, **found.config))
    return model.to(torch.bfloat16).train()


def build_batch(name: str, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Tokens, or images, and what is to be said of them."""
    torch.manual_seed(1)
    num = MODELS[name].batch
    if MODELS[name].auto is AutoModelForImageClassification:
        images = torch.randn(num, 3, IMAGE, IMAGE, device=device, dtype=torch.bfloat16)
        return images, torch.zeros(num, dtype=torch.long, device=device)
    tokens = torch.zeros(num, SEQ, dtype=torch.long, device=device)
    if device != "meta":
        tokens.random_(VOCAB)
    return tokens, tokens


@dataclass(frozen=True)
class Build:
    """A program to compile: of a model, on a mesh of a machine."""

    model: str
    axes: str
    plan: str
    inductor: bool = False

    def save(self, machine: str, folder: str) -> None:
        """Compile it, and save it in a folder."""
        plain = Mesh.of(self.axes) if self.axes else Mesh(())
        mesh = Mesh(plain.axes, partc.Topology.load(machine, plain.num_ranks))
        batch, how = build_batch(self.model, "meta"), "inductor" if self.inductor else "none"
        partc.compile(
            build_model(self.model, "meta"), mesh, batch, loss=loss_of, plan=self.plan, compile=how
        ).save(folder)


def programs(names: Sequence[str], machine: str, folder: str) -> dict[Build, partc.Program]:
    """The programs of some models, compiled in as many processes as there are cores."""
    builds = [Build(name, "", "ddp") for name in names] + [Build(names[0], "", "ddp", True)]
    builds += [Build(name, axes, plan) for name in names for axes, plan in LAYOUTS.items()]
    places = {build: f"{folder}/{i}" for i, build in enumerate(builds)}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        missing = {b: place for b, place in places.items() if not Path(place).exists()}
        for done in [pool.submit(b.save, machine, place) for b, place in missing.items()]:
            done.result()
    return {build: partc.load(place) for build, place in places.items()}


def own_step(name: str) -> Step:
    """Forward and backward of the model as it is."""
    held, batch = build_model(name), build_batch(name)

    def step() -> Tensor:
        held.zero_grad()
        loss = loss_of(held, *batch)
        loss.backward()
        return loss.detach()

    return step


def rank_step(program: partc.Program, name: str) -> Step:
    """The first rank's step, with the weights of the model, cut as the program cuts them."""
    role, mesh = program.role(0), program.mesh
    role.module.dist = Idle()  # type: ignore[attr-defined]
    step = role.build(ThreadMesh(mesh, 0) if mesh.num_ranks > 1 else None, "cuda")
    model = build_model(name)
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for shard in role.shards:
            if shard.name in known:
                whole = known[shard.name].detach()
                role.tensors(step)[shard.name].copy_(shard.take(whole, mesh, mesh.coords(0)))
    batch = [x.contiguous() for x in role.pieces(build_batch(name), mesh.coords(0))]

    def run() -> Any:
        for param in step.parameters():
            param.grad = None
        return role.run(step, batch[: len(role.inputs)])[0]

    return run


def timed(steps: dict[str, Step], num: int) -> dict[str, list[float]]:
    """Milliseconds of each step, in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + num):
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                times[name].append(begin.elapsed_time(end))
    return times


def peak_bytes(make: Callable[[], Step]) -> int:
    """The most memory that a side holds during a step."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = make()
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def spread(times: list[float]) -> str:
    low, _, high = quantiles(times, n=4)
    return f"{median(times):.2f} ({low:.2f} to {high:.2f})"


def said(name: str, program: partc.Program, times: list[float], peak: int) -> str:
    """A row: measured and predicted."""
    cost = program.cost.as_json()
    predicted, states = 1e3 * cost["prediction"]["compute_s"], cost["state_bytes"]
    memory = cost["peak_bytes"] - states["optimizer"]
    return (
        f"{name:<26} {spread(times):<26} predicted {predicted:.2f} "
        f"({predicted / median(times):.2f})  peak {peak / 1e6:.0f} MB predicted "
        f"{memory / 1e6:.0f} ({memory / peak:.3f})"
    )


def one_device(name: str, built: dict[Build, partc.Program], num: int) -> None:
    """The model and its programs for one device in turns."""
    mine = {b: each for b, each in built.items() if b.model == name and not b.axes}
    titles = {b: "  program, inductor" if b.inductor else "  program" for b in mine}
    sides = {"model": own_step(name)}
    sides |= {titles[b]: rank_step(each, name) for b, each in mine.items()}
    losses = {title.strip(): float(step()) for title, step in sides.items()}
    times = timed(sides, num)
    del sides
    own_peak = peak_bytes(partial(own_step, name))
    print(f"{name:<26} {spread(times['model'])}  peak {own_peak / 1e6:.0f} MB  losses {losses}")
    for b, program in mine.items():
        ours, peak = times[titles[b]], peak_bytes(partial(rank_step, program, name))
        row = said(titles[b], program, ours, peak)
        print(row, f" to the model {ratio(ours, times['model'])}", flush=True)


def of_many(build: Build, program: partc.Program, num: int) -> None:
    """The first rank of a mesh, whose transfers do nothing."""
    peak = peak_bytes(partial(rank_step, program, build.model))
    times = timed({"rank": rank_step(program, build.model)}, num)["rank"]
    print(said(f"  {build.axes} {build.plan}", program, times, peak), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models (default: all)")
    parser.add_argument("--machine", default="dgx-h100")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--programs", help="folder of programs that an earlier run has compiled")
    parser.add_argument("--compile", action="store_true", help="only compile them")
    args = parser.parse_args()
    names = args.names or [*MODELS]
    if args.compile:
        if args.programs is None:
            parser.error("--compile keeps programs for a later run: say where by --programs")
        programs(names, args.machine, args.programs)
        return 0
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "machine file", args.machine)
    with tempfile.TemporaryDirectory() as folder:
        built = programs(names, args.machine, args.programs or folder)
    for name in names:
        one_device(name, built, args.steps)
        for build, program in built.items():
            if build.model == name and build.axes:
                of_many(build, program, args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
