"""A model whose weights a stage has taken over says so, however it is asked for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partc.errors import RunError
from partc.program.model.raw_model import empty_model


def test_a_method_that_was_kept_from_before_is_refused_too() -> None:
    """Scripts for adapters put a function over the old ``model.state_dict`` in its place."""
    model, other = (nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(2))
    kept = model.state_dict
    model.state_dict = lambda: kept()  # type: ignore[method-assign, assignment]
    kept_of_layer = model[0].state_dict
    assert len(kept()) == len(model.state_dict()) == 2
    empty_model(model)
    for ask in (kept, model.state_dict):
        with pytest.raises(RunError, match=r"Sequential.state_dict\(\): this model has no values"):
            ask()
    with pytest.raises(RunError, match=r"Linear.state_dict\(\): this model has no values"):
        kept_of_layer()
    assert [*other.state_dict()] == ["0.weight", "0.bias"]
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(kept()["0.weight"], other.state_dict()["0.weight"])
