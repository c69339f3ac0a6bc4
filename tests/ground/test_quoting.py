import ast
import keyword
import math
import re

import pytest
import torch

from partc.errors import UsageError
from partc.quoting import comment, docstring, identifier, literal

HOSTILE = [
    "",
    "a b",
    'a"]; import os #\n',
    "a'); __import__('os').system('id') #",
    '"""; import os',
    "'\"\\",
    "\\",
    "{{ 7 * 7 }} {% raw %}",
    "a\rb\x0bc\x0cd\x85e\u2028f\u2029g\0h\x1b[31m",
    "\u202eevil\u200b",
    "größe_重み_\U0001f600",
    "\ud800",
    "-*- coding: utf-7 -*-",
    "x" * 500,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_string_literal_evaluates_to_itself(text: str) -> None:
    assert literal(text).isascii()
    assert "\n" not in literal(text)
    assert ast.literal_eval(literal(text)) == text


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ("w1", '"w1"'),
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (1e-05, "1e-05"),
        (-0.0, "-0.0"),
        (math.inf, 'float("inf")'),
        (-math.inf, 'float("-inf")'),
        (math.nan, 'float("nan")'),
        ((), "()"),
        ((1,), "(1,)"),
        ([1, [2.5]], "[1, [2.5]]"),
        ({"w1": ("a", 0, None)}, '{"w1": ("a", 0, None)}'),
        (torch.Size([8, 64]), "(8, 64)"),
        (torch.float32, "torch.float32"),
        (torch.strided, "torch.strided"),
        (torch.channels_last, "torch.channels_last"),
        (torch.device("cuda", 1), 'torch.device("cuda:1")'),
    ],
)
def test_literal_spells_value(value: object, source: str) -> None:
    assert literal(value) == source
    eval(source, {"torch": torch})


class Impostor(str):
    def __repr__(self) -> str:
        return "__import__('os')"


@pytest.mark.parametrize(
    "value", [object(), {1}, b"a", Impostor("a"), [Impostor("a")], {Impostor("a"): 1}, len]
)
def test_literal_refuses_other_values(value: object) -> None:
    with pytest.raises(UsageError, match="cannot be written as a literal"):
        literal(value)


@pytest.mark.parametrize("name", [*HOSTILE, *keyword.kwlist, "0", "__class__", "a.__init__"])
def test_identifier_is_safe(name: str) -> None:
    safe = identifier(name)
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", safe, re.ASCII)
    assert not safe.startswith("__")
    assert not keyword.iskeyword(safe)
    assert identifier(name) == safe


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("blocks.0.w1.weight", "blocks_0_w1_weight"),
        ("0", "_0"),
        ("class", "class_"),
        ("__class__", "_class__"),
        ('a"]; import os #\n', "a_import_os_"),
    ],
)
def test_identifier_keeps_what_it_can(name: str, safe: str) -> None:
    assert identifier(name) == safe


@pytest.mark.parametrize("text", HOSTILE)
def test_comment_is_one_printable_line(text: str) -> None:
    line = comment(text, 40)
    assert re.fullmatch(r"[ -~]{0,40}", line)
    assert not re.search(r"coding[:=]", line)
    assert ast.dump(ast.parse(f"x = 1  # {line}\n")) == ast.dump(ast.parse("x = 1"))


@pytest.mark.parametrize("text", HOSTILE)
def test_docstring_stays_a_string(text: str) -> None:
    tree = ast.parse(f'"""{docstring(text)}"""')
    assert [type(node) for node in tree.body] == [ast.Expr]
    assert ast.get_docstring(tree, clean=False) == docstring(text)


@pytest.mark.parametrize(
    ("length", "line"), [(6, "abcdef"), (5, "ab..."), (3, "..."), (2, ".."), (0, "")]
)
def test_comment_is_cut(length: int, line: str) -> None:
    assert comment("abcdef", length) == line


def test_comment_joins_lines() -> None:
    assert comment(" a\n\n  b\tc ") == "a b c"
