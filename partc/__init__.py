"""partc compiles a single-device PyTorch model into readable distributed programs."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from partc.version import __version__ as __version__

if TYPE_CHECKING:
    from partc.api import compile
    from partc.control.controller import Controller
    from partc.control.variants import with_variants
    from partc.errors import PartcError
    from partc.failures.guard import StepGuard
    from partc.lowering import partition
    from partc.machines.topology import Topology
    from partc.passes.own_passes import graph_pass
    from partc.pictures.picture import Picture, picture
    from partc.plan import Plan
    from partc.plan.mesh import Mesh
    from partc.program import Program, load
    from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
    from partc.program.checkpoints.checkpoints import Checkpoints
    from partc.program.checkpoints.export import export_safetensors
    from partc.recipe import with_model
    from partc.replanned import replan
    from partc.reports.report import Report as Report  # the first name of ReportPage
    from partc.reports.report import ReportPage, report
    from partc.trace.script_loss import ScriptLoss
    from partc.traced import Traced
    from partc.verification.precision import Raised
    from partc.verification.verification import verify
    from partc.wrappers.parallel import parallelize

__all__ = [
    "Checkpoints", "Controller", "Mesh", "PartcError", "Picture", "Plan", "Program", "Raised",
    "ReportPage", "ScriptLoss", "StepGuard", "Topology", "Traced", "compile",
    "export_safetensors", "graph_pass", "load", "load_checkpoint", "parallelize", "partition",
    "picture", "replan", "report", "save_checkpoint", "verify", "with_model", "with_variants",
]  # fmt: skip

# Imported when first asked for: torch takes seconds, and `partc --help` has no use for it. No
# module may bear a name of this table, since importing it would then hide the function.
_MODULES = {
    "Checkpoints": "program.checkpoints.checkpoints",
    "Controller": "control.controller",
    "Mesh": "plan.mesh",
    "PartcError": "errors",
    "Picture": "pictures.picture",
    "Plan": "plan",
    "Program": "program",
    "Raised": "verification.precision",
    "Report": "reports.report",
    "ReportPage": "reports.report",
    "ScriptLoss": "trace.script_loss",
    "StepGuard": "failures.guard",
    "Topology": "machines.topology",
    "Traced": "traced",
    "compile": "api",
    "export_safetensors": "program.checkpoints.export",
    "graph_pass": "passes.own_passes",
    "load": "program",
    "load_checkpoint": "program.checkpoints.checkpoint",
    "parallelize": "wrappers.parallel",
    "picture": "pictures.picture",
    "partition": "lowering",
    "replan": "replanned",
    "report": "reports.report",
    "save_checkpoint": "program.checkpoints.checkpoint",
    "verify": "verification.verification",
    "with_model": "recipe",
    "with_variants": "control.variants",
}

_ELSEWHERE = {  # what is asked of partc, and what does it
    "save": "A program is saved by program.save(folder), and a run by partc.save_checkpoint(...).",
    "run": "A program runs by torchrun --nproc-per-node 2 FOLDER/run.py, or stage.step(*batch).",
    **{
        each: f"It is a command: partc {each} FOLDER, of a saved program."
        for each in ("bench", "simulate", "explain", "diff")
    },
}

if os.path.isfile(os.path.join(__path__[0], "passes")):  # git wrote the links as text files
    from partc.checkout import refusal

    raise ImportError(refusal(__path__[0]))

if "multiprocessing.process" in sys.modules:  # as where a process starts another
    from partc.imported_again import is_imported_again, refuse_groups

    if is_imported_again():
        refuse_groups()


if not TYPE_CHECKING:  # type checkers would take every misspelt name for one of type Any

    def __getattr__(name: str) -> Any:
        """One of the public names, from its module; or a module, as ``partc.metrics``."""
        if name in _MODULES:
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        from partc.wrong_calls import did_you_mean

        meant = _ELSEWHERE.get(name) or did_you_mean(name, [*_MODULES, "metrics"])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {meant}".strip())


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
