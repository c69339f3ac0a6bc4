"""What is proved of every rule: the table in, text or JSON out, by running all proofs now."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from partc.plan.sharding import Layout, cut
from partc.rules.call import whole_call
from partc.rules.prove import SEEDS, Proof, prove
from partc.rules.signature import Signature
from partc.rules.strategy import strategies
from partc.rules.table import RULES
from tests.rule_cases.cases import cases_by_rule, why_not_run

NUMS = (2, 3, 4)
Progress = Callable[[str, int, int], None]  # rule, its number, how many there are
HEADS = ("op", "rule", "cuts", "trials", "pieces", "dtypes", "compared", "worst", "result")


@dataclass(frozen=True)
class RuleProof:
    """The proofs of one rule taken together."""

    op: str
    rule: str  # the letters of its first case
    cuts: int  # strategies of all cases and numbers of ranks
    trials: int
    pieces: tuple[str, ...]
    dtypes: tuple[str, ...]
    compared: tuple[str, ...]  # by values, moments or shapes
    worst: float  # largest relative error
    result: str  # "proved", "FAILS: ...", "never cut" or why it cannot be run

    @property
    def texts(self) -> tuple[str, ...]:
        """The cells of this line of the table."""
        sets = (" ".join(s) or "-" for s in (self.pieces, self.dtypes, self.compared))
        worst = f"{self.worst:.0e}" if self.trials else "-"
        return (self.op, self.rule, str(self.cuts), str(self.trials), *sets, worst, self.result)


def rules_table(progress: Progress | None = None) -> str:
    """Every rule and what was proved of it, as an aligned table."""
    lines = [HEADS, *(line.texts for line in prove_all(progress))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)) for line in lines)
    ranks = ", ".join(map(str, NUMS))
    return "\n".join([f"rules, each proved on {ranks} ranks", *(row.rstrip() for row in rows)])


def as_json(progress: Progress | None = None) -> str:
    """The same as a JSON list, one object per rule."""
    return json.dumps([asdict(line) for line in prove_all(progress)], indent=2)


def prove_all(progress: Progress | None = None) -> Iterator[RuleProof]:
    """Prove every rule of the table on its cases, one after the other."""
    by_rule = cases_by_rule()
    for number, (name, cases) in enumerate(by_rule.items(), start=1):
        if progress is not None:
            progress(name, number, len(by_rule))
        yield prove_rule(name, cases)


def prove_rule(name: str, cases: Sequence[Signature]) -> RuleProof:
    """Prove all strategies of a rule's cases for every number of ranks."""
    proofs = proofs_of(cases)
    trials = [trial for proof in proofs for trial in proof.trials]
    return RuleProof(
        op=name,
        rule=_letters(name, cases),
        cuts=len(proofs),
        trials=len(trials),
        pieces=tuple(sorted({trial.pieces for trial in trials})),
        dtypes=tuple(sorted({trial.dtype for trial in trials})),
        compared=tuple(sorted({trial.method for trial in trials})),
        worst=max((trial.error for trial in trials if trial.method == "values"), default=0.0),
        result=_result(name, cases, proofs),
    )


def proofs_of(cases: Sequence[Signature]) -> list[Proof]:
    """A proof for each strategy of each case on each number of ranks, with two draws on 2 ranks."""
    return [
        prove(case, strategy, num, seeds=SEEDS if num == 2 else SEEDS[:1])
        for case in cases
        for num in NUMS
        for strategy in strategies(case.node(), num, _seen(case) if num == 2 else ())
    ]


def _seen(case: Signature) -> list[tuple[int, Layout]]:
    """Cuts within halves of every dim, as views of merged dims bring them."""
    shapes = enumerate(spec.shape for spec in case.operands)
    return [(i, cut(d, 2)) for i, shape in shapes for d, size in enumerate(shape) if size % 4 == 0]


def _result(name: str, cases: Sequence[Signature], proofs: Sequence[Proof]) -> str:
    failed = [proof for proof in proofs if not proof.holds]
    if failed:
        return f"FAILS {len(failed)} times, first: {failed[0]}"
    if not cases:
        return why_not_run(name) or "no case"
    return "proved" if proofs else "never cut"


def _letters(name: str, cases: Sequence[Signature]) -> str:
    """The rule as written or, where it is computed, as computed for the first case."""
    rule = RULES[name]
    if isinstance(rule.notation, str):
        return rule.notation
    return rule.written(whole_call(cases[0].node())) if cases else "computed"
