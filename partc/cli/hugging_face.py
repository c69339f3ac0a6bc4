"""Models of Hugging Face transformers from their configuration, each with a batch and a loss.

What a type is decides everything: which of transformers' classes have it, what its ``forward``
takes, what its configuration says. No type is known by its name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partc.cli.depth import has_depth, parts_of, set_depth
from partc.cli.hub_names import as_hub
from partc.cli.target import Sizes, Target, parameters_on_meta, unknown
from partc.errors import UsageError
from partc.wrong_calls import did_you_mean

TOKENS, CLASS = "tokens", "class"  # what the labels of a task are
TASKS = (  # transformers' classes in the order of preference, and their labels
    ("AutoModelForCausalLM", TOKENS),
    ("AutoModelForImageTextToText", TOKENS),
    ("AutoModelForMultimodalLM", TOKENS),
    ("AutoModelForMaskedLM", TOKENS),
    ("AutoModelForZeroShotImageClassification", ""),  # which compare pictures with texts
    ("AutoModelForImageClassification", CLASS),
    ("AutoModelForVideoClassification", CLASS),
    ("AutoModelForCTC", TOKENS),
    ("AutoModelForAudioClassification", CLASS),
    ("AutoModelForSequenceClassification", CLASS),
    ("AutoModel", ""),
)
OF_ENCODERS = (("AutoModelForMaskedLM", TOKENS),)
OF_BOTH = (("AutoModelForSpeechSeq2Seq", TOKENS), ("AutoModelForSeq2SeqLM", TOKENS))
SEQUENCE, BATCH = 128, 8  # tokens and rows, unless they are given
AT_RANDOM = re.compile("layer_?drop$|apply_spec_augment")  # by which parts of a step are left out
SAMPLES, SHORT = 16_000, 16  # of a sound: numbers, and tokens of its text
SOUNDS = ("input_values", "input_features")
MODES = ("pixel_values", "pixel_values_videos", *SOUNDS, "input_ids")  # in the order of a batch
SHAPE = {  # what configurations call the numbers of a picture
    "side": ("image_size", "img_size", "input_size"),
    "channels": ("num_channels", "in_channels", "in_chans"),
    "frames": ("num_frames", "frames_per_clip"),
}


def find_configured(name: str, sizes: Sizes, values: bool) -> Target:
    """A Hugging Face model, built from its configuration without downloading weights."""
    try:
        import transformers
    except ImportError:
        raise UsageError(
            where=f"hf:{name}", what="needs the transformers package",
            why="it is an optional dependency", do="pip install transformers",
        ) from None  # fmt: skip
    config = _config(transformers, name)
    _set_layers(config, name, sizes.layers)
    settled = _settle(config)
    auto, labels = _auto_class(transformers, config, name)
    torch.manual_seed(0)
    try:
        with nullcontext() if values else parameters_on_meta():
            model = auto.from_config(config).to(sizes.dtype).train()
    except Exception as error:
        raise _no_config(name, error) from error
    target = _with_batch(model, config, labels, sizes, name)
    notes = "; ".join(each for each in (settled, target.note) if each)
    return replace(target, note=notes)


def _config(transformers: Any, name: str) -> Any:
    if name.endswith(".json") and not Path(name).is_file():
        raise unknown(f"hf:{name}", "there is no such file", "Check the path of the config.json.")
    known = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING.keys())
    if not Path(name).exists() and name not in known:
        why = f"{'nothing is downloaded' if '/' in name else 'no model type is called so'}"
        do = as_hub(name) if "/" in name else ""
        raise unknown(f"hf:{name}", why, do or did_you_mean(name, known))
    try:
        if name.endswith(".json") or Path(name).is_dir():
            return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        return transformers.AutoConfig.for_model(name)
    except (OSError, KeyError) as error:
        raise unknown(f"hf:{name}", str(error).splitlines()[0]) from error
    except Exception as error:  # the configurations check themselves, by classes of their own
        raise _no_config(name, error) from error


def _set_layers(config: Any, name: str, layers: int | None) -> None:
    if layers is None:
        return
    if not has_depth(config):
        raise UsageError(
            where=f"hf:{name}", what="--layers does not apply",
            why=f"no key of {type(config).__name__} counts layers",
            do="Write a config.json with the depth you want.",
        )  # fmt: skip
    try:
        set_depth(config, layers)
    except Exception as error:
        raise _no_config(name, error) from error


def _settle(config: Any) -> str:
    """What a training step needs and a configuration leaves open: no cache, no layers that are left
    out at random, and the tokens with which an encoder's labels become a decoder's inputs.

    What a user should know of it.
    """
    for each in (config, config.get_text_config()):
        if getattr(each, "use_cache", False):
            each.use_cache = False
    if getattr(config, "is_encoder_decoder", False):
        for key in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, key, None) is None:
                setattr(config, key, getattr(config, "pad_token_id", None) or 0)
    left_out = [(p, key) for p in parts_of(config) for key in vars(p) if AT_RANDOM.search(key)]
    left_out = [(part, key) for part, key in left_out if getattr(part, key)]
    for part, key in left_out:
        setattr(part, key, type(getattr(part, key))(0))
    keys = ", ".join(dict.fromkeys(key for _, key in left_out))
    return f"{keys} set to 0: Python draws what a step leaves out" if keys else ""


def _auto_class(transformers: Any, config: Any, name: str) -> tuple[Any, str]:
    """Which of transformers' classes makes the model, and what its labels are."""
    tasks: tuple[tuple[str, str], ...] = TASKS
    if getattr(config, "is_encoder_decoder", False):
        tasks = (*OF_BOTH, *TASKS)
    elif not getattr(config, "is_decoder", True):
        tasks = (*OF_ENCODERS, *TASKS)
    for auto, labels in tasks:
        found = getattr(transformers, auto, None)
        if found is not None and type(config) in found._model_mapping:
            return found, labels
    raise _no_inputs(
        name, f"no class of transformers has {type(config).__name__}", _whole_of(config)
    )


