"""Train a small language model on the sources of Python's standard library.

python examples/train.py                                                              alone
torchrun --nproc-per-node 4 examples/train.py --mesh dp=2,tp=2 --plan fsdp+megatron   on 4 ranks

Started again it goes on from the newest checkpoint in --out, on any mesh and plan.
"""

import argparse
import os
import sysconfig
from collections.abc import Iterator
from itertools import count, islice
from math import cos, pi
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset
from tqdm import tqdm

import partc
from partc.metrics import JsonLines, Meter

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
OPTIONS = {  # batch: samples of all ranks; accumulate: batches of a step; every: steps to a save
    "mesh": f"dp={WORLD}", "plan": "fsdp", "device": "cpu", "out": "build/train", "layers": 4,
    "width": 64, "length": 64, "batch": 16, "accumulate": 2, "steps": 100, "every": 20, "lr": 1e-3,
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device)
        x = self.embed(ids) + self.places.weight
        logits: Tensor = self.head(self.blocks(x, mask, is_causal=True))
        return logits


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def texts(length: int) -> tuple[Subset[tuple[Tensor, ...]], Subset[tuple[Tensor, ...]]]:
    """Pieces of text to train on and to evaluate on: bytes, and the bytes that follow each."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = torch.frombuffer(bytearray().join(x.read_bytes() for x in files), dtype=torch.uint8)
    num = (len(text) - 1) // length
    data = TensorDataset(*(text[i : i + num * length].view(num, length).long() for i in (0, 1)))
    return Subset(data, range(512, num)), Subset(data, range(512))


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # an op for evaluation that has no gradient
    (train, held), out = texts(args.length), Path(args.out)
    model = Model(args.layers, args.width, args.length)
    batch = [torch.zeros(args.batch, args.length, dtype=torch.long)] * 2
    stage = partc.compile(
        model, args.mesh, batch, loss=loss_of, plan=args.plan, cache=out / "cache"
    ).module(args.device)
    stage.seed(0)
    optimizer = stage.step_on_pieces(torch.optim.AdamW(stage.parameters(), args.lr))
    loader, start = stage.loader(train), 0
    if any(out.glob("step-*")):
        start = partc.load_checkpoint(out, stage, optimizer, loader=loader)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 10) * (1 + cos(pi * step / args.steps)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate, last_epoch=start - 1)
    loggers = [JsonLines(out / "metrics.jsonl")] if RANK == 0 else []
    tokens = args.batch * args.length * args.accumulate
    meter = Meter(loggers, tokens=tokens, devices=WORLD, start=start)
    batches: Iterator[list[Tensor]] = meter.waiting(batch for _ in count() for batch in loader)
    steps = tqdm(range(start + 1, args.steps + 1), disable=RANK > 0)
    for step in steps:
        optimizer.zero_grad()
        losses = [
            stage.step(*batch, scale=1 / args.accumulate)
            for batch in islice(batches, args.accumulate)
        ]
        told = {"grad_norm": stage.clip_grad_norm_(1.0), "lr": optimizer.param_groups[0]["lr"]}
        optimizer.step()
        schedule.step()
        told["loss_metrics/global_avg_loss"] = sum(losses) / len(losses)
        if step % args.every == 0:
            partc.save_checkpoint(out, stage, optimizer, step=step, loader=loader)
            losses = [stage.eval_step(*batch) for batch in DataLoader(held, args.batch)]
            told["validation_metrics/loss"] = sum(losses) / len(losses)
        steps.set_postfix(loss=meter.log(step, told)["loss_metrics/global_avg_loss"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    main(parser.parse_args())
