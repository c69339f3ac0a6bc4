"""Published measurements of training steps: how each was trained, how long it took, what it held.

Sources: SC21, table 1 of Narayanan et al. 2021 (arXiv 2104.04473), configured as
``examples/sc21/run_table_1.sh`` of NVIDIA/Megatron-LM; K22, table 5 of Korthikanti et al. 2022
(arXiv 2205.05198); titan, ``benchmarks/llama3_h100_202412_torchtitan.md`` of pytorch/torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.published_models import Dims
from partc.passes.search.plans.read_scaling_model import Recompute

Kernels = Literal["eager", "by hand", "compiled"]
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One published step; ``batch`` are sequences of all devices, ``microbatch`` those that a data
    rank computes at once. ``recompute`` is a plan's, ``whole_blocks`` says that the peer runs all
    of a block's forward again. ``kernels`` are the peer's. ``hidden`` are the collectives over
    ``tp`` that it runs beside gradients of weights: none, or those that sum gradients.
    ``waits_for_messages``: pipeline ranks wait for what each sends, the tensor ranks a share.
    ``memory_bytes`` is 0 where none are published.
    """

    name: str
    source: str
    dims: Dims
    machine: str
    devices: int
    batch: int
    seconds: float
    memory_bytes: float = 0.0
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    chunks: int = 1
    microbatch: int = 1
    data: Literal["ddp", "fsdp"] = "ddp"
    recompute: Recompute = "none"
    whole_blocks: bool = False
    kernels: Kernels = "by hand"
    hidden: Literal["none", "sums"] = "sums"
    waits_for_messages: bool = False

    @property
    def data_ranks(self) -> int:
        return self.devices // (self.tp * self.pp)

    @property
    def microbatches(self) -> int:
        return self.batch // self.data_ranks // self.microbatch

    @property
    def word(self) -> str:
        """The tensor preset."""
        return "" if self.tp == 1 else "megatron-sp" if self.sequence_parallel else "megatron"


def rows() -> Iterator[Row]:
    """All of them."""
    yield from _weak_scaling()
    yield from _recompute_study()
    yield from _torchtitan()


# Narayanan et al. 2021 ----------------------------------------------------------------------------
SC21_ROWS = (  # billions, heads, hidden, layers, tp, pp, chunks, microbatch, GPUs, batch, TFLOP/s
    ("1.7B", 24, 2304, 24, 1, 1, 1, 16, 32, 512, 137),
    ("3.6B", 32, 3072, 30, 2, 1, 1, 16, 64, 512, 138),
    ("7.5B", 32, 4096, 36, 4, 1, 1, 16, 128, 512, 142),
    ("18.4B", 48, 6144, 40, 8, 1, 1, 8, 256, 1024, 135),
    ("39.1B", 64, 8192, 48, 8, 2, 1, 4, 512, 1536, 138),
    ("76.1B", 80, 10240, 60, 8, 4, 3, 2, 1024, 1792, 140),
    ("145.6B", 96, 12288, 80, 8, 8, 2, 2, 1536, 2304, 148),
    ("310.1B", 128, 16384, 96, 8, 16, 2, 1, 1920, 2160, 155),
    ("529.6B", 128, 20480, 105, 8, 35, 3, 1, 2520, 2520, 163),
    ("1008B", 160, 25600, 128, 8, 64, 1, 1, 3072, 3072, 163),
)


def _weak_scaling() -> Iterator[Row]:
    """FLOP/s count the forward of the blocks twice, as it is computed."""
    for name, heads, hidden, layers, tp, pp, chunks, microbatch, gpus, batch, tera in SC21_ROWS:
        dims = Dims(hidden, layers, heads, vocab=51200, seq=2048)
        flops = batch * (dims.model_flops_per_sequence + dims.block_flops_per_sequence)
        yield Row(
            f"Megatron-LM {name}", "SC21", dims, "dgx-a100", gpus, batch,
            seconds=flops / (tera * 1e12 * gpus), tp=tp, pp=pp, chunks=chunks,
            microbatch=microbatch, whole_blocks=True, hidden="none", waits_for_messages=True,
        )  # fmt: skip


# Korthikanti et al. 2022 --------------------------------------------------------------------------
K22_ROWS = (  # heads, hidden, layers, pp, chunks, microbatch, GPUs, batch, s by full, s by theirs
    ("22B", 64, 6144, 48, 1, 1, 4, 8, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 3, 1, 64, 64, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 3, 1, 280, 280, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 1, 1, 512, 512, 94.42, 71.49),
)


def _recompute_study() -> Iterator[Row]:
    """Full recomputation, and selective with sequence parallelism."""
    for name, heads, hidden, layers, pp, chunks, microbatch, gpus, batch, full, theirs in K22_ROWS:
        dims = Dims(hidden, layers, heads, vocab=51200, seq=2048)
        for selective, seconds in ((False, full), (True, theirs)):
            yield Row(
                f"Megatron-LM {name} {'selective' if selective else 'full'}", "K22", dims,
                "dgx-a100", gpus, batch, seconds=seconds, tp=8, pp=pp, chunks=chunks,
                microbatch=microbatch, sequence_parallel=selective,
                recompute="attention" if selective else "none", whole_blocks=not selective,
                waits_for_messages=True,
            )  # fmt: skip


# torchtitan ---------------------------------------------------------------------------------------
LLAMA_8B = Dims(4096, 32, 32, vocab=128256, seq=8192, kv_heads=8, ffn=14336)
# Its selective checkpointing computes every other product of a block again. Of these the MLP's is
# the one of size; our plan names the module that it begins.
EVERY_OTHER = ("blocks.*.gated",)
# GPUs, kernels, tokens/s of a GPU, GiB
TITAN_ROWS: tuple[tuple[int, Kernels, int, float], ...] = (
    (8, "eager", 5762, 82.4),
    (8, "compiled", 6667, 77.0),
    (128, "eager", 5605, 67.0),
    (128, "compiled", 6514, 62.0),
)


def _torchtitan() -> Iterator[Row]:
    """Llama 3.1 8B, two sequences on each GPU, with and without torch.compile."""
    for gpus, kernels, rate, memory in TITAN_ROWS:
        yield Row(
            f"torchtitan 8B on {gpus}{', compiled' if kernels == 'compiled' else ''}", "titan",
            LLAMA_8B, "h100-96gb", gpus, 2 * gpus, seconds=2 * LLAMA_8B.seq / rate,
            memory_bytes=memory * GIB, microbatch=2, data="fsdp", recompute=EVERY_OTHER,
            kernels=kernels,
        )  # fmt: skip
