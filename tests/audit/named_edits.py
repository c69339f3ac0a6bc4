"""Edits that a user would make, by name: done to the program, and to the model.

    python -m tests.audit.named_edits [--model tower] [--layout fsdp]

Each edit is made in programs of three models under three layouts: by functions in ``hooks.py`` for
modules that the plan names, or in the text, at values and calls that it names. The same is done to
the model. Either loss and every gradient then agree in float64, or ``partc check`` says why
the text is not taken; anything else is a failure, and the exit code 1.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.audit.audit import audit
from partc.audit.fixed import check_fixed
from partc.errors import PartcError
from partc.program import Program

SAME, SAID, WRONG = "same", "check", "WRONG"
TOLERANCE = 1e-9


# models -----------------------------------------------------------------------------------------
class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.act = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(self.norm(x))
        h = self.act(up)
        down = self.down(h)
        y: Tensor = x + down
        return y


class Attention(Mlp):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return super().forward(x + self.out(mixed))


class Conv(Mlp):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.norm = nn.GroupNorm(2, dim)  # type: ignore[assignment]
        self.up = nn.Conv2d(dim, 2 * dim, 3, padding=1)  # type: ignore[assignment]
        self.down = nn.Conv2d(2 * dim, dim, 1)  # type: ignore[assignment]


class Model(nn.Module):
    def __init__(self, kind: str, num: int = 4) -> None:
        super().__init__()
        block = {"tower": Mlp, "gpt": Attention, "conv": Conv}[kind]
        self.kind, dim = kind, 8
        self.embed = nn.Conv2d(3, dim, 1) if kind == "conv" else nn.Linear(6, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(num))
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = x.mean((2, 3)) if self.kind == "conv" else x
        y: Tensor = self.head(x)
        return y


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


INPUTS = {"tower": (8, 6), "gpt": (8, 5, 6), "conv": (8, 3, 5, 5)}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("dp=2", {"preset": "fsdp"}),
    "fsdp+tp": ("dp=2,tp=2", {"preset": "fsdp+megatron"}),
    "1f1b": ("pp=2,dp=2", {"preset": "ddp", "microbatches": 2, "schedule": "1f1b"}),
}


# edits by hooks ---------------------------------------------------------------------------------
class Through(torch.autograd.Function):
    """A value through one function, its gradient through another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Any, grad: Any) -> Any:
        ctx.grad = grad
        return value(x).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.grad(grads[0]), None, None


@dataclass(frozen=True)
class Hooked:
    """Functions for the results of the modules of a path, and for their gradients."""

    path: str
    value: str = "x"
    grad: str = "x"

    @property
    def plan(self) -> tuple[str, ...]:
        return (self.path, f"{self.path}.grad")

    def text(self) -> str:
        name = re.sub(r"\W+", "_", self.path).strip("_")
        return f"import torch\ndef {name}(x):\n    return {self.value}\n" + (
            f"def {name}_grad(x):\n    return {self.grad}\n"
        )

    def on(self, model: nn.Module) -> None:
        value, grad = (eval(f"lambda x: {text}") for text in (self.value, self.grad))
        for path, module in model.named_modules():
            if re.fullmatch(self.path.replace(".", r"\.").replace("*", r"\d+"), path):
                module.register_forward_hook(
                    lambda m, a, result: Through.apply(result, value, grad)  # type: ignore[no-untyped-call]
                )


# edits of the text ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Written:
    """Replacements in the text, each a regular expression, and the same for the model."""

    swaps: Mapping[str, str]
    change: Callable[[Any], None] = lambda model: None
    plan: tuple[str, ...] = ()

    def of(self, program: Program) -> Program:
        """The edited program."""
        texts = dict(program.sources)
        for old, new in self.swaps.items():
            texts = {name: re.sub(old, new, text) for name, text in texts.items()}
        return replace(program, sources=texts)


