"""Hooks that a library's model would put on its modules in its first call."""

from __future__ import annotations

import sys
from contextlib import suppress

from torch import nn


def install_ahead(model: nn.Module) -> None:
    """Install the hooks with which models of transformers collect the results of their layers.

    Their first call would: once, and for good. A step may not change the hooks of the next.
    """
    if "transformers" not in sys.modules:
        return
    with suppress(ImportError):  # older releases have none
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        for module in model.modules():
            if getattr(module, "_can_record_outputs", None):
                maybe_install_capturing_hooks(module)
