"""Sharding rules: how each op may be sharded along one mesh axis, and the call on one rank.

In: a call of an op. Out: its strategies (layouts of operands and results that fit together), and
the call that one rank runs on its pieces. Start: `families/matmul.py` to see rules, `notation.py`
and `table.py` for their meaning, `strategy.py` for the strategies that follow from a rule.
Never: a plan or a pass.
"""

from partc.rules import families  # noqa: F401  (each family adds its rules to the table)
from partc.rules.discover import strategies_for
from partc.rules.local import write_local_call
from partc.rules.strategy import Strategy, has_rule, strategies

__all__ = ["Strategy", "has_rule", "strategies", "strategies_for", "write_local_call"]
