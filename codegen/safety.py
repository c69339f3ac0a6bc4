"""Checks that a generated program does nothing but compute with torch.

Source text in, its syntax tree out. Every node of the tree is on an allow-list, so that a
program from an edited file or from a user's pass cannot open files, run commands or load code.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence

from partc.errors import CheckError
from partc.program.helper_file import imports_helpers
from partc.wrong_calls import did_you_mean

IMPORTS = {
    "hashlib",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.nn",
    "torch.profiler",
}
NODES = (
    ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.Expr, ast.Constant, ast.Assign,
    ast.AugAssign, ast.AnnAssign, ast.Name, ast.Load, ast.Store, ast.Del, ast.Delete,
    ast.FunctionDef, ast.ClassDef, ast.arguments, ast.arg, ast.Attribute, ast.Call,
    ast.keyword, ast.Return, ast.If, ast.IfExp, ast.For, ast.While, ast.Dict, ast.List,
    ast.Tuple, ast.Set, ast.Subscript, ast.Slice, ast.Starred, ast.BinOp, ast.UnaryOp,
    ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.JoinedStr,
    ast.FormattedValue, ast.DictComp, ast.ListComp, ast.GeneratorExp, ast.SetComp,
    ast.comprehension, ast.Pass, ast.Assert, ast.With, ast.withitem,
    ast.Yield,
)  # fmt: skip
BUILTINS = {
    "range", "zip", "len", "reversed", "enumerate", "super", "tuple", "list", "dict", "int",
    "float", "str", "bool", "object", "sum", "min", "max", "sorted", "None", "next", "iter",
    "slice", "isinstance", "property",
}  # fmt: skip
READING = {"len", "tuple", "list", "isinstance", "size", "dim", "numel", "is_contiguous"}
FORBIDDEN = {
    "eval", "exec", "compile", "getattr", "setattr", "delattr", "open", "globals", "locals",
    "vars", "breakpoint", "input", "load", "save", "system", "popen", "hub", "jit", "os",
    "sys", "subprocess", "serialization", "utils", "package",
    # what reads, writes or maps files, or loads libraries
    "numpy", "tofile", "fromfile", "from_file", "memmap", "dump", "dumps", "load_library",
    "export_chrome_trace", "export_stacks", "export_memory_timeline", "share_memory_",
    "tensorboard_trace_handler", "add_execution_trace_observer", "UntypedStorage", "TypedStorage",
    "FileStore", "_dump_snapshot", "_record_memory_history",
}  # fmt: skip
OF_TORCH = {  # modules of torch itself that do more than compute
    "_C", "_dynamo", "_export", "_inductor", "classes", "compiler", "cpp", "export", "futures",
    "fx", "library", "monitor", "multiprocessing", "onnx", "profiler", "quantization", "testing",
}  # fmt: skip


_PRINTED = (
    "If a backend or a pass of yours prints this line, let it print calls of torch, or of a helper "
    'that it takes by helpers.use("..."). Else it is a fault in partc: report it with the plan.'
)
_LOOKS = {"print", "open", "breakpoint", "input", "logging", "logger", "log"}
_TO_LOOK = (
    " To look at a value, name its module in the plan, hooks = [...], and print in hooks.py; or "
    "return it beside the loss, (loss, extras)."
)


class _Unfit(Exception):
    """A line of a program does something else than compute."""

    def __init__(self, line: int, what: str, meant: str = "", instead: str = "") -> None:
        super().__init__(what)
        self.line, self.what = line, what
        # for who edited the line: the names that it may mean, and what to do instead
        self.meant, self.instead = meant, instead


def check_source(text: str, file: str = "") -> ast.Module:
    """The syntax tree of a program; CheckError unless it only computes with torch.

    ``file``: the name of a file that a user may have edited; without it partc has just printed it.
    """
    try:
        return _checked(text)
    except _Unfit as error:
        raise CheckError(
            where=f"{file}:{error.line}" if file else f"generated program, line {error.line}",
            what=error.what + (f". {error.meant}" if file and error.meant else ""),
            why="programs only compute with torch",
            do=f"Undo the edit of this line.{error.instead}" if file else _PRINTED,
        ) from None


def _checked(text: str) -> ast.Module:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line, message = getattr(error, "lineno", 0) or 0, getattr(error, "msg", str(error))
        raise _Unfit(line, f"the text does not parse: {message}") from None
    _check_loops(tree)
    nodes, compilers = list(ast.walk(tree)), _compilers(tree)
    known = _defined(nodes) | BUILTINS
    for node in nodes:
        _check_node(node, known, compilers)
    return tree


def _check_loops(tree: ast.Module) -> None:
    """_Unfit for a loop that runs while the program is loaded, or that nothing ends."""
    for node in tree.body:
        if isinstance(node, ast.For | ast.While):
            raise _Unfit(node.lineno, "a loop outside of functions does not belong in a program")
    for each in ast.walk(tree):
        if isinstance(each, ast.While) and isinstance(each.test, ast.Constant):
            raise _Unfit(each.lineno, "a loop without an end does not belong in a program")


def _check_node(node: ast.AST, known: set[str], compilers: set[ast.expr]) -> None:
    line = getattr(node, "lineno", 0)
    if not isinstance(node, NODES):
        raise _Unfit(line, f"{type(node).__name__.lower()} does not belong in a program")
    if isinstance(node, ast.Assert) and not _is_of_shapes(node):
        raise _Unfit(line, "an assert that calls functions does not belong in a program")
    if isinstance(node, ast.With) and not all(map(_is_range, node.items)):
        raise _Unfit(line, "a with that is no record_function does not belong in a program")
    if isinstance(node, ast.Import | ast.ImportFrom) and not imports_helpers(node):
        modules = (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
        if not set(modules) <= IMPORTS:
            raise _Unfit(line, f"it imports {', '.join(modules)}")
    if isinstance(node, ast.Attribute) and _is_private(node.attr) and node not in compilers:
        raise _Unfit(line, f"it reaches for .{node.attr}")
    if isinstance(node, ast.Attribute) and node.attr in OF_TORCH and _is_torch(node.value):
        raise _Unfit(line, f"it reaches for torch.{node.attr}")
    if isinstance(node, ast.Name) and (_is_private(node.id) or node.id not in known):
        meant = did_you_mean(node.id, sorted(known - BUILTINS)) if _is_unset(node.id, known) else ""
        unset = ", which no line sets" * _is_unset(node.id, known)
        instead = _TO_LOOK if node.id in _LOOKS else ""
        raise _Unfit(line, f"it reads the name {node.id}{unset}", meant, instead)


def _is_unset(name: str, known: set[str]) -> bool:
    """Whether no line of the program sets a name, and Python has it not either."""
    return not (_is_private(name) or name in known or hasattr(builtins, name))


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _is_range(item: ast.withitem) -> bool:
    """Whether a ``with`` opens a range of torch.profiler, without a name for it."""
    called = item.context_expr
    is_call = isinstance(called, ast.Call) and ast.unparse(called.func) == "record_function"
    return is_call and item.optional_vars is None


def _is_of_shapes(node: ast.Assert) -> bool:
    """Whether an assert only reads: it may ask for sizes, as in ``x.size(0)``, and call no more."""
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    names = {each.attr if isinstance(each, ast.Attribute) else ast.unparse(each) for each in calls}
    return names <= READING


def _compilers(tree: ast.Module) -> set[ast.expr]:
    """Every decorator ``@torch.compile`` without arguments: the only use of ``compile`` allowed."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    decorators = [each for function in functions for each in function.decorator_list]
    return {each for each in decorators if ast.unparse(each) == "torch.compile"}


def _is_private(name: str) -> bool:
    """Whether a name is a dunder name but ``__init__``, or runs or loads code (FORBIDDEN)."""
    return (name.startswith("__") and name != "__init__") or name in FORBIDDEN


def _defined(nodes: Sequence[ast.AST]) -> set[str]:
    """Every name that the program itself binds."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names
