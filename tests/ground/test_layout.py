import importlib

import pytest

import partc.codegen
import partc.passes


@pytest.mark.parametrize("name", ["passes", "codegen"])
def test_folder_has_only_one_import_name(name: str) -> None:
    with pytest.raises(ImportError, match=f"import partc.{name}, not {name}"):
        importlib.import_module(name)


def test_folders_are_reached_through_links() -> None:
    assert partc.passes.__name__ == "partc.passes"
    assert partc.codegen.__name__ == "partc.codegen"
