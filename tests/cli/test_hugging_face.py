"""Types of Hugging Face models: their depth, batch and loss follow from what they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import partc
from partc.cli.depth import has_depth, set_depth
from partc.cli.hugging_face import _settle
from partc.cli.main import main
from partc.cli.models import find_model, sizes_of_inputs
from partc.cli.target import Sizes, parameters_on_meta
from partc.cli.tp_hint import hint_text, hints
from partc.errors import UsageError

SMALL = Sizes(batch=2, seq=8, layers=1)
TEXT = {"vocab_size": 64, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_heads": 2}


def saved(folder: Path, kind: str, **numbers: Any) -> str:
    """A configuration of a few numbers, as ``hf:`` takes it."""
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, **numbers}), encoding="utf-8")
    return f"hf:{path}"


@pytest.mark.exhaustive
def test_an_encoder_and_decoder(tmp_path: Path) -> None:
    """t5 has no token with which a decoder starts; and it has the right step on two ranks."""
    name = saved(tmp_path, "t5", **TEXT, num_layers=3, dropout_rate=0.0)
    target = find_model(name, Sizes(2, 8, 1, torch.float64), values=True)
    assert type(target.model).__name__ == "T5ForConditionalGeneration"
    assert len(target.model.decoder.block) == len(target.model.encoder.block) == 1  # type: ignore[union-attr, arg-type]
    program = partc.compile(target.model, "dp=2", target.inputs, loss=target.loss, plan="ddp")
    partc.verify(program, target.model, target.inputs, loss=target.loss).check()


def test_pictures_beside_text(tmp_path: Path) -> None:
    """A model that compares them is given both, and the number of tokens is --seq."""
    part = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vision = {**part, "image_size": 8, "patch_size": 4}
    text = {**part, "vocab_size": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    name = saved(tmp_path, "clip", text_config=text, vision_config=vision)
    target = find_model(name, SMALL)
    shapes = {name: tuple(x.shape) for name, x in target.inputs.items()}
    assert shapes == {"pixel_values": (2, 3, 8, 8), "input_ids": (2, 8)}
    assert sizes_of_inputs([*shapes.values()], Sizes()).seq == 8
    assert [*target.for_inference().inputs] == [*shapes]


@pytest.mark.exhaustive
def test_a_type_without_a_loss_is_told(tmp_path: Path) -> None:
    part = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "patch_size": 4}
    target = find_model(saved(tmp_path, "clip_vision_model", **part, image_size=8), SMALL)
    assert target.note.endswith("computes no loss: it is the mean square of its first output")
    assert target.loss is not None
    with torch.device("meta"):
        loss = target.loss(target.model, **{n: x.to("meta") for n, x in target.inputs.items()})
    assert loss.shape == ()


@pytest.mark.parametrize(
    ("kind", "depths"),
    [
        ("t5", {"num_layers": 3, "num_decoder_layers": 3}),
        ("bart", {"encoder_layers": 3, "decoder_layers": 3}),
        ("gpt2", {"n_layer": 3}),
        ("swin", {"depths": [2, 2, 3, 2]}),
        ("gemma2", {"num_hidden_layers": 3, "layer_types": 3}),
        ("funnel", {"block_sizes": [3, 3, 3]}),
    ],
)
def test_the_depth_of_a_type(kind: str, depths: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind)
    set_depth(config, 3)
    for key, depth in depths.items():
        found = getattr(config, key)
        found = list(found) if isinstance(found, tuple) else found
        assert (len(found) if key == "layer_types" else found) == depth


def test_the_depth_of_all_parts() -> None:
    config = AutoConfig.for_model("llava")
    set_depth(config, 3)
    assert (config.text_config.num_hidden_layers, config.vision_config.num_hidden_layers) == (3, 3)
    set_depth(config, 5)  # more, too
    assert config.text_config.num_hidden_layers == 5
    assert not has_depth(AutoConfig.for_model("univnet"))


def test_what_python_draws_is_set_to_0_and_told() -> None:
    config = AutoConfig.for_model("wav2vec2")
    assert config.layerdrop > 0
    assert "layerdrop, apply_spec_augment set to 0" in _settle(config)
    assert (config.layerdrop, config.apply_spec_augment) == (0.0, False)
    assert _settle(config) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("clipseg_vision_model", "It is a part of hf:clipseg: name that."),
        ("nemotron", "Its default numbers make no model"),
        ("univnet", "--layers does not apply"),
        ("musicgen", "transformers makes no model of this configuration"),  # two texts in one
    ],
)
def test_types_of_which_nothing_is_made(kind: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        find_model(f"hf:{kind}", SMALL)


def test_what_is_larger_than_memory_is_on_meta() -> None:
    with parameters_on_meta():
        large = torch.nn.Parameter(torch.empty(64, 2**20, 2**10))
        assert torch.empty(4).device.type == "cpu"
    assert large.is_meta


@pytest.mark.exhaustive
def test_transformers_suggestion_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "vocab_size": 64, "num_hidden_layers": 1}
    name = saved(tmp_path, "llama", **numbers, **more)
    target = find_model(name, SMALL)
    for plan, mesh, same in (("megatron", "tp=2", 7), ("ddp", "dp=2", 0)):
        program = partc.compile(target.model, mesh, target.inputs, loss=target.loss, plan=plan)
        made = partc.Plan.parse(program.plan)
        found = hints(target.model, made)
        assert len(found) >= 8
        lines = hint_text(found, made)
        if same:
            assert sum(hint.agrees is True for hint in found) >= same
            assert f"for {len(found)} modules" in lines[0]
        else:
            assert lines[0].endswith("the mesh has no tp")
    program.save(tmp_path / "build")
    out = str(tmp_path / "build")
    assert main(["explain", out, "--model", name, "--layers", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["suggested"]
    assert {"modules", "word", "here", "same"} == {*told[0]}
