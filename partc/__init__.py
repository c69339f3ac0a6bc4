"""partc compiles a single-device PyTorch model into readable distributed programs."""

__version__ = "0.1.0"

from partc.api import compile, partition
from partc.errors import PartcError
from partc.mesh import Mesh
from partc.plan import Plan
from partc.program import Program, load
from partc.verify import verify

__all__ = ["Mesh", "PartcError", "Plan", "Program", "compile", "load", "partition", "verify"]
