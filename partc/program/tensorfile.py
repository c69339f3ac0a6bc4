"""Read and write the safetensors format: named tensors in a file that cannot contain code.

The safetensors package reads the header, and refuses a file with a byte that no tensor has, or two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partc.errors import LoadError
from partc.file_text import Unreadable, file_text
from partc.program.folders import CHECKPOINT, CONSTANTS, if_checkpoints, if_program

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Typed = tuple[Sequence[int], torch.dtype]  # a tensor's shape and dtype
# Dtypes that the format has no word for are kept as bytes, `u8[..., itemsize]`. This entry of the
# file's metadata says which: {"name of the tensor": "complex128"}.
OTHER_DTYPES = "partc.dtypes"


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None
) -> None:
    """Write tensors sorted by name, so that equal tensors make byte-identical files.

    ``notes``: texts that ``TensorFile.notes`` gives back.
    """
    with Path(path).open("wb") as file:
        for data in parts_of(tensors, notes):
            file.write(data)


def parts_of(
    tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in order: its header, then each tensor's memory, of which no copy is
    made where the tensor is contiguous and on the CPU.
    """
    yield header_of({name: (x.shape, x.dtype) for name, x in sorted(tensors.items())}, notes)
    for _, tensor in sorted(tensors.items()):
        yield bytes_of(tensor)


def header_of(typed: Mapping[str, Typed], notes: Mapping[str, str] | None = None) -> bytes:
    """What a file has before the memory of its tensors, which follow in this order."""
    header: dict[str, Any] = {}
    end, others = 0, {}
    for name, (shape, dtype) in typed.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        entry = {"dtype": NAMES.get(dtype, "U8"), "shape": list(shape)}
        if dtype not in NAMES:
            entry["shape"] = [*shape, dtype.itemsize]
            others[name] = str(dtype).removeprefix("torch.")
        header[name] = {**entry, "data_offsets": [start, end]}
    said = {**(notes or {}), **({OTHER_DTYPES: json.dumps(others)} if others else {})}
    header |= {"__metadata__": said} if said else {}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes, as the format asks
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's memory, of which no copy is made where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().flatten()
    memory: Any = flat.view(torch.uint8).numpy()
    return memoryview(memory)


