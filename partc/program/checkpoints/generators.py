"""The global generators of a rank's process in a checkpoint: torch's, numpy's, and Python's.

What a step draws follows from the stage's seed. What a script draws beside it, of noise or of
samples, comes from these. Each rank has its own, so that they are one tensor of bytes with a row
for each rank: in the rank's own file, read again on the same mesh alone.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partc.plan.mesh import PP
from partc.program.checkpoints.saved_checkpoint import Saved
from partc.program.role import Shard
from partc.program.stage.runtime import Stage

KIND = "generators"
_WORDS = struct.Struct("<625I?d")  # of Mersenne's twister: 624 words, the place, a spare number


def generators(stage: Stage) -> dict[str, tuple[Shard, Tensor]]:
    """The states of this process's generators, each ``u8[1, N]`` of this rank, by key."""
    states = {name: get() for name, (get, _) in _known(stage).items()}
    return {
        _key(name, stage): (_shard(_key(name, stage), len(state), stage), _row(state))
        for name, state in states.items()
    }


def saved_generators(saved: Saved, stage: Stage) -> dict[str, Shard]:
    """What a checkpoint has of this rank's generators, by key; nothing on another mesh."""
    known = {_key(name, stage): len(get()) for name, (get, _) in _known(stage).items()}
    mine = {key: _shard(key, size, stage) for key, size in known.items() if key in saved.shards}
    alike = saved.mesh == stage.mesh and saved.has_same_islands(stage)
    return {k: s for k, s in mine.items() if alike and saved.shards[k].shape == s.shape}


def load_generators(saved: Saved, stage: Stage) -> None:
    """Let this process draw what the one that was saved would have drawn."""
    for name, (_, put) in _known(stage).items():
        key = _key(name, stage)
        if key in (mine := saved_generators(saved, stage)):
            put(saved.piece(key, mine[key], stage).numpy().tobytes())


# inside --------------------------------------------------------------------------------------
def _known(stage: Stage) -> dict[str, tuple[Callable[[], bytes], Callable[[bytes], None]]]:
    """How the state of each generator is read and set."""
    found: dict[str, tuple[Callable[[], bytes], Callable[[bytes], None]]] = {
        "torch": (_torch, _set_torch),
        "python": (_python, _set_python),
    }
    if np.random.get_state(legacy=False)["bit_generator"] == "MT19937":
        found["numpy"] = (_numpy, _set_numpy)
    if stage.device.type == "cuda":
        of = stage.device
        found["cuda"] = (
            lambda: torch.cuda.get_rng_state(of).numpy().tobytes(),
            lambda state: torch.cuda.set_rng_state(_bytes(state), of),
        )
    return found


def _key(name: str, stage: Stage) -> str:
    return f"{KIND}/{name}/{stage.coords.get(PP, 0)}"


def _shard(key: str, size: int, stage: Stage) -> Shard:
    """A row of ``size`` bytes for each rank of this pipeline rank."""
    axes = [axis for axis in stage.mesh.names if axis != PP]
    num = prod(stage.mesh.size(axis) for axis in axes)
    return Shard(key, key, (num, size), torch.uint8, tuple((axis, 0, 1) for axis in axes))


def _row(state: bytes) -> Tensor:
    return _bytes(state)[None]


def _bytes(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _torch() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _set_torch(state: bytes) -> None:
    torch.default_generator.set_state(_bytes(state))


def _python() -> bytes:
    _, words, spare = random.getstate()
    return _WORDS.pack(*words, spare is not None, spare or 0.0)


def _set_python(state: bytes) -> None:
    *words, has_spare, spare = _WORDS.unpack(state)
    random.setstate((3, tuple(words), spare if has_spare else None))


def _numpy() -> bytes:
    state: Any = np.random.get_state()
    _, words, place, has_spare, spare = state
    return _WORDS.pack(*words.tolist(), place, bool(has_spare), spare)


def _set_numpy(state: bytes) -> None:
    *words, has_spare, spare = _WORDS.unpack(state)
    words_of = np.array(words[:-1], dtype=np.uint32)
    np.random.set_state(("MT19937", words_of, words[-1], int(has_spare), spare))
