"""``partc export``: the model of a checkpoint as files of weights."""

from __future__ import annotations

import argparse

from partc.cli.terminal import progress, tell


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
        help="of a file, as 200MB; only a single tensor may be larger (default: 5GB)",
    )  # fmt: skip
    parser.add_argument(
        "--config", metavar="PATH",
        help="config.json of the model, or a folder with one: copied beside the weights, for "
        "from_pretrained of transformers",
    )  # fmt: skip


def export_command(args: argparse.Namespace) -> int:
    """Write the model of a checkpoint as safetensors files, as Hugging Face's loaders read them."""
    from partc.program.checkpoints.export import export_safetensors

    with progress(f"exporting {args.checkpoint}"):
        folder = export_safetensors(
            args.checkpoint, args.out, max_shard_size=args.max_shard_size, config=args.config
        )
    files = {each.name: each.stat().st_size for each in sorted(folder.iterdir())}
    text = f"{args.out}: {sum(files.values()):,} bytes in {', '.join(files)}"
    tell(args, text, {"out": args.out, "files": files})
    return 0
