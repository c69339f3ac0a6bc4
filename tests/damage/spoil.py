"""Seeded damage to the content of a file: bytes, lines, words, and entries of JSON."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

Spoiled = tuple[bytes, str]  # the content now, and what was done
WORD = re.compile(rb"[A-Za-z_]\w*|\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def spoil(rng: random.Random, content: bytes) -> Spoiled:
    """One damage; the content may stay as it was where the damage has nothing to change."""
    how = rng.choice(BYTES if rng.random() < 0.4 else TEXT)
    return how(rng, content or b"\n")


# bytes ---------------------------------------------------------------------------------------
def flip(rng: random.Random, content: bytes) -> Spoiled:
    changed, places = bytearray(content), []
    for _ in range(rng.choice((1, 1, 1, 4))):
        at = rng.randrange(len(changed))
        changed[at] ^= rng.randrange(1, 256)
        places.append(at)
    return bytes(changed), f"bytes {places} flipped"


def flip_bit(rng: random.Random, content: bytes) -> Spoiled:
    changed, at = bytearray(content), rng.randrange(len(content))
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed), f"a bit of byte {at} flipped"


def truncate(rng: random.Random, content: bytes) -> Spoiled:
    at = rng.randrange(len(content))
    return content[:at], f"truncated to {at} of {len(content)} bytes"


def empty(rng: random.Random, content: bytes) -> Spoiled:
    return b"", "emptied"


def insert(rng: random.Random, content: bytes) -> Spoiled:
    at, new = rng.randrange(len(content) + 1), rng.randbytes(rng.choice((1, 2, 8, 64)))
    return content[:at] + new + content[at:], f"{len(new)} bytes inserted at {at}"


def remove(rng: random.Random, content: bytes) -> Spoiled:
    at, num = rng.randrange(len(content)), rng.choice((1, 2, 8, 64))
    return content[:at] + content[at + num :], f"{num} bytes removed at {at}"


def zero(rng: random.Random, content: bytes) -> Spoiled:
    at, num = rng.randrange(len(content)), rng.choice((1, 8, 512))
    gone = content[at : at + num]
    return content[:at] + bytes(len(gone)) + content[at + num :], f"{len(gone)} zeros at {at}"


# lines and words -----------------------------------------------------------------------------
def delete_line(rng: random.Random, content: bytes) -> Spoiled:
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join(lines[:at] + lines[at + 1 :]), f"line {at + 1} deleted: {_shown(lines[at])}"


def double_line(rng: random.Random, content: bytes) -> Spoiled:
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join(lines[: at + 1] + lines[at:]), f"line {at + 1} doubled: {_shown(lines[at])}"


def swap_lines(rng: random.Random, content: bytes) -> Spoiled:
    lines = content.splitlines(keepends=True)
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines), f"lines {a + 1} and {b + 1} swapped"


def change_word(rng: random.Random, content: bytes) -> Spoiled:
    """Put another word of the file, or another number, in the place of a word."""
    words = list(WORD.finditer(content))
    if not words:
        return flip(rng, content)
    at = rng.choice(words)
    old = at.group()
    new = rng.choice(words).group() if rng.random() < 0.5 else _near(rng, old)
    return content[: at.start()] + new + content[at.end() :], (
        f"{_shown(old)} at {at.start()} changed to {_shown(new)}"
    )


def _near(rng: random.Random, word: bytes) -> bytes:
    """A word that differs in a letter, or a number near by."""
    if word.isdigit():
        number = int(word)
        return str(rng.choice((number + 1, max(0, number - 1), number * 2, 0, -number))).encode()
    at = rng.randrange(len(word))
    return word[:at] + rng.choice((b"", b"x", b"_", b"9")) + word[at + 1 :]


def _shown(line: bytes) -> str:
    return repr(line.strip()[:60].decode("utf-8", "replace"))


Damage = Callable[[random.Random, bytes], Spoiled]
BYTES: tuple[Damage, ...] = (flip, flip_bit, truncate, empty, insert, remove, zero)
TEXT: tuple[Damage, ...] = (delete_line, double_line, swap_lines, change_word, change_word)


# entries of JSON -----------------------------------------------------------------------------
PLAIN: tuple[Any, ...] = (None, True, False, 0, 1, -1, 3, 1.5, 1e300, "", "x", "dp", [], {}, [[]])


def spoil_entry(rng: random.Random, fields: Any, values: tuple[Any, ...] = PLAIN) -> str:
    """Change one entry in place, at any depth; what was done."""
    holder, key, path = _pick(rng, fields)
    old = holder[key]
    how = rng.randrange(6)
    if how == 0:
        del holder[key]
        return f"{path} deleted"
    if how == 1 and isinstance(holder, list):
        holder.insert(key, old)
        return f"{path} doubled"
    if how == 2:
        other, place, where = _pick(rng, fields)
        holder[key] = json.loads(json.dumps(other[place]))
        return f"{path} set to what {where} has"
    if how == 3 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = rng.choice((old + 1, old - 1, old * 2, -old, old / 2))
    elif how == 4 and isinstance(old, str) and old:
        at = rng.randrange(len(old))
        holder[key] = old[:at] + rng.choice(("", "x", "0", "\n")) + old[at + 1 :]
    else:
        holder[key] = json.loads(json.dumps(rng.choice(values)))
    return f"{path}: {str(old)[:40]!r} set to {str(holder[key])[:40]!r}"


def _pick(rng: random.Random, fields: Any) -> tuple[Any, Any, str]:
    """An entry at a random depth: its holder, its key there, and the path of keys."""
    holder, path = fields, ""
    while True:
        keys = sorted(holder) if isinstance(holder, dict) else range(len(holder))
        key = rng.choice(keys)
        path += f".{key}" if path else str(key)
        below = holder[key]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.2:
            return holder, key, path
        holder = below