def each_block(**fields: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for block in model.blocks:
            for name, given in fields.items():
                setattr(block, name, given)

    return change


def set_eps(model: Any) -> None:
    for block in model.blocks:
        block.norm.eps = 1e-2


def scale_loss(model: Any) -> None:
    model.head.register_forward_hook(
        lambda m, a, y: Through.apply(y, lambda x: x, lambda d: d * 4)  # type: ignore[no-untyped-call]
    )


P, B, H = "blocks.*.up", "blocks.*", "head"
RELU = {
    r"F\.gelu\((\w+)\)": r"torch.relu(\1)",
    r"gelu_backward\.grad_input\((\s*\w+), (.+?),(\s+)grad_input": (
        r"threshold_backward.grad_input(\1, \2, 0,\3grad_input"
    ),
    r"gelu_backward\((\w+), (\w+)\)": r"threshold_backward(\1, \2, 0)",
}
STEP_END = r"(?m)^( +)return loss$"
EDITS: dict[str, Hooked | Written] = {
    "scale an activation": Hooked(P, "x * 2", "x * 2"),
    "damp an activation": Hooked(P, "x * 0.5", "x * 0.5"),
    "clamp an activation, gradient straight through": Hooked(P, "x.clamp(-0.2, 0.2)"),
    "clip an activation's gradient": Hooked(P, grad="x.clamp(-1e-3, 1e-3)"),
    "scale an activation's gradient": Hooked(P, grad="x * 3"),
    "scale each block's result": Hooked(B, "x * 0.9", "x * 0.9"),
    "clip the gradient of each block": Hooked(B, grad="x.clamp(-1e-3, 1e-3)"),
    "add a constant to each block's result": Hooked(B, "x + 0.1"),
    "quantize each block's result": Hooked(B, "(x * 8).round() / 8"),
    "clamp each block's result": Hooked(B, "x.clamp(-1, 1)"),
    "print a norm of each block": Hooked(B, "(x.norm(), x)[1]"),
    "a temperature for the head": Hooked(H, "x / 3", "x / 3"),
    "reverse the gradient of the head": Hooked(H, grad="-x"),
    "drop small gradients of the head": Hooked(H, grad="torch.where(x.abs() < 1e-3, 0, x)"),
    "replace NaN in the head": Hooked(H, "x.nan_to_num(0.0)", "x.nan_to_num(0.0)"),
    "scale the embedding": Hooked("embed", "x * 4", "x * 4"),
    "another activation function": Written(RELU, each_block(act=F.relu)),
    "another eps of the norms": Written({r"\b1e-05\b": "0.01"}, set_eps),
    "scale the step's gradients": Written(
        {r"torch\.ones_like\((\w+)\)": r"torch.ones_like(\1) * 4"}, scale_loss
    ),
    "a comment": Written({STEP_END: r"\1# the end\n\1return loss"}),
    "another name of a value": Written({r"\bh\b": "hidden"}),
    "a further name": Written({STEP_END: r"\1result = loss\n\1return result"}),
    "skip the last block in the loop": Written({
        r"for layer in self\.blocks:": "for layer in self.blocks[:-1]:",
        r"zip\(self\.blocks, \[\*self\.blocks, None\]\[1:\]":
            "zip(self.blocks[:-1], [*self.blocks[:-1], None][1:]",
    }),
    "scale a value in the forward alone": Written(
        {r"(?m)^( +)return y, \[": r"\1y = y * 2\n\1return y, ["}
    ),
    "clip gradients in place at the end": Written({
        STEP_END:
            r"\1for p in self.parameters():\n\1    p.grad.clamp_(-1e-4, 1e-4)\n\1return loss"
    }),
    "print a norm in the text": Written({STEP_END: r"\1print(loss.norm())\n\1return loss"}),
    "noise on the loss": Written({STEP_END: r"\1loss = loss + torch.randn(())\n\1return loss"}),
    "compute in bfloat16": Written({STEP_END: r"\1loss = loss.bfloat16().float()\n\1return loss"}),
    "no gradient for a bias": Written({
        r"(?m)^ +(?:grads\[|self\.partials\.add\(|add_grad\()self\.embed_bias\b.*\n": "",
        r", grads\[self\.embed_bias\] =": ", _ =",
    }),
    "leave out a wait": Written({r"(?m)^ +reduced\.finish\(\).*\n": ""}),
}  # fmt: skip


# what comes of them -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    edit: str
    model: str
    layout: str
    outcome: str
    said: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.edit:<48}{self.model:<7}{self.layout:<9}{self.outcome:<7}{self.said}"


def results(kind: str, layout: str, edits: Mapping[str, Hooked | Written]) -> Iterator[Result]:
    """The outcome of each edit in the programs of one model under one layout."""
    programs: dict[tuple[str, ...], Program] = {}
    x = torch.randn(INPUTS[kind], generator=torch.Generator().manual_seed(1))
    mesh, fields = LAYOUTS[layout]
    for name, edit in edits.items():
        torch.manual_seed(0)
        model = Model(kind)
        if edit.plan not in programs:
            plan = partc.Plan(hooks=edit.plan, **fields)
            programs[edit.plan] = partc.compile(model, mesh, (x,), loss=loss_of, plan=plan)
        program = programs[edit.plan]
        outcome, said = _outcome(program, model, x, edit)
        yield Result(name, kind, layout, outcome, said)


def _outcome(
    program: Program, model: nn.Module, x: Tensor, edit: Hooked | Written
) -> tuple[str, str]:
    if isinstance(edit, Hooked):
        edited = replace(program, hooks=edit.text())
        edit.on(model)
    else:
        edited = edit.of(program)
        edit.change(model)
        if edited.sources == program.sources:
            return "-", "the text has no such call"
    try:
        worst = partc.verify(edited, model, (x,), loss=loss_of).worst
        if worst.error <= TOLERANCE:
            check_fixed(edited)  # in float64 no run sees a dtype, or another device
            return SAME, f"{worst.error:.0e}"
        found = f"{worst.error:.0e} off in {worst.name}"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    try:
        audit(edited)
    except PartcError as error:
        return SAID, f"{error.where}: {error.what}".splitlines()[0]
    return WRONG, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*INPUTS], default=None)
    parser.add_argument("--layout", choices=[*LAYOUTS], default=None)
    parser.add_argument("--edit", default="", help="a part of the names of edits")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    edits = {name: edit for name, edit in EDITS.items() if args.edit in name}
    wrong = 0
    for kind in [args.model] if args.model else INPUTS:
        for layout in [args.layout] if args.layout else LAYOUTS:
            for result in results(kind, layout, edits):
                print(result, flush=True)
                wrong += result.outcome == WRONG
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
