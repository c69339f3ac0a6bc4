"""A language model on the sources of Python's standard library, trained as any torch model is.

python examples/train.py                                                               alone
torchrun --nproc-per-node 4 examples/train.py --mesh dp=2,tp=2 --plan fsdp+megatron    on 4 ranks

A second start goes on from the newest checkpoint in --out, also on another mesh.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from itertools import islice
from math import cos, pi
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from tqdm import tqdm

import partc
from partc.metrics import JsonLines, Meter

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--mesh", default=f"dp={os.environ.get('WORLD_SIZE', '1')}")
parser.add_argument("--plan", default="fsdp")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--out", type=Path, default=Path("build/train"))
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--batch", type=int, default=16, help="samples of all ranks together")
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=2, help="batches of one step")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--every", type=int, default=20, help="steps between evaluations and saves")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)


def text_of(length: int) -> TensorDataset:
    """Bytes of the sources, i64[n,length], and the bytes that follow each."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = torch.frombuffer(bytearray().join(p.read_bytes() for p in paths), dtype=torch.uint8)
    num = (len(text) - 1) // length
    pieces = [text[i : i + num * length].view(num, length).long() for i in (0, 1)]
    return TensorDataset(*pieces)


class Model(nn.Module):
    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], x.device)
        logits: Tensor = self.head(self.blocks(x, mask, is_causal=True))
        return logits


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def main(args: argparse.Namespace) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(args.seed)
    torch.backends.mha.set_fastpath_enabled(False)
    data = text_of(args.length)
    train, valid = Subset(data, range(512, len(data))), Subset(data, range(512))
    model = Model(args.layers, args.width, args.length)
    example = tuple(torch.zeros(args.batch, args.length, dtype=torch.long) for _ in range(2))
    stage = partc.compile(
        model, args.mesh, example, loss=loss_of, plan=args.plan, cache=args.out / "cache"
    ).module(args.device)
    stage.seed(args.seed)
    optimizer = stage.step_on_pieces(torch.optim.AdamW(stage.parameters(), args.lr))
    loader = stage.loader(train, seed=args.seed)
    start = 0
    if list(args.out.glob("step-*")):
        start = partc.load_checkpoint(args.out, stage, optimizer, loader=loader)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 10) * (1 + cos(pi * step / args.steps)) / 2,
        last_epoch=start - 1,
    )  # fmt: skip
    bar = tqdm(total=args.steps, initial=start, disable=rank > 0)
    tokens = args.batch * args.length * args.accumulate
    log = [JsonLines(args.out / "metrics.jsonl")] if rank == 0 else []
    meter = Meter(log, tokens=tokens, devices=world, start=start)
    batches = meter.waiting(batch for epoch in iter(int, 1) for batch in loader)
    for step in range(start + 1, args.steps + 1):
        optimizer.zero_grad()
        loss = sum(
            stage.step(*batch, scale=1 / args.accumulate) for batch in islice(batches, args.accumulate)
        ) / args.accumulate
        norm = stage.clip_grad_norm_(1.0)
        optimizer.step()
        told = {"loss_metrics/global_avg_loss": loss, "grad_norm": norm, "lr": rate.get_last_lr()[0]}
        rate.step()
        if step % args.every == 0:
            held = DataLoader(valid, args.batch, drop_last=True)
            losses = [stage.eval_step(*batch) for batch in held]
            told["validation_metrics/loss"] = sum(losses) / len(losses)
            partc.save_checkpoint(args.out, stage, optimizer, step=step, loader=loader)
        bar.set_postfix(loss=meter.log(step, told)["loss_metrics/global_avg_loss"])
        bar.update()


if __name__ == "__main__":
    main(parser.parse_args())