def _no_config(name: str, error: Exception) -> UsageError:
    """The refusal of a configuration with numbers of which no model can be made."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    do = "Correct the config.json."
    if isinstance(error, ImportError):
        do = "Install what it names."
    elif not name.endswith(".json") and not Path(name).exists():
        do = "Its default numbers make no model: name a config.json with others, hf:config.json."
    return UsageError(
        where=f"hf:{name}", what="transformers makes no model of this configuration",
        why=f"{type(error).__name__}: {said[-1]}", do=do,
    )  # fmt: skip


def _no_inputs(name: str, why: str, do: str = "") -> UsageError:
    own = "a function of yours that builds model, inputs and loss: package.module:callable."
    return UsageError(
        where=f"hf:{name}", what="partc makes no batch for such a model", why=why,
        do=f"{do} Or name {own}" if do else f"Name {own}",
    )  # fmt: skip


def _whole_of(config: Any) -> str:
    """Which types have a part with this configuration, of those in the same module."""
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING_NAMES,
        model_type_to_module_name,
    )

    module = type(config).__module__.split(".")[-2]
    known = (t for t in CONFIG_MAPPING_NAMES if model_type_to_module_name(t) == module)
    whole = [f"hf:{t}" for t in known if t == module.replace("_", "-") or t == module]
    return f"It is a part of {whole[0]}: name that." if whole else ""


# batch and loss ---------------------------------------------------------------------------------
def _with_batch(model: Any, config: Any, labels: str, sizes: Sizes, name: str) -> Target:
    """The model with random inputs: its main one, or one of each mode where modes are compared."""
    takes = inspect.signature(type(model).forward).parameters
    compares = "return_loss" in takes
    main = model.main_input_name
    names = [each for each in MODES if each in takes] if compares else [main]
    makers = _makers(config, sizes)
    left = sorted(_needed(takes) - {*names}) or [each for each in names if each not in makers]
    if left or not set(names) <= {*takes}:
        raise _no_inputs(name, f"{type(model).__name__} also takes {', '.join(left or names)}")
    try:
        batch = {each: makers[each]() for each in names}
        has_labels = bool(labels) and "labels" in takes and not compares
        if has_labels:
            batch["labels"] = _labels(labels, config, sizes, batch[main])
    except (AttributeError, TypeError) as error:
        raise _no_inputs(name, f"{type(config).__name__}: {error}") from error
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


def _length(config: Any) -> int:
    """Tokens of a sequence, no more than there are positions."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(SEQUENCE, most) if isinstance(most, int) and most > 0 else SEQUENCE


def _tokens(config: Any, sizes: Sizes, length: int, seed: int = 1) -> Tensor:
    """Random token ids."""
    text = config.get_text_config()
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
