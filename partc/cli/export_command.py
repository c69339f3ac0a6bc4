"""``partc export``: the model of a checkpoint as files of weights."""

from __future__ import annotations

import argparse

from partc.cli.terminal import progress, tell
from partc.errors import UsageError

LEAST = 10**6  # bytes that a number without a unit may stand for


def export_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``partc export``."""
    parser.add_argument(
        "checkpoint", help="folder of a run, of which the newest step is taken, or of one step"
    )
    parser.add_argument(
        "-o", "--out", metavar="DIR", required=True,
        help="folder to write; one of an earlier export is replaced",
    )  # fmt: skip
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB",
        help="of a file with its unit, as 200MB; only a single tensor may be larger (default: 5GB)",
    )  # fmt: skip
    parser.add_argument(
        "--config", metavar="PATH",
        help="config.json of the model, or a folder with one: copied beside the weights, for "
        "from_pretrained of transformers",
    )  # fmt: skip


def export_command(args: argparse.Namespace) -> int:
    """Write the model of a checkpoint as safetensors files, as Hugging Face's loaders read them."""
    from partc.program.checkpoints.export import export_safetensors

    _check_unit(args.max_shard_size)
    with progress(f"exporting {args.checkpoint}"):
        folder = export_safetensors(
            args.checkpoint, args.out, max_shard_size=args.max_shard_size, config=args.config
        )
    files = {each.name: each.stat().st_size for each in sorted(folder.iterdir())}
    text = f"{args.out}: {sum(files.values()):,} bytes in {', '.join(files)}"
    tell(args, text, {"out": args.out, "files": files})
    return 0


def _check_unit(size: str) -> None:
    """UsageError for a number without a unit that would give each tensor a file of its own."""
    if size.isdecimal() and 0 < int(size) < LEAST:
        raise UsageError(
            where=f"--max-shard-size {size}", what=f"it has no unit, and stands for {size} bytes",
            why="each tensor would have a file of its own",
            do=f"Write the unit: {size}GB or {size}MB; for so few bytes {int(size) / 1000:g}KB.",
        )  # fmt: skip
