"""How ops may be cut along one mesh axis: the factor-rule language, the table, the localiser.

In: a call of an op. Out: its strategies: layouts of operands and results that fit together. Start:
`families/matmul.py` to read rules, `table.py` and `notation.py` for what they mean,
`strategy.py` for what follows from them. Never: a plan or a pass.
"""

from partc.rules import families  # noqa: F401  (each family adds its rules to the table)
from partc.rules.discover import strategies_for
from partc.rules.local import write_local_call
from partc.rules.strategy import Strategy, has_rule, strategies

__all__ = ["Strategy", "has_rule", "strategies", "strategies_for", "write_local_call"]
