"""The files of a rank: written with a digest on the way, or linked where they are as before."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

Parts = Iterable[bytes | memoryview]
NAME = re.compile(r"rank-(\d{5,})(\.frozen)?\.safetensors\Z", re.ASCII)


class FileEntry(NamedTuple):
    """What the list of a checkpoint says of a file."""

    size: int  # bytes
    sha256: str


def file_name(rank: int, *, frozen: bool = False) -> str:
    """The file of a rank; that with the parameters which no step changes stands beside it."""
    return f"rank-{rank:05d}{'.frozen' * frozen}.safetensors"


def write_file(path: Path, parts: Parts) -> FileEntry:
    """Write a file, and make it durable.

    The digest is made in a thread beside the write, of the bytes that are written: both leave the
    other threads of this process running, and together take as long as the slower one. The thread
    is no pool's, as those take nothing any more once the script has come to its end.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            beside = threading.Thread(target=digest.update, args=(part,))
            beside.start()
            try:
                size += _write(file.fileno(), part)
            finally:
                beside.join()
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def entry_of(parts: Parts) -> FileEntry:
    """The entry of a file that is not written."""
    digest, size = hashlib.sha256(), 0
    for part in parts:
        digest.update(part)
        size += len(part)
    return FileEntry(size, digest.hexdigest())


def link_or_write(path: Path, parts: Parts, like: tuple[Path, FileEntry] | None) -> FileEntry:
    """As ``write_file``; a hard link to the file ``like``, if that has the same content.

    File systems without links get a copy.
    """
    parts = [*parts]
    if like is not None and has_size(*like) and entry_of(parts) == like[1]:
        with suppress(OSError):
            path.hardlink_to(like[0])
            return like[1]
    return write_file(path, parts)


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Make a file or directory durable before what depends on it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(handle: int, part: bytes | memoryview) -> int:
    """Write all of it: a system may take less at once."""
    left = memoryview(part)
    while left:
        left = left[os.write(handle, left) :]
    return len(part)


def has_size(path: Path, entry: FileEntry) -> bool:
    """Whether a plain file is as long as the list says: told without reading it."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size == entry.size
