"""One value has one name in all methods of a class, and few names are numbered."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from benchmarks.names import assigned_names, numbered_share, renamed_values
from tests.zoo import MODELS

MOST = 0.12  # the share of names that may end in a number
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fsdp": ("dp=2", "fsdp", {}),
    "fsdp+sp": ("dp=2,tp=2", "fsdp+megatron-sp", {}),
    "zb-h1": ("pp=2,tp=2", "megatron", {"microbatches": 2, "schedule": "zb-h1"}),
}


@cache
def step(family: str) -> partc.Traced:
    return MODELS[family]().step


@cache
def compiled(family: str, layout: str) -> partc.Program:
    mesh, plan, options = LAYOUTS[layout]
    return partc.compile(step(family), mesh, plan=plan, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "fsdp+sp"), ("llama", "zb-h1"), ("gpt2", "fsdp"), ("gpt2", "zb-h1"),
        ("t5", "fsdp"), ("t5", "zb-h1"), ("vit", "fsdp+sp"),
    ],
)  # fmt: skip
def test_a_value_has_one_name_in_all_methods(family: str, layout: str) -> None:
    for source in compiled(family, layout).sources.values():
        assert [*renamed_values(source)] == []
        assert numbered_share(source) < MOST, [*assigned_names(source)]
        assert "__v" not in source


def test_the_backward_unpacks_what_the_forward_saved_by_name() -> None:
    swapped = """
class Layer(nn.Module):
    def forward(self, x, cos, sin):
        mul_1 = x * cos
        return mul_1, [mul_1, x]

    def backward(self, d_y, sin, cos, saved):
        x, mul_1 = saved
        return d_y
"""
    assert [*renamed_values(swapped)] == [("mul_1", "x"), ("x", "mul_1"), ("cos", "sin"),
                                          ("sin", "cos")]  # fmt: skip
    assert numbered_share(swapped) == pytest.approx(2 / 3)


class Done(nn.Module):
    """A variable with the name of a transfer's handle, of which several gradients are views."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 16)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        parts = self.router(x).unflatten(-1, (4, 4)).unbind(1)
        done = torch.stack([layer(part) for layer, part in zip(self.layers, parts, strict=True)])
        return torch.einsum("ebd,bd->bd", done, x[:, :4])


@pytest.mark.rows(1)
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_values_of_a_variable_named_as_a_handle_have_names_of_their_own(plan: str) -> None:
    torch.manual_seed(0)
    model, x = Done(), torch.randn(8, 8)
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    program = partc.compile(model, "dp=2", (x,), loss=loss, plan=plan)
    partc.verify(program, model, (x,), loss=loss).check()


@pytest.mark.exhaustive
def test_a_product_is_called_as_its_weight() -> None:
    source = partc.compile(step("llama"), "dp=2,tp=2", plan="fsdp+megatron").source()
    products = {
        ast.unparse(n.targets[0]): ast.unparse(n.value.args[1])
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Assign)
        and isinstance(n.value, ast.Call)
        and ast.unparse(n.value.func) == "F.linear"
    }
    assert len(products) == 8
    assert {f"{name}_weight" for name in products} == {*products.values()}


@pytest.mark.exhaustive
def test_what_functions_of_the_model_call_their_values_names_no_value_of_its_callers() -> None:
    """Both calls of ``rotate_half`` are named after what is rotated, not after ``x1`` in it."""
    source = compiled("llama", "fsdp+sp").source()
    names = {name for _, name in assigned_names(source)}
    assert {"query_states_rotate_half", "key_states_rotate_half"} <= names
    assert {"d_post_attention_layernorm", "d_input_layernorm"} <= names


def test_an_edit_by_name_reaches_the_value_of_the_forward() -> None:
    source = partc.compile(step("llama"), "dp=2", plan="ddp").source()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    forward, backward = (next(f for f in functions if f.name == n) for n in ("forward", "backward"))
    assert [a.arg for a in forward.args.args][1:4] == ["x", "cos", "sin"]
    assert [a.arg for a in backward.args.args][2:4] == ["cos", "sin"]
