"""Train a byte-level Llama on Python's own source text on four processes, dp=2 x tp=2.

Compiles the one-device model, prints where the generated programs lie, runs them under plain
torchrun with gloo, and compares every step's loss with the same model trained in one process.
Exits with 1 if they differ by more than float32 rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # so that it runs from a fresh clone too

import partc  # noqa: E402
from partc.measure.resident import free_at_once, peak_resident_bytes, resident_bytes  # noqa: E402

MESH, PLAN, NUM_RANKS = "dp=2,tp=2", "fsdp+megatron", 4
BATCH, SEQ, NUM_STEPS = 8, 128, 16
TOLERANCE = 1e-5  # relative; one float32 rounding is 6e-8, and a step sums thousands of terms
TIMEOUT_S = 150.0
OUT = ROOT / "build" / "demo"
EXPECTED = ROOT / "build" / "demo-losses.json"


def build_model() -> nn.Module:
    """A Llama of 4.9 million parameters whose tokens are bytes; the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's own next-token loss."""
    loss: Tensor = model(ids, labels=ids).loss
    return loss


def batches(num: int) -> Iterator[Tensor]:
    """Pieces of the standard library's source, ``i64[BATCH,SEQ]`` each."""
    sources = sorted(Path(subprocess.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        starts = torch.randint(len(data) - SEQ, (BATCH,), generator=generator).tolist()
        yield torch.stack([data[start : start + SEQ] for start in starts]).long()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """The same on one device and on a rank."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def main() -> int:
    """Compile, train in one process, then train on four and compare."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    model = build_model()
    program = partc.compile(model, MESH, tuple(batches(1)), loss=loss_of, plan=PLAN)
    program.save(OUT)
    num_params = sum(p.numel() for p in model.parameters())
    print(f"{num_params / 1e6:.1f} million parameters, mesh {MESH}, plan {PLAN}")
    print(f"compiled in {time.perf_counter() - start:.1f} s; read what the ranks run:")
    for name, source in sorted(program.sources.items()):
        print(f"  {(OUT / name).relative_to(ROOT)}  {len(source.splitlines())} lines")
    print(f"\n{program.cost}")
    print(f"training {NUM_STEPS} steps in one process, for comparison", flush=True)
    EXPECTED.write_text(json.dumps(train_alone(model)))
    return launch()


def train_alone(model: nn.Module) -> list[float]:
    """The loss of each step of the undistributed model."""
    optimizer, losses = optimizer_of(model), []
    for ids in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def launch() -> int:
    """Run this file on four ranks under torchrun; its exit code, or 1 when the time is up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={NUM_RANKS}", __file__, "--rank"]
    print(
        f"torchrun on {NUM_RANKS} processes, which share {os.cpu_count()} cores; "
        "the predicted step has a core for each",
        flush=True,
    )
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as run:
        try:
            return run.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"the ranks did not finish within {TIMEOUT_S:.0f} s", file=sys.stderr)
            return 1
        finally:
            run.terminate()  # torchrun then ends its ranks, within 30 s


def train_here() -> int:
    """One rank: train its share; rank 0 prints the comparison. 1 if the losses differ."""
    torch.set_num_threads(1)
    free_at_once()  # for the memory measured at the end
    stage = partc.load(OUT).module()
    stage.load_full(build_model())
    optimizer = stage.step_on_pieces(optimizer_of(stage))
    expected = json.loads(EXPECTED.read_text())
    worst = 0.0
    show("step      loss   one process   difference   ms")
    for step, ids in enumerate(batches(NUM_STEPS)):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = stage.step(ids).item()
        optimizer.step()
        difference = abs(loss - expected[step]) / expected[step]
        worst = max(worst, difference if difference == difference else float("inf"))
        took_ms = (time.perf_counter() - start) * 1e3
        losses = f"{loss:8.5f}      {expected[step]:8.5f}      {difference:.1e}"
        show(f"{step:4}  {losses}  {took_ms:4.0f}")
    show_memory(stage, optimizer)
    good = worst <= TOLERANCE
    show(f"\nworst difference {worst:.1e}, allowed {TOLERANCE:.0e}: {'equal' if good else 'WRONG'}")
    return 0 if good else 1


def show_memory(stage: Any, optimizer: torch.optim.Optimizer) -> None:
    """The predicted peak of a rank beside what the system counted in one more step."""
    predicted = partc.load(OUT).cost.as_json()["peak_bytes"]
    states = (t for state in optimizer.state.values() for t in state.values())
    pieces = (piece for _, piece in stage.pieces().values())
    held = sum(t.nbytes for t in chain(pieces, states))
    (ids,) = batches(1)
    optimizer.zero_grad()
    before, peak = resident_bytes(), peak_resident_bytes(lambda: stage.step(ids))
    measured = "not counted here"
    if before is not None and peak is not None:
        measured = f"{(held + peak - before) / 1e6:.1f} MB"
    show(f"\nrank 0 at its peak: predicted {predicted / 1e6:.1f} MB, measured {measured}")


def show(text: str) -> None:
    """Print on rank 0."""
    if os.environ["RANK"] == "0":
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help="be one rank; torchrun passes this")
    sys.exit(train_here() if parser.parse_args().rank else main())
