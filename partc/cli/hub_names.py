"""What to write on the command line for a model of the Hugging Face hub."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def as_hub(name: str) -> str:
    """What to write for a model of the hub, a model type or a folder; "" for what is none."""
    if Path(name, "config.json").is_file():
        return f"Write hf:{Path(name, 'config.json')}."
    hub = re.fullmatch(r"(?:https?://[^/]+/)?([\w.-]+/[\w.-]+)/?", name)
    if hub and not name.endswith(".py") and not name.startswith("."):
        return (
            f"Save its configuration, AutoConfig.from_pretrained({hub[1]!r})"
            f".save_pretrained({hub[1].rpartition('/')[2]!r}), and name that: "
            f"hf:{hub[1].rpartition('/')[2]}/config.json. A file of yours is named "
            "package.module:callable."
        )
    with suppress(ImportError):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if name in CONFIG_MAPPING:
            return f"Write hf:{name}."
    return ""
