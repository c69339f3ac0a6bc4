"""The options of `partc launch` and `partc doctor`; nothing here imports torch."""

from __future__ import annotations

import argparse

from partc.cli.shared_options import add_folder, from_zero

EMITTED = ("torchrun", "slurm", "kubernetes", "skypilot", "torchx")


def launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``partc launch``."""
    add_folder(parser)
    parser.add_argument("--emit", required=True, choices=EMITTED, help="what shall start the job")
    parser.add_argument(
        "-o", "--out", metavar="DIR", default="launch",
        help="folder for the files; others there stay (default: launch)",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="replace files that exist with another text"
    )
    parser.add_argument("--name", default="", help="name of the job (default: the folder's)")
    parser.add_argument(
        "--script", metavar="FILE", default="",
        help="your script, which loads the program and trains; left out, the program's run.py",
    )  # fmt: skip
    parser.add_argument(
        "--args", metavar="TEXT", default="",
        help='arguments of the script, or of run.py, as --args="--steps 100"',
    )  # fmt: skip
    parser.add_argument(
        "--checkpoints", metavar="DIR", default="",
        help="where the script saves, told to it in $CHECKPOINTS (default: checkpoints)",
    )  # fmt: skip
    parser.add_argument(
        "--restarts", metavar="N", type=int, default=3,
        help="how often a run that failed is started again (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--grace", metavar="SECONDS", type=int, default=120,
        help="how long ranks have to save once a node has to go (default: 120)",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", metavar="TIME", default="",
        help="of the job under Slurm, as 4:00:00 (default: the partition's)",
    )  # fmt: skip
    _add_cluster(parser)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group(
        "of the cluster", "Left out, these follow from the machine that the program was made for."
    )
    cluster.add_argument("--devices-per-node", metavar="N", type=int, help="ranks of each node")
    cluster.add_argument(
        "--network", default="", metavar="NAME",
        help="what joins the nodes: infiniband, roce, efa, ethernet or other",
    )  # fmt: skip
    cluster.add_argument(
        "--interface", default="", metavar="NAME",
        help="network interface of the nodes, as eth0, for NCCL and gloo",
    )  # fmt: skip
    cluster.add_argument("--image", default="", help="container image (default: NAME:latest)")
    cluster.add_argument(
        "--resource", metavar="NAME=N", action="append", default=[],
        help="what a pod asks for beside GPUs, as rdma/hca=8; may be given several times",
    )  # fmt: skip


def doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``partc doctor``."""
    parser.add_argument(
        "folder", nargs="?", help="folder of a saved program that shall run here; may be left out"
    )
    parser.add_argument(
        "--links", metavar="SECONDS", type=from_zero, default=5.0,
        help="how long links between ranks are measured, under torchrun and with a program "
        "(default: 5; 0: not at all)",
    )  # fmt: skip
