"""Generated source in, a module out whose tracebacks show the source's lines."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import linecache
import threading
from types import ModuleType

from partc.codegen.safety import check_source

_PARSING = threading.Lock()  # Python 3.11 counts the depth of syntax trees for all threads together


class _TextLoader(importlib.machinery.SourceFileLoader):
    """Executes a text that is in memory; nothing is read from or written to a disk."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, f"<partc {name}>")
        self.text = text

    def get_data(self, path: str) -> bytes:
        return self.text.encode()

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError  # so that no bytecode cache is looked for


def load_source(text: str, name: str) -> ModuleType:
    """The module that a generated program defines, new on each call."""
    with _PARSING:
        check_source(text)
    loader = _TextLoader(name, text)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    linecache.cache[loader.path] = (len(text), None, text.splitlines(keepends=True), loader.path)
    loader.exec_module(module)
    return module
