"""Read and write the safetensors format: named tensors in a file that cannot contain code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from partc.errors import LoadError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors sorted by name, so that equal tensors make byte-identical files."""
    header, chunks, end = {}, [], 0
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().flatten()
        data = flat.view(torch.uint8).numpy().tobytes()
        start, end = end, end + len(data)
        entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [start, end]}
        chunks.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes, as the format asks
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


class TensorFile(Mapping[str, Tensor]):
    """The tensors of one file by name; each is read from disk when asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._entries = self._read_header()

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape, start, end = self._entries[name]
        with self.path.open("rb") as file:
            file.seek(start)
            data = bytearray(file.read(end - start))
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _read_header(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
        try:
            file_bytes = self.path.stat().st_size
            with self.path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                    self._refuse("its header is longer than the file")
                header = json.loads(file.read(header_bytes))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            self._refuse(str(error))
        if not isinstance(header, dict):
            self._refuse("its header is not a table of tensors")
        header.pop("__metadata__", None)
        offset = 8 + header_bytes
        return {n: self._entry(n, e, offset, file_bytes) for n, e in header.items()}

    def _entry(
        self, name: str, entry: Any, offset: int, file_bytes: int
    ) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """The checked dtype, shape and place in the file of one header entry."""
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            start, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            self._refuse(f"the entry of {name!r} is malformed or of an unknown dtype")
        if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
            self._refuse(f"the entry of {name!r} holds something else than sizes")
        if end - start != prod(shape) * dtype.itemsize:
            self._refuse(f"{name!r} has {end - start} bytes for shape {list(shape)}")
        if offset + end > file_bytes:
            self._refuse(f"{name!r} would end at byte {offset + end} of {file_bytes}")
        return dtype, shape, offset + start, offset + end

    def _refuse(self, why: str) -> NoReturn:
        raise LoadError(
            where=str(self.path),
            what="not a whole safetensors file",
            why=why,
            do="Copy or write it again.",
        ) from None


class TensorFiles(Mapping[str, Tensor]):
    """Several tensor files as one mapping; a name that stands in two of them is refused."""

    def __init__(self, *paths: str | Path) -> None:
        self._file_of: dict[str, TensorFile] = {}
        for file in map(TensorFile, [f for path in paths for f in _files_of(Path(path))]):
            for name in file:
                if name in self._file_of:
                    raise LoadError(
                        where=str(file.path),
                        what=f"{name!r} stands also in {self._file_of[name].path}",
                        why="so it is unclear which one is meant",
                        do="Name the files of one checkpoint only.",
                    )
                self._file_of[name] = file

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _files_of(path: Path) -> list[Path]:
    """The tensor files that a path names: itself, those of an index file, or those in a folder."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    if path.name.endswith(".index.json"):
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        return [path.parent / Path(name).name for name in names]
    return [path]
