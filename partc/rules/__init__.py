"""How ops may be cut along one mesh axis: the factor-rule language, the table, the localiser."""

from partc.rules import (  # noqa: F401  (each family adds its rules to the table)
    attention,
    conv,
    embedding,
    factory,
    index,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    reduce,
    slicing,
    view,
)
from partc.rules.discover import strategies_for
from partc.rules.local import localize
from partc.rules.strategy import Strategy, has_rule, strategies

__all__ = ["Strategy", "has_rule", "localize", "strategies", "strategies_for"]
