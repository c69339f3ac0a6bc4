"""Check that a random draw has a site, and that all draws of one site give the same numbers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from partc.checks.calls import wrong
from partc.errors import CheckError
from partc.graph import Graph, typed
from partc.graph.draws import UNREAD, Draw, drawn_in, site_of
from partc.graph.folds import spread


def check_draw(node: fx.Node, drawn: dict[str, fx.Node]) -> None:
    """Raise CheckError if a draw has no site, or is cut otherwise than another one of its site.

    ``drawn`` has the first draw of each site, and gets this one.
    """
    site = site_of(node)
    if not site:
        raise wrong(node, "it draws random numbers, and nothing says which", "Give it a site.")
    first = drawn.setdefault(site, node)
    if first.target is not node.target or typed(first) != typed(node):
        why = f"{first.name} draws the numbers of {site!r} as {typed(first)}"
        raise wrong(node, why, "Draw once, or cut both in the same way.")


def drawn_by(graphs: Iterable[Graph], joint: Graph) -> dict[str, Draw]:
    """What the stages of a program draw by site, and what the model draws for nobody.

    CheckError if two stages cut one draw in two ways. ``joint`` is the graph as it was traced.
    """
    found: dict[str, Draw] = {}
    for graph in graphs:
        for site, draw in drawn_in(graph).items():
            if found.setdefault(site, draw) != draw:
                raise CheckError(
                    where=site,
                    what=f"one stage draws it as {draw.cuts}, another as {found[site].cuts}",
                    why="the two would have other numbers",
                    do="This is a fault in partc or in a pass of yours; report it with the plan.",
                )
    left_out = joint.kept.left_out if joint.kept else joint.folds
    for site in spread(joint.sites, left_out):
        found.setdefault(site, Draw(joint.sites.get(site, site), kind=UNREAD))
    return dict(sorted(found.items()))
