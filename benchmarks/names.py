"""How well programs name their values: numbered names, and values renamed in the backward.

Run ``python -m benchmarks.names [MODEL ...]``. For each model and layout it prints the share of
assigned names that end in a number (``mul_3``), the number of values that the backward calls other
than the forward, and the lines of the longest file.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import partc

LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("dp=2", "ddp", {}),
    "fsdp": ("dp=2", "fsdp", {}),
    "tp": ("tp=2", "megatron", {}),
    "sp": ("tp=2", "megatron-sp", {}),
    "fsdp+sp": ("dp=2,tp=2", "fsdp+megatron-sp", {}),
    "1f1b": ("pp=2", "ddp", {"microbatches": 2}),
    "zb-v": ("pp=2,tp=2", "megatron", {"microbatches": 4, "schedule": "zb-v"}),
}
NUMBERED = re.compile(r"\w*_\d+")
Case = tuple[torch.nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    print(f"{'':10}{'layout':10}{'numbered':>10}{'renamed':>9}{'lines':>7}")
    for model in parser.parse_args().models:
        step = partc.Traced(*MODELS[model]())
        for layout, (mesh, plan, options) in LAYOUTS.items():
            try:
                texts = partc.compile(step, mesh, plan=plan, **options).sources.values()
            except partc.PartcError as error:
                print(f"{model:10}{layout:10}  refused: {str(error).splitlines()[0]}")
                continue
            share = max(map(numbered_share, texts))
            renamed = sum(len(list(renamed_values(text))) for text in texts)
            lines = max(text.count("\n") for text in texts)
            print(f"{model:10}{layout:10}{share:10.0%}{renamed:9}{lines:7}", flush=True)


# reading a program --------------------------------------------------------------------------------
def assigned_names(source: str) -> Iterator[tuple[str, str]]:
    """The method and name of each local variable that a program's modules assign, once each.

    Helper functions do not count, as they stand in all programs alike.
    """
    for cls in ast.walk(ast.parse(source)):
        if isinstance(cls, ast.ClassDef) and "nn.Module" in map(ast.unparse, cls.bases):
            for method in (f for f in cls.body if isinstance(f, ast.FunctionDef)):
                stores = [n for n in ast.walk(method) if isinstance(n, ast.Name)]
                names = [n.id for n in stores if isinstance(n.ctx, ast.Store)]
                yield from ((f"{cls.name}.{method.name}", name) for name in dict.fromkeys(names))


def numbered_share(source: str) -> float:
    """The share of assigned names that end in an underscore and a number."""
    names = [name for _, name in assigned_names(source)]
    return sum(bool(NUMBERED.fullmatch(name)) for name in names) / max(1, len(names))


def renamed_values(source: str) -> Iterator[tuple[str, str]]:
    """Names that a saved list has in a block's forward, and where it is unpacked.

    Also the arguments of a later phase that have another place among them than in the forward.
    """
    for cls in ast.walk(ast.parse(source)):
        if isinstance(cls, ast.ClassDef):
            methods = {f.name: f for f in cls.body if isinstance(f, ast.FunctionDef)}
            yield from _renamed_lists(methods)
            yield from _moved_arguments(methods)


def _renamed_lists(methods: dict[str, ast.FunctionDef]) -> Iterator[tuple[str, str]]:
    """Pairs of a name that a phase saves and another that a later phase gives the same value."""
    for word, (makers, taker) in LISTS.items():
        taken = _unpacked(methods[taker], word) if taker in methods else None
        for maker in makers:
            if maker in methods and taken is not None:
                left = _left(methods[maker], word, list(methods))
                assert left is None or len(left) == len(taken), (word, left, taken)
                yield from ((a, b) for a, b in zip(left or taken, taken, strict=True) if a != b)


LISTS = {
    "saved": (("forward",), "backward"),
    "kept": (("forward",), "weights"),
    "left": (("backward",), "weights"),
}


def _unpacked(method: ast.FunctionDef, word: str) -> list[str] | None:
    """The names to which a method unpacks one of its lists: ``(a, b) = saved``."""
    for node in method.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in (
            word,
            f"self.{word}.pop(i)",
        ):
            target = node.targets[0]
            assert isinstance(target, ast.Tuple | ast.List)
            return [ast.unparse(name) for name in target.elts]
    return None


def _left(method: ast.FunctionDef, word: str, methods: list[str]) -> list[str] | None:
    """The names of the values that a method saves in a list for a later phase."""
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{word}[i]":
            value = node.value
            assert isinstance(value, ast.Tuple)
            return [ast.unparse(item) for item in value.elts]
    returned = method.body[-1]
    if not isinstance(returned, ast.Return) or returned.value is None:
        return None
    value = returned.value
    items = value.elts if isinstance(value, ast.Tuple) else [value]
    lists = [item for item in items if isinstance(item, ast.List)]
    words = [w for w, (makers, taker) in LISTS.items() if method.name in makers if taker in methods]
    if len(lists) != len(words) or word not in words:
        return None
    return [ast.unparse(item) for item in lists[words.index(word)].elts]


def _moved_arguments(methods: dict[str, ast.FunctionDef]) -> Iterator[tuple[str, str]]:
    """Pairs of arguments that two phases take in another order."""
    orders = [
        [a.arg for a in f.args.args] for n, f in methods.items() if n in ("forward", "backward")
    ]
    for first, second in pairwise(orders):
        ours = [name for name in first if name in second]
        theirs = [name for name in second if name in first]
        yield from ((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)


# models -------------------------------------------------------------------------------------------
def _of_labels(model: torch.nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _of_classes(model: torch.nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(pixel_values=pixels, labels=labels).loss
    return loss


def _llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=256, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), (torch.randint(0, 256, (8, 32)),), _of_labels


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=64, use_cache=False
    )
    return GPT2LMHeadModel(config), (torch.randint(0, 256, (8, 32)),), _of_labels


def _mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config), (torch.randint(0, 256, (8, 32)),), _of_labels


def _t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=256, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), (torch.randint(1, 256, (8, 32)),), _of_labels


def _vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        image_size=32, patch_size=8, num_labels=8,
    )  # fmt: skip
    batch = (torch.randn(8, 3, 32, 32), torch.randint(0, 8, (8,)))
    return ViTForImageClassification(config), batch, _of_classes


def _resnet() -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=8
    )
    batch = (torch.randn(8, 3, 32, 32), torch.randint(0, 8, (8,)))
    return ResNetForImageClassification(config), batch, _of_classes


MODELS: dict[str, Callable[[], Case]] = {
    "llama": _llama, "gpt2": _gpt2, "mixtral": _mixtral, "t5": _t5, "vit": _vit, "resnet": _resnet,
}  # fmt: skip


if __name__ == "__main__":
    main()