class TensorFile(Mapping[str, Tensor]):
    """The tensors of one file by name; each is read from disk when asked for.

    Attributes:
        notes: the texts that were written beside the tensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():  # a pipe, a device, a folder
            self._refuse("there is no such file" if not self.path.exists() else "it is no file")
        try:
            opened: Any = safe_open(str(self.path), framework="pt")
            self._file = opened
            self.notes: dict[str, str] = dict(self._file.metadata() or {})
            self._known = dict.fromkeys(sorted(self._file.keys()))
            self._check_names()
        except (OSError, SafetensorError, UnicodeError, MemoryError) as error:
            self._refuse(str(error))  # MemoryError: more than this process may map
        self._others = self._dtypes_of(self.notes.pop(OTHER_DTYPES, "{}"))

    def __getitem__(self, name: str) -> Tensor:
        return self.mapped(name).clone()  # what is mapped changes with the file

    def mapped(self, name: str) -> Tensor:
        """A tensor over the file itself: what is read of it is read from disk, and no more.

        One that does not begin at a multiple of its elements' size is a copy, since kernels that
        are given such an address may end the process.
        """
        if name not in self._known:
            raise KeyError(name)
        self.typed(name)
        try:
            found: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, AttributeError) as error:
            self._refuse(f"{name!r} cannot be read: {error}")
        dtype = self._others.get(name, found.dtype)
        if found.data_ptr() % dtype.itemsize:
            found = found.clone()
        return found if dtype == found.dtype else _of_bytes(found, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def typed(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor, which is not read."""
        part = self._file.get_slice(name)
        shape = tuple(part.get_shape())
        if name in self._others:
            return shape[:-1], self._others[name]
        if part.get_dtype() not in DTYPES:
            self._refuse(f"the entry of {name!r} has the unknown dtype {part.get_dtype()}")
        return shape, DTYPES[part.get_dtype()]

    def _check_names(self) -> None:
        """Refuse a header with a name twice, of which the package takes the last."""
        with self.path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            json.loads(file.read(size), object_pairs_hook=self._without_doubles)

    def _without_doubles(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            self._refuse("a name stands in its header twice")
        return found

    def _dtypes_of(self, text: str) -> dict[str, torch.dtype]:
        """The dtypes of tensors that are kept as bytes."""
        try:
            found = {str(n): getattr(torch, dtype) for n, dtype in json.loads(text).items()}
        except (ValueError, AttributeError, TypeError, RecursionError):
            self._refuse(f"its list {OTHER_DTYPES} is malformed")
        for name, dtype in found.items():
            raw: Any = self._file.get_slice(name) if name in self._known else None
            fits = raw is not None and isinstance(dtype, torch.dtype) and raw.get_dtype() == "U8"
            if not fits or raw.get_shape()[-1:] != [dtype.itemsize]:
                self._refuse(f"its list {OTHER_DTYPES} does not fit {name!r}")
        return found

    def _refuse(self, why: str) -> NoReturn:
        raise LoadError(
            where=str(self.path),
            what="not a whole safetensors file" if self.path.exists() else "cannot be read",
            why=why,
            do="Name a safetensors file that is there, or pass a state dict."
            if not self.path.exists()
            else "Pass what torch.load(path, weights_only=True) gives."
            if _is_of_torch(self.path)
            else "Copy or write it again.",
        ) from None


def has_its_size(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says: told without reading all of it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            return False
        try:
            header = json.loads(file.read(length))
            ends = [
                entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
            ]
            return bool(size == 8 + length + max(ends, default=0))
        except (ValueError, AttributeError, TypeError, LookupError, RecursionError):
            return False


def _is_of_torch(path: Path) -> bool:
    """Whether a file begins as ``torch.save`` writes it: as a zip, or a pickle."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")


def _of_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """``u8[..., itemsize]`` as a tensor of another dtype."""
    shape = data.shape[:-1]
    return (
        data.flatten().view(dtype).view(shape) if prod(shape) else torch.empty(shape, dtype=dtype)
    )


class TensorFiles(Mapping[str, Tensor]):
    """Several tensor files as one mapping; a name that stands in two of them is refused.

    Its tensors are over the files: a rank that copies its pieces of them reads these alone.
    """

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
        return self._file_of[name].mapped(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _files_of(path: Path) -> list[Path]:
    """The tensor files that a path names: itself, those of an index file, or those in a folder."""
    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        other = if_program(path) if [each.name for each in found] == [CONSTANTS] else ""
        if not found or (path / CHECKPOINT).is_file():
            other = if_checkpoints(path)
        if other:
            raise _no_weights(path, "it is no folder of weights", other)
        if not found:
            raise _no_weights(path, "there is no .safetensors file in it")
        return found
    if path.name.endswith(".index.json"):
        return [path.parent / name for name in _indexed(path)]
    return [path]


def _indexed(path: Path) -> list[str]:
    """The names of the files that an index lists, which stand beside it."""
    try:
        names = sorted({*json.loads(file_text(path))["weight_map"].values()})
    except Unreadable as error:
        raise _no_weights(path, str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _no_weights(path, "it is malformed, and no index of weights") from None
    if not names:
        raise _no_weights(path, "it has no file")
    for name in names:
        if not isinstance(name, str) or not name.endswith(".safetensors") or "\0" in name:
            raise _no_weights(path, f"{name!r} is not the name of a safetensors file")
        if Path(name).name != name:
            raise _no_weights(path, f"{name!r} does not stand beside it")
    return names


def _no_weights(path: Path, why: str, do: str = "") -> LoadError:
    return LoadError(
        where=str(path),
        what="these weights cannot be read",
        why=why,
        do=do
        or 'Name a safetensors file, a folder of some, or an index ({"weight_map": '
        '{"name of a tensor": "file.safetensors"}}).',
    )
