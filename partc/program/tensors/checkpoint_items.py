"""The boxes of a rank's piece in the words of torch.distributed.checkpoint.

Its import takes some 45 MB, so whoever needs this module imports it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from partc.program.role import Shard
from partc.program.tensors.chunks import Chunk


def storage_of(chunk: Chunk) -> ChunkStorageMetadata:
    """A box."""
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def write_items(name: str, shard: Shard, piece: Tensor, chunks: Sequence[Chunk]) -> list[Any]:
    """What a rank writes of a tensor, an item for each box."""
    properties = TensorProperties.create_from_tensor(piece)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(chunk.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(storage_of(chunk), properties, torch.Size(shard.shape)),
        )
        for chunk in chunks
    ]
