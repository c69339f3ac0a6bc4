"""GPT-2 from a Hugging Face configuration under ZeRO-3: compile it once, then train it on ranks.

python examples/gpt.py                              compiles into build/gpt
torchrun --nproc-per-node 2 examples/gpt.py train   trains what was compiled
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import partc

OUT = Path("build/gpt")


def build_model() -> nn.Module:
    """A GPT-2 of four layers without dropout."""
    config = GPT2Config(
        n_embd=128, n_layer=4, n_head=4, vocab_size=512, n_positions=64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's own next-token loss."""
    loss: Tensor = model(ids, labels=ids).loss
    return loss


def train() -> None:
    """One rank's loop; any torch optimizer takes the rank's parameters."""
    stage = partc.load(OUT).module()
    stage.load_full(build_model())
    adamw = torch.optim.AdamW(stage.parameters(), lr=3e-4, fused=True)
    optimizer = stage.step_on_pieces(adamw)
    ids = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(1))
    for step in range(10):
        optimizer.zero_grad()
        loss = stage.step(ids)
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        train()
    else:
        ids = torch.zeros(8, 64, dtype=torch.long)
        partc.compile(build_model(), "dp=2", (ids,), loss=loss_of, plan="fsdp").save(OUT)
        print(f"saved in {OUT}")
