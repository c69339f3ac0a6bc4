"""Models of Hugging Face transformers from their configuration, each with a batch and a loss.

What a type is decides everything: which of transformers' classes have it, what its ``forward``
takes, what its configuration says. No type is known by its name.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from partc.cli.batch_of import CLASS, SOUNDS, TOKENS, no_inputs, with_batch
from partc.cli.depth import has_depth, parts_of, set_depth
from partc.cli.model_names import as_hub, unknown
from partc.cli.target import Sizes, Target, parameters_on_meta
from partc.errors import UsageError
from partc.trace.hooks_ahead import install_ahead
from partc.wrong_calls import did_you_mean

TASKS = (  # transformers' classes in the order of preference, and their labels
    ("AutoModelForCausalLM", TOKENS),
    ("AutoModelForImageTextToText", TOKENS),
    ("AutoModelForMultimodalLM", TOKENS),
    ("AutoModelForMaskedLM", TOKENS),
    ("AutoModelForZeroShotImageClassification", ""),  # which compare pictures with texts
    ("AutoModelForImageClassification", CLASS),
    ("AutoModelForVideoClassification", CLASS),
    ("AutoModelForAudioClassification", CLASS),
    ("AutoModelForCTC", TOKENS),
    ("AutoModelForSequenceClassification", CLASS),
    ("AutoModel", ""),
)
OF_ENCODERS = (("AutoModelForMaskedLM", TOKENS),)
OF_BOTH = (("AutoModelForSpeechSeq2Seq", TOKENS), ("AutoModelForSeq2SeqLM", TOKENS))
AT_RANDOM = re.compile("layer_?drop$|apply_spec_augment")  # by which parts of a step are left out


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
    target = with_batch(model, config, labels, sizes, name)
    if model.main_input_name in SOUNDS:
        install_ahead(model)
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
    for each in parts_of(config):
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
    known = {auto for auto, _ in tasks}
    rest = (n for n in dir(transformers) if n.startswith("AutoModelFor") and n not in known)
    for auto, labels in (*tasks, *((name, "") for name in rest)):
        found = getattr(transformers, auto, None)
        if type(config) in (getattr(found, "_model_mapping", None) or ()):
            return found, labels
    raise no_inputs(
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
