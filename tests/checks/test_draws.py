"""A draw without a site, and one site that is drawn in two ways, are refused."""

from __future__ import annotations

import pytest

from partc.checks.draws import drawn_by
from partc.checks.layouts import check_layouts
from partc.errors import CheckError
from partc.graph.graph_parse import parse_graph

TEXT = """
local graph Net  mesh dp=2
input x : f32[4@dp,8]
forward (loss)
  rand = rand([2, 8], site='noise') : f32[4@dp,8]
  again = rand([2, 8], site='noise') : f32[4@dp,8]
  add = add.Tensor(rand, again) : f32[4@dp,8]
outputs
  result y = add
"""


def test_equal_draws_of_one_site_are_sound() -> None:
    graph = parse_graph(TEXT)
    check_layouts(graph)
    assert str(parse_graph(str(graph))) == str(graph)
    assert drawn_by([graph, graph], graph)["noise"].cuts == (("dp", 0, 1, 2),)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rand([2, 8], site='noise') : f32[4@dp,8]\n  again", "rand([2, 8]) : f32[4@dp,8]\n  again",
         "nothing says which"),
        ("again = rand([2, 8], site='noise') : f32[4@dp,8]",
         "again = rand([4, 4], site='noise') : f32[4,8@dp]", "draws the numbers of 'noise'"),
        ("again = rand(", "again = randn(", "draws the numbers of 'noise'"),
    ],
)  # fmt: skip
def test_other_draws_are_refused(old: str, new: str, words: str) -> None:
    assert old in TEXT
    graph = parse_graph(TEXT.replace(old, new).replace("add.Tensor(rand, again)", "neg(rand)"))
    with pytest.raises(CheckError, match=words):
        check_layouts(graph)


def test_stages_that_cut_one_draw_in_two_ways_are_refused() -> None:
    graph = parse_graph(TEXT)
    other = parse_graph(
        TEXT.replace("[2, 8]", "[4, 8]").replace("4@dp", "4").replace("x : f32[4,", "x : f32[4@dp,")
    )
    with pytest.raises(CheckError, match="one stage draws it as"):
        drawn_by([graph, other], graph)
