"""Train a small language model on the sources of Python's standard library.

python examples/train.py                                                              alone
torchrun --nproc-per-node 4 examples/train.py --mesh dp=2,tp=2 --plan fsdp+megatron   on 4 ranks

Started again it goes on from the newest checkpoint in --out, on any mesh and plan.
"""

import argparse
import os
import sysconfig
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from tqdm import tqdm

import partc
from partc.measure.step_waits import StepWaits
from partc.metrics import JsonLines, Meter

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
OPTIONS = {  # batch: samples of all ranks; every: steps from one checkpoint to the next
    "mesh": f"dp={WORLD}", "plan": "fsdp", "device": "cpu", "out": "build/train", "layers": 4,
    "width": 64, "length": 64, "batch": 16, "steps": 100, "every": 20, "lr": 1e-3,
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
        x = self.blocks(self.embed(ids) + self.places.weight, mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # an op for evaluation that has no gradient
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = torch.frombuffer(bytearray().join(x.read_bytes() for x in files), dtype=torch.uint8)
    ids, targets = (x.unfold(0, args.length, args.length).long() for x in (text[:-1], text[1:]))
    train, held = random_split(TensorDataset(ids, targets), [len(ids) - 512, 512])
    model, out = Model(args.layers, args.width, args.length), Path(args.out)
    batch = next(iter(DataLoader(train, args.batch)))
    program = partc.compile(
        model, args.mesh, batch, loss=loss_of, plan=args.plan, cache=out / "cache"
    )
    stage = program.module(args.device)
    stage.seed(0)
    optimizer = stage.step_on_pieces(torch.optim.AdamW(stage.parameters(), args.lr))
    loader, found = stage.loader(train), any(out.glob("step-*"))
    start = partc.load_checkpoint(out, stage, optimizer, loader=loader) if found else 0
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 1 - step / args.steps), last_epoch=start - 1
    )
    file = out / ("metrics.jsonl" if RANK == 0 else f"ranks/metrics-{RANK}.jsonl")
    waits = StepWaits(stage)  # says which rank is slow: partc watch build/train
    meter = Meter([JsonLines(file)], tokens=args.batch * args.length, devices=WORLD, start=start)
    batches = chain.from_iterable(repeat(loader))  # one epoch after the other
    steps = tqdm(range(start + 1, args.steps + 1), disable=RANK > 0)
    for step, batch in zip(steps, meter.waiting(batches), strict=False):
        with waits.step() if step % 10 == 0 else nullcontext():
            told = {"loss_metrics/global_avg_loss": stage.step(*batch)}
        told |= waits.numbers if step % 10 == 0 else {}
        told["grad_norm"] = stage.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        told["lr"] = schedule.get_last_lr()[0]
        schedule.step()
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
