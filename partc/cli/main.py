"""The command line: ``partc compile | explain | simulate | calibrate | verify | check | diff``.

Results go to stdout (``--json``: as one JSON object), progress and errors to stderr. Exit codes:
0 done, 1 a verification failed or a diff is not empty, 2 an error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from partc.cli import commands
from partc.errors import PartcError, RunError

EXAMPLES = """\
examples:
  partc compile hf:llama --layers 2 --batch 8 --mesh dp=2,tp=2 --plan megatron --out build/
  partc compile mypackage.train:setup --mesh dp=4 --plan fsdp --out build/
  partc explain build/                 partc explain --rules             partc explain PTC030
  partc explain build/ --model mypackage.train:setup    costs as formulas of batch and mesh too
  partc compile hf:llama --layers 8 --batch 16 --mesh pp=2,dp=2 --microbatches 8 --out build/
  partc simulate build/ --svg step.svg --trace step.json
  partc simulate build/ --bandwidth nvlink=x2 --peak x1.5     the same program on other machines
  partc verify build/ --model mypackage.train:setup
  partc calibrate --ranks 4 -o mesh.toml         or on several machines
  torchrun --nnodes 2 --nproc-per-node 8 -m partc calibrate --backend nccl -o mesh.toml
  torchrun --nproc-per-node 4 build/run.py
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    args = _parser().parse_args(arguments)
    try:
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except PartcError as error:
        return _refuse(args, error)
    except OSError as error:
        return _refuse(args, _of_system(error))
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


def _refuse(args: argparse.Namespace, error: PartcError) -> int:
    if args.json:
        print(json.dumps({"error": error.as_dict()}))
    print(f"{error.code} {error}", file=sys.stderr)
    return 2


def _of_system(error: OSError) -> PartcError:
    """A full disk, a missing permission and their like, in four parts."""
    return RunError(
        where=str(error.filename or "file system"),
        what="cannot be read or written",
        why=error.strerror or str(error),
        do="Check the path, its permissions and the free space.",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="partc", description="Compile a PyTorch model into readable distributed programs.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    subparsers = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = subparsers.add_parser(name, help=run.__doc__, description=run.__doc__)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        added.set_defaults(command=run)
        return added

    made = command("compile", commands.compile_command)
    made.add_argument("model", help="package.module:callable, hf:<model type> or hf:<config.json>")
    made.add_argument("--mesh", required=True, help='"dp=2,tp=2" or a mesh.toml')
    made.add_argument("--plan", default="auto", help="preset, presets joined by +, or a plan.toml")
    made.add_argument("--out", required=True, help="folder to write")
    made.add_argument("--microbatches", type=int, help="turns that the batch is cut into")
    made.add_argument(
        "--schedule", help="1f1b, gpipe, interleaved-1f1b, zb-h1, zb-v, auto, ..., or a CSV file"
    )
    made.add_argument("--stages", metavar="A,B", help="module paths where stages 1, 2, ... begin")
    made.add_argument("--chunks", type=int, help="stages per pipeline rank, where they are chosen")
    made.add_argument(
        "--recompute", metavar="WHAT",
        help="in the backward: cheap, none, attention, block, or module paths A,B",
    )  # fmt: skip
    made.add_argument(
        "--compile", choices=["none", "inductor"], help="leave computing to torch.compile"
    )
    made.add_argument("--memory-bytes", type=int, help="what a rank may hold at its peak")
    made.add_argument(
        "--objective", default="time", help="what --plan auto makes least: time, dollars, energy"
    )
    made.add_argument("--inference", action="store_true", help="the forward alone, in eval mode")
    _add_sizes(made)
    made = command("explain", commands.explain_command)
    made.add_argument("what", nargs="?", help="a saved program's folder, or an error code")
    made.add_argument("--rules", action="store_true", help="list the sharding rules")
    made.add_argument("--source", action="store_true", help="print the program of --rank")
    made.add_argument("--rank", type=int, default=0)
    made.add_argument("--model", help="the model that was compiled: costs as formulas too")
    _add_sizes(made)
    made = command("simulate", commands.simulate_command)
    made.add_argument("folder")
    made.add_argument("--trace", metavar="FILE", help="write a Chrome trace (JSON)")
    made.add_argument("--svg", metavar="FILE", help="write a picture")
    what_if = made.add_argument_group("on other machines (factors: 2, x0.5)")
    for name, what in (("bandwidth", "bytes/s"), ("latency", "latencies")):
        what_if.add_argument(
            f"--{name}", metavar="[LEVEL=]X", action="append", default=[],
            help=f"{what} of all links, or of one level's",
        )  # fmt: skip
    what_if.add_argument("--peak", metavar="X", default="1", help="FLOP/s")
    what_if.add_argument("--memory-bandwidth", metavar="X", default="1", help="of a device")
    what_if.add_argument("--devices", metavar="N", type=int, default=0, help="estimated")
    made = command("bench", commands.bench_command)
    made.add_argument("folder")
    made.add_argument("--steps", type=int, default=10, help="that are measured of each kind")
    made.add_argument("--warmup", type=int, default=3, help="steps before these")
    made.add_argument("--device", default="cpu", help="cuda needs torchrun")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds")
    made.add_argument("--trace", metavar="FILE", help="write a Chrome trace: predicted, measured")
    made = command("calibrate", commands.calibrate_command)
    made.add_argument("--ranks", type=int, help="processes to start; under torchrun leave it out")
    made.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    made.add_argument("-o", "--out", metavar="FILE", help="where to write; stdout if left out")
    made.add_argument("--keep-noisy", action="store_true", help="do not refuse what varies a lot")
    made = command("verify", commands.verify_command)
    made.add_argument("folder")
    made.add_argument("--model", required=True, help="the model that was compiled")
    made.add_argument("--tolerance", type=float, default=1e-9, help="largest relative error")
    made.add_argument("--processes", action="store_true", help="real gloo processes, not threads")
    made.add_argument("--timeout", type=float, default=300.0, help="seconds")
    _add_sizes(made)
    made = command("check", commands.check_command)
    made.add_argument("folder")
    made.add_argument("--accept-edits", action="store_true", help="take edited files as they are")
    made = command("diff", commands.diff_command)
    made.add_argument("old")
    made.add_argument("new")
    return parser


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("for hf: models")
    sizes.add_argument("--batch", type=int, help="global batch")
    sizes.add_argument("--seq", type=int, help="sequence length, or image size")
    sizes.add_argument("--layers", type=int, help="number of layers")
    sizes.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16"])
    sizes.add_argument("--no-dropout", action="store_true", help="set every dropout to 0")
