"""Single calls in small graphs, for tests of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from partc.graph import Value, set_fake, set_value
from partc.graph.graph_edits import run_fake
from partc.plan.sharding import Layout
from partc.rules import Strategy, strategies

MODE = FakeTensorMode()


class Calls:
    """A small joint graph to which calls are added."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder("x")
        set_value(node, Value("input", shape, dtype, name=node.name))
        with MODE:
            set_fake(node, torch.empty(shape, dtype=dtype))
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        set_value(node, Value())
        with MODE:
            set_fake(node, run_fake(target, args, kwargs))
        return node


def pick(node: fx.Node, *outs: Layout, num: int = 2) -> Strategy:
    """The first strategy with these results."""
    return next(s for s in strategies(node, num) if s.outs == outs)
