"""Texts from files that anybody may have written: what is no file, and what is too long, is told
before it is read."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

MOST_BYTES = 64_000_000
LONGEST = 80  # characters of a line that a message quotes
# A dotted key of many parts, which a TOML reader takes very long for.
_DEEP_KEY = re.compile(r"""(?<![\w"'-])(?:["']?[\w-]++["']?\s*+\.\s*+){50}""", re.ASCII)
_NAMES = re.compile(
    r"""\s*(?:\[{1,2}+((?:[^][='"]|"[^"]*"|'[^']*')++)\]|((?:[\w.-]|"[^"]*"|'[^']*')+?)\s*=)"""
)  # at a line's head
_OTHERS = (  # signs of other formats in a line, and what TOML has in their place
    (r"\b(True|False)\b", "TOML writes true and false"),
    (r"\bNone\b|\bnull\b", "TOML has no None: leave the line out"),
    (r"^[\w\"'.-]+\s*:|^\{", "TOML writes key = value, and texts in quotation marks"),
    (r"=.*,\s*[\w.-]+\s*=", "TOML has one key = value in a line"),
    (r"=\s*[A-Za-z]", "TOML writes texts in quotation marks"),
)


_IN_JSON = (  # what other languages write, and what JSON has in its place
    ("'", 'texts stand in double quotation marks, "a"'),
    ("True|False|None", "JSON writes true, false and null"),
    (r"[A-Za-z_]\w*\s*:", "keys stand in double quotation marks"),
)


class Unreadable(Exception):
    """A file has no text that can be read; the message says why."""


def if_of_another_rank(path: str | Path) -> str:
    """What to add where a path is missing and there are other ranks, one of which may be about to
    write it; "" else.
    """
    if os.environ.get("WORLD_SIZE", "1") in ("", "1") or os.path.exists(path):
        return ""
    return " Another rank may not have written it yet: call dist.barrier() behind its save."


def file_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a file, as UTF-8.

    Unreadable if it is missing, no plain file (a folder, a pipe, a device), longer than ``most``
    bytes, or no text.
    """
    return text_of(file_bytes(path, most))


def file_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file; Unreadable as for ``file_text``."""
    try:
        # a pipe without a writer would be waited for; whoever replaces the file is not followed
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(number, "rb") as file:
            mode = os.fstat(number).st_mode
            if not stat.S_ISREG(mode):
                raise Unreadable("it is a folder" if stat.S_ISDIR(mode) else "it is no plain file")
            content = file.read(most + 1)
    except OSError as error:
        home = os.path.expanduser(path)
        why = f"; a shell reads ~, and Python does not: write {home}" * (home != str(path))
        raise Unreadable((error.strerror or str(error)) + why) from None
    except ValueError as error:  # a zero byte in the path
        raise Unreadable(str(error)) from None
    if len(content) > most:
        raise Unreadable(f"it has more than {most:,} bytes")
    return content


def text_of(content: bytes) -> str:
    """Bytes as UTF-8 with the line ends of Unix; Unreadable if they are none."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"byte {error.start} is no text in UTF-8: save the file in that encoding"
        ) from None


def json_value(text: str) -> Any:
    """The value of a JSON text; Unreadable if it is none, is nested without end, or says a key
    twice, of which only the last would count.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise Unreadable(_no_json(text, error)) from None
    except ValueError as error:  # a number of thousands of digits
        raise Unreadable(str(error)) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unreadable(f"the key {twice!r} stands in it twice: keep one")
    return found


def _no_json(text: str, error: json.JSONDecodeError) -> str:
    """What is no JSON, and in which line; what Python and JavaScript have, JSON lacks."""
    said, at, rest = error.msg, error.pos, text[error.pos :]
    before = text[:at].rstrip()
    if rest.startswith(",") or (before.endswith(",") and rest[:1] in ("}", "]")):
        said, at = "nothing follows this comma: delete it", len(before) - (rest[:1] != ",")
    elif rest.startswith(("//", "#", "/*")):
        said = "JSON has no comments: delete it"
    else:
        said += next((f"; {hint}" for sign, hint in _IN_JSON if re.match(sign, rest)), "")
    line = (text.split("\n")[text.count("\n", 0, at)]).strip()
    shown = f": {line}" if 0 < len(line) <= LONGEST else ""
    return f"line {text.count(chr(10), 0, at) + 1}{shown}: {said}"


def toml_table(text: str) -> dict[str, Any]:
    """The table of a TOML text; Unreadable if it is none, or nested without end."""
    if _DEEP_KEY.search(text):
        raise Unreadable("a key has more than 50 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    except ValueError as error:  # no TOML, or a number of thousands of digits
        raise Unreadable(_said_twice(text, str(error)) or _with_line(text, str(error))) from None


def _said_twice(text: str, said: str) -> str:
    """The key, or table, that stands in two lines where a TOML reader says that there are two."""
    table, lines, last = "", dict[str, int](), _number_of(text, said)
    for number, line in enumerate(text.split("\n")[:last], 1):
        found = _NAMES.match(line)
        if found is None:
            continue
        is_table = found[1] is not None
        name = f"[{found[1].strip()}]" if is_table else f"{table}{found[2].strip()}"
        if number == last and name in lines and said.startswith("Cannot"):
            return f"{name[:LONGEST]} stands in line {lines[name]} and again in {number}: keep one"
        if line.lstrip().startswith("[["):  # one of several of a name, with keys of its own
            lines = {n: at for n, at in lines.items() if not n.startswith(name)}
        table = f"{name} " if is_table else table
        lines[name] = number
    return ""


def _number_of(text: str, said: str) -> int:
    """The number of the line of which a TOML reader speaks, the last that is not empty for the
    end of the document; 0 for none.
    """
    if at := re.search(r"at line (\d+)", said):
        return int(at[1])
    return text.rstrip().count("\n") + 1 if "end of document" in said else 0


def _with_line(text: str, said: str) -> str:
    """What a TOML reader says of a text, with the line, and what to write in place of Python's,
    JSON's or YAML's words.
    """
    number = _number_of(text, said)
    line = text.split("\n")[number - 1].strip() if number else ""
    if not line or len(line) > LONGEST:
        return said
    hint = next((f"; {hint}" for sign, hint in _OTHERS if re.search(sign, line)), "")
    return f"{said}: {line}{hint}"
