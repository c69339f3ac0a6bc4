import pickle

import pytest

from partc import errors
from partc.errors import EXPLANATIONS, PartcError, ShardingError, UsageError, explain

ODD = ShardingError(
    where="blocks.0.w1.weight (model.py:14)",
    what="dim 0 of f32[1023,256] cannot be cut by tp=2",
    why="1023 is odd",
    do="Pad it, or leave it out of the plan.",
)


def test_message_has_four_parts() -> None:
    assert str(ODD) == (
        "blocks.0.w1.weight (model.py:14): dim 0 of f32[1023,256] cannot be cut by tp=2 "
        "(1023 is odd). Pad it, or leave it out of the plan."
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"why": ""}, "w1: is odd. Pad it."),
        ({"why": "  "}, "w1: is odd. Pad it."),
        ({"where": ""}, "is odd (7). Pad it."),
        ({"do": ""}, "w1: is odd (7)."),
        ({"what": "is odd.", "why": "7."}, "w1: is odd (7). Pad it."),
    ],
)
def test_message_without_some_part(parts: dict[str, str], message: str) -> None:
    whole = {"where": "w1", "what": "is odd", "why": "7", "do": "Pad it."}
    assert str(PartcError(**(whole | parts))) == message


def test_as_dict_names_code_and_parts() -> None:
    assert list(ODD.as_dict()) == ["code", "where", "what", "why", "do"]
    assert ODD.as_dict()["code"] == "PTC030"


def test_error_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(ODD))
    assert type(copy) is ShardingError
    assert copy.as_dict() == ODD.as_dict()


def test_every_code_is_unique_and_explained() -> None:
    kinds = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, PartcError)]
    assert sorted(kind.code for kind in kinds) == sorted(EXPLANATIONS)


@pytest.mark.parametrize("code", EXPLANATIONS)
def test_explanations_start_with_their_code(code: str) -> None:
    assert explain(f" {code.lower()} ").startswith(f"{code}: ")


def test_explain_lists_codes_on_a_miss() -> None:
    with pytest.raises(UsageError, match=r"PTC999: no such error code\. Known are PTC000, PTC010"):
        explain("PTC999")
