"""Rules of matrix decompositions and solvers: only batch dims are sharded, never a matrix."""

from __future__ import annotations

from partc.rules.call import Call
from partc.rules.families.reduce import along_dim
from partc.rules.table import rule, whole_only


def cross(call: Call) -> str:
    """Elementwise but for the dim of the vectors."""
    first, second = call.shapes[:2]
    return along_dim(call) if first == second else whole_only(call)


def diag_embed(call: Call) -> str:
    """Each vector becomes a matrix in the last two dims, or anywhere else."""
    rank = call.rank() + 1
    at_the_end = (call["dim1"] % rank, call["dim2"] % rank) == (rank - 2, rank - 1)
    return "..._->...__" if at_the_end else whole_only(call)


def solve(call: Call) -> str:
    """A matrix of right-hand sides, or a vector of them for each matrix."""
    a, b = call.shapes[:2]
    vector = b == a[:-1] if a is not None and b is not None else False
    side = "..._" if vector else "...__"
    return f"...__,{side}->{side},...__,..._,..."


def solved(call: Call) -> str:
    """A result of any dims behind those of the batch, which alone ``info`` has."""
    x, info = call.shapes[:2]
    behind = "_" * (len(x) - len(info)) if x is not None and info is not None else "__"
    return f"...{behind},...->...{behind}"


rule("aten.linalg_cholesky_ex aten.linalg_inv_ex", "...__->...__,...")
rule("aten.linalg_lu_factor_ex", "...__->...__,..._,...")
rule("aten.linalg_qr", "...__->...__,...__")
rule("aten._linalg_eigh", "...__->..._,...__")
rule("aten._linalg_svd", "...__->...__,..._,...__")
rule("aten._linalg_det", "...__->...,...__,..._", traced=("A",))
rule("aten._linalg_slogdet", "...__->...,...,...__,..._", traced=("A",))
rule("aten._linalg_solve_ex", solve, traced=("A",))
rule("partc.ops.solved", solved)
rule("partc.ops.by_columns", "...__->...__", linear="0", moves=True)
rule("aten.linalg_matrix_exp", "...__->...__")
rule("aten.linalg_solve_triangular", "...__,...__->...__", linear="1")
rule("aten.linalg_lu_solve", "...__,..._,...__->...__", linear="2")
rule("aten.linalg_cross", cross, linear="0|1")
rule("aten.diag_embed", diag_embed, linear="0", moves=True)
