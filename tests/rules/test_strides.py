"""Kernels that read an operand as if it were contiguous are given a contiguous one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from partc.dryrun.live_memory import LiveMemory
from partc.errors import CheckError
from partc.rules.call import parameters
from partc.rules.experiment import Refused, is_random, whole_run
from partc.rules.signature import Operand, Signature
from partc.rules.table import find
from tests.rule_cases.cases import cases_by_rule

aten = torch.ops.aten
BY_STRIDES = {  # what these compute is said by strides, and canonical graphs have none of them
    "aten._reshape_alias", "aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter",
    "aten.view.default", "aten._unsafe_view",
}  # fmt: skip
AS_IT_WAS = {"aten.empty_like", "aten.new_empty"}  # memory that nobody has written
IN_A_ROW = {"aten._grouped_mm"}  # takes rows or columns in a row, and refuses all else


def laid_out(x: Tensor) -> Iterator[Tensor]:
    """The same values with other strides: by columns, channels last, every second element."""
    dims = list(range(x.dim()))
    for order in (dims[::-1], dims[1:] + dims[:1], dims[:1] + dims[:0:-1]):
        back = [order.index(dim) for dim in dims]
        yield x.permute(order).contiguous().permute(back)
    yield torch.stack([x, x.roll(1)], -1)[..., 0]


def misread_operands(signature: Signature) -> Iterator[str]:
    """The operands by name for which other strides give other numbers, or fail."""
    try:
        operands, results = whole_run(signature, 0)
    except Refused:
        return
    if is_random(signature, operands, results):
        return
    for number, x in enumerate(operands):
        for strided in laid_out(x) if x.dim() > 1 else ():
            given = [*operands[:number], strided, *operands[number + 1 :]]
            if not gives(signature, given, results):
                yield name_of_operand(signature, number)
                break


def gives(signature: Signature, given: list[Tensor], results: Any) -> bool:
    try:
        found = signature.run(given)
    except RuntimeError:
        return False
    pairs = [(a, b) for a, b in zip(found, results, strict=True) if a is not None]
    return all(a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-4, True) for a, b in pairs)


def name_of_operand(signature: Signature, number: int) -> str:
    place = signature.args.index(Operand(number)) if Operand(number) in signature.args else -1
    return str(parameters(signature.target)[place][0]) if place >= 0 else f"operand {number}"


@pytest.mark.filterwarnings("ignore")
def test_rules_name_every_operand_whose_strides_a_kernel_ignores() -> None:
    missing = {}
    for name, signatures in cases_by_rule().items():
        for signature in signatures if name not in BY_STRIDES | IN_A_ROW | AS_IT_WAS else ():
            rule = find(signature.target)
            assert rule is not None
            known = {*rule.contiguous, *rule.adjacent, *rule.traced}
            if unknown := {*misread_operands(signature)} - known:
                missing[name] = unknown
    assert not missing


def test_a_program_that_gives_such_an_operand_is_refused_before_it_runs() -> None:
    with FakeTensorMode(), LiveMemory("<partc rank.py>"):
        x, weight = torch.empty(4, 6, 6, 8), torch.empty(8)
        aten.native_group_norm(x.permute(0, 3, 1, 2).contiguous(), weight, weight, 4, 8, 36, 2, 0.1)
        with pytest.raises(CheckError, match=r"native_group_norm.* strides of input"):
            aten.native_group_norm(x.permute(0, 3, 1, 2), weight, weight, 4, 8, 36, 2, 0.1)
