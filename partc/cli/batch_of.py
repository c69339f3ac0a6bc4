"""Batches and losses for models of Hugging Face transformers: from what their forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partc.cli.target import Sizes, Target
from partc.errors import UsageError

TOKENS, CLASS = "tokens", "class"  # what the labels of a task are
SEQUENCE, BATCH = 128, 8  # tokens and rows, unless they are given
SAMPLES, SHORT = 16_000, 16  # of a sound: numbers, and tokens of its text
SOUNDS = ("input_values", "input_features")
MODES = ("pixel_values", "pixel_values_videos", *SOUNDS, "input_ids")  # in the order of a batch
SHAPE = {  # what configurations call the numbers of a picture
    "side": ("image_size", "img_size", "input_size"),
    "channels": ("num_channels", "in_channels", "in_chans"),
    "frames": ("num_frames", "frames_per_clip"),
}


def with_batch(model: Any, config: Any, labels: str, sizes: Sizes, name: str) -> Target:
    """The model with random inputs: its main one, or one of each mode where modes are compared."""
    takes = inspect.signature(type(model).forward).parameters
    compares = "return_loss" in takes
    main = model.main_input_name
    names = [each for each in MODES if each in takes] if compares else [main]
    makers = _makers(config, sizes)
    left = sorted(_needed(takes) - {*names}) or [each for each in names if each not in makers]
    if left or not set(names) <= {*takes}:
        raise no_inputs(name, f"{type(model).__name__} also takes {', '.join(left or names)}")
    try:
        batch = {each: makers[each]() for each in names}
        has_labels = bool(labels) and "labels" in takes and not compares
        if has_labels:
            batch["labels"] = _labels(labels, config, sizes, batch[main])
    except Exception as error:  # of transformers, whose extractors check by classes of their own
        said = " ".join(str(error).split())
        if "allocate memory" in said or "Overflow" in said:
            raise _too_large(name, sizes) from error
        raise no_inputs(name, f"{type(config).__name__}: {type(error).__name__}: {said}") from error
    loss = _labelled(main) if has_labels else _compared if compares else _mean_square
    note = "" if has_labels or compares else (
        f"{type(model).__name__} computes no loss: it is the mean square of its first output"
    )  # fmt: skip
    if labels == TOKENS and main == "input_ids" and set(MODES[:-1]) & {*takes}:
        note = "the batch has text alone, so that what reads pictures or sound gets no gradients"
    if [*batch] == [main, "labels"]:
        return Target(model, tuple(batch.values()), loss, labels=1, note=note)
    return Target(model, batch, loss, labels=int(has_labels), note=note)


def _needed(takes: Mapping[str, inspect.Parameter]) -> set[str]:
    """The names of the arguments that a call may not leave out."""
    plain = (each for each in takes.values() if each.kind is each.POSITIONAL_OR_KEYWORD)
    return {each.name for each in plain if each.default is each.empty} - {"self"}


def _makers(config: Any, sizes: Sizes) -> Mapping[str, Callable[[], Tensor]]:
    """What makes each input that a model of transformers may have."""
    return {
        "input_ids": lambda: _tokens(config, sizes, sizes.seq or _length(config)),
        "pixel_values": lambda: _images(config, sizes),
        "pixel_values_videos": lambda: _images(config, sizes),
        **{name: partial(_sounds, config, sizes, name) for name in SOUNDS},
    }


def _text_part(config: Any) -> Any:
    """The part of a configuration that counts tokens: of a text's and of another decoder's (as that
    of musicgen, whose tokens are sounds) the text's.
    """
    with suppress(ValueError):
        return config.get_text_config()
    return config.get_text_config(encoder=True)


def _length(config: Any) -> int:
    """Tokens of a sequence, no more than there are positions."""
    most = getattr(_text_part(config), "max_position_embeddings", None)
    return min(SEQUENCE, most) if isinstance(most, int) and most > 0 else SEQUENCE


def _tokens(config: Any, sizes: Sizes, length: int, seed: int = 1) -> Tensor:
    """Random token ids."""
    text = _text_part(config)
    most = getattr(text, "vocab_size", None) or config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(most, (sizes.batch or BATCH, length), generator=generator)


def _images(config: Any, sizes: Sizes) -> Tensor:
    """Random pictures, or films where the configuration counts frames."""
    side = _number(config, "side", 224)
    is_text = _number_of(config, "vocab_size") is not None
    side = side if is_text else sizes.seq or side
    height, width = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
    frames = _number(config, "frames", 0)
    shape = [sizes.batch or BATCH, *([frames] if frames else []), _number(config, "channels", 3)]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, height, width, generator=generator).to(sizes.dtype)


def _sounds(config: Any, sizes: Sizes, name: str) -> Tensor:
    """A second of noise, as the type's feature extractor gives it to the model."""
    from transformers import FEATURE_EXTRACTOR_MAPPING

    generator = torch.Generator().manual_seed(1)
    waves = torch.randn(sizes.batch or BATCH, SAMPLES, generator=generator)
    if channels := _number_of(config, "audio_channels"):
        waves = waves.unsqueeze(1).repeat(1, channels, 1)
    with suppress(KeyError, ImportError):  # without one the model takes the sound itself
        extract = FEATURE_EXTRACTOR_MAPPING[type(config)]()
        rows = [wave.squeeze(0).T.numpy() for wave in waves]
        found = extract(rows, sampling_rate=extract.sampling_rate, return_tensors="pt")
        waves = found[name]
    return waves.to(sizes.dtype)


def _labels(kind: str, config: Any, sizes: Sizes, inputs: Tensor) -> Tensor:
    """Labels of a task: the tokens themselves, other tokens, or a class for each row."""
    if kind == CLASS:
        generator = torch.Generator().manual_seed(2)
        return torch.randint(config.num_labels, (inputs.shape[0],), generator=generator)
    if not inputs.dtype.is_floating_point:
        return inputs.clone()
    return _tokens(config, sizes, sizes.seq or SHORT, seed=2)


def _number(config: Any, what: str, default: Any) -> Any:
    """A number of a picture: of the configuration, or of a part of it."""
    found = (_number_of(config, name) for name in SHAPE[what])
    return next((each for each in found if each is not None), default)


def _number_of(config: Any, name: str) -> Any:
    found = getattr(config, name, None)
    parts = [each for each in vars(config).values() if hasattr(each, "to_diff_dict")]
    if found is None and parts:
        return next((n for each in parts if (n := _number_of(each, name)) is not None), None)
    return found


def _labelled(argument: str) -> Callable[..., Any]:
    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
        return model(**{argument: inputs}, labels=labels).loss

    return loss


def _compared(model: nn.Module, **batch: Tensor) -> Any:
    """The loss of a model that compares modes, as pictures with texts."""
    return model(**batch, return_loss=True).loss


def _mean_square(model: nn.Module, **batch: Tensor) -> Any:
    """The loss of a model that computes none."""
    return model(**batch)[0].float().square().mean()


def _too_large(name: str, sizes: Sizes) -> UsageError:
    return UsageError(
        where=f"hf:{name}", what=f"the batch of {sizes.batch or BATCH} samples of "
        f"{sizes.seq or SEQUENCE} does not fit into the memory of this process",
        why="example inputs are made with values", do="Give fewer by --batch or --seq.",
    )  # fmt: skip


def no_inputs(name: str, why: str, do: str = "") -> UsageError:
    own = "a function of yours that builds model, inputs and loss: package.module:callable."
    return UsageError(
        where=f"hf:{name}", what="partc makes no batch for such a model", why=why,
        do=f"{do} Or name {own}" if do else f"Name {own}",
    )  # fmt: skip
