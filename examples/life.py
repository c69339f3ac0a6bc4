"""A training run's whole life, on four processes of this machine: make train

A Llama of transformers that reads bytes is trained on the sources of Python's standard library. Two
of its ranks are killed, and it goes on from the last checkpoint; then it loses one for good, and
goes on with three. What it has learned is exported, and plain transformers has the same loss.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import partc

OUT = Path("build/life")
LENGTH, ROWS = 64, 12  # bytes of a row; rows of a step, of all ranks together: 3 and 4 divide them
STEPS, EVERY = 120, 10  # of the run; from one checkpoint to the next
VICTIMS = 2, 0  # the ranks that are killed, one in each attempt
HELD = 10  # batches that nobody trains on


def config_of() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=240, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
        use_cache=False, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())


def rows() -> tuple[TensorDataset, list[tuple[Tensor, Tensor]]]:
    """The rows to train on, and batches of others."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = torch.frombuffer(bytearray().join(x.read_bytes() for x in files), dtype=torch.uint8)
    ids, targets = (x.unfold(0, LENGTH, LENGTH).long() for x in (text[:-1], text[1:]))
    num = len(ids) - HELD * ROWS
    held = zip(ids[num:].split(ROWS), targets[num:].split(ROWS), strict=True)
    return TensorDataset(ids[:num], targets[:num]), [*held]


def killed_at(steps: int, attempt: int) -> tuple[int, int]:
    """Behind which step an attempt to get so far loses a rank, and which one."""
    if attempt < len(VICTIMS) and os.environ["WORLD_SIZE"] == "4":
        return (attempt + 1) * steps // (len(VICTIMS) + 1) + 3, VICTIMS[attempt]
    return 0, 0


def train(build: str, steps: int) -> None:
    """What each rank does: go on from the newest checkpoint up to a step."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    at, victim = killed_at(steps, attempt)
    dataset, held = rows()
    stage = partc.load(build).module()
    stage.load_full(OUT / "begin")
    optimizer = stage.step_on_pieces(torch.optim.AdamW(stage.parameters(), 2e-3))
    loader = stage.loader(dataset)
    with partc.Checkpoints(OUT / "run", interval=EVERY, keep_latest_k=2) as checkpoints:
        start = checkpoints.load_latest(stage, optimizer, loader=loader)
        if rank == 0:
            world = os.environ["WORLD_SIZE"]
            print(f"  {world} ranks go on behind step {start}", flush=True)
        batches = chain.from_iterable(repeat(loader))
        for step, batch in zip(range(start + 1, steps + 1), batches, strict=False):
            loss = stage.step(*batch)
            stage.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, stage, optimizer, loader=loader)
            if rank == 0 and step % EVERY == 0:
                print(f"  step {step}: loss {loss.item():.4f}", flush=True)
            if (step, rank) == (at, victim):
                print(f"  step {step}: rank {rank} is killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    losses = [stage.eval_step(*batch).item() for batch in held]
    if rank == 0:
        (OUT / "evaluated.json").write_text(json.dumps(sum(losses) / len(losses)))


def main(steps: int = STEPS) -> None:
    begun = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    torch.manual_seed(0)
    model, (_, held) = LlamaForCausalLM(config_of()), rows()
    tell("The model is compiled for 4 ranks, and planned again for 3.")
    model.save_pretrained(OUT / "begin")
    four = partc.compile(model, "dp=4", held[0], loss=loss_of, plan="fsdp")
    four = four.for_shapes(held[0], modes=("eval",))
    four.save(OUT / "build-4")
    three = partc.replan(four, 3)
    three.save(OUT / "build-3")
    print(f"  {partc.Plan.parse(three.plan).notes[0]}")
    tell("Four ranks train. Two of them are killed, one after the other.")
    torchrun(4, OUT / "build-4", steps * 3 // 4)
    tell("One rank is gone for good. Three go on.")
    torchrun(3, OUT / "build-3", steps)
    trained = json.loads((OUT / "evaluated.json").read_text())
    tell("The newest checkpoint becomes files of weights, and plain transformers reads them.")
    partc.export_safetensors(OUT / "run", OUT / "weights", config=OUT / "begin")
    plain = LlamaForCausalLM.from_pretrained(OUT / "weights", dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [loss_of(plain, *batch).item() for batch in held]
    found = sum(losses) / len(losses)
    print(f"  loss on held rows: {trained:.6f} on 3 ranks, {found:.6f} in transformers")
    print(f"  {time.monotonic() - begun:.0f} s in all")
    if abs(found - trained) > 1e-5:
        sys.exit("the two losses differ")


def tell(text: str) -> None:
    print(f"\n{text}", flush=True)


def torchrun(num: int, build: Path, steps: int) -> None:
    """Train on so many ranks; torchrun starts them again when one is killed."""
    line: list[Any] = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", num]
    line += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    line += ["--max-restarts", len(VICTIMS), __file__, build, steps]
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "ERROR"}
    subprocess.run([*map(str, line)], check=True, env={**os.environ, **quiet})


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2])) if "RANK" in os.environ else main(*map(int, sys.argv[1:]))
