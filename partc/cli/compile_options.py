"""The options of ``partc compile``."""

from __future__ import annotations

import argparse

from partc.cli.shared_options import add_sizes
from partc.wrong_calls import RENAMED


def compile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="package.module:callable, which gives a model or (model, inputs, loss); hf:<type> for "
        "a Hugging Face model type with its default configuration, as hf:llama, or "
        "hf:<path>/config.json for a configuration of yours; nothing is downloaded",
    )
    parser.add_argument(
        "--mesh", required=True,
        help='axes and their sizes, as "dp=2,tp=2", or a mesh.toml, which describes machines too',
    )  # fmt: skip
    parser.add_argument(
        "--plan", default="auto",
        help="a preset such as fsdp or megatron, presets joined by +, a plan.toml, or auto: search "
        "for the fastest plan that fits (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--out", required=True, help="folder to write; a program saved there before is replaced"
    )
    parser.add_argument(
        "--objective", default="time",
        help="what --plan auto makes least: time (of a step), dollars or energy (of a token); "
        "default: time",
    )  # fmt: skip
    parser.add_argument(
        "--local-batch", action="store_true",
        help="a step takes each rank's own samples, as under DDP, and the example inputs are those "
        "of one rank; left out, it takes the whole batch on every rank, or what the plan says",
    )  # fmt: skip
    parser.add_argument(
        "--inference", action="store_true", help="compile the forward alone, in eval mode"
    )
    _add_pipeline(parser)
    _add_choices(parser)
    _add_passes(parser)
    add_sizes(parser)


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    pipeline = parser.add_argument_group("microbatches and pipelines (an axis pp)")
    pipeline.add_argument(
        "--microbatches", metavar="N", type=int,
        help="number of microbatches, computed one after the other, that the batch is cut into",
    )  # fmt: skip
    pipeline.add_argument(
        "--schedule",
        help="order in which pipeline ranks compute microbatches: 1f1b, gpipe, interleaved-1f1b, "
        "zb-h1, zb-v, ..., auto to make one for the stages' costs, or a CSV file",
    )
    pipeline.add_argument(
        "--stages", metavar="A,B",
        help="paths of the modules at which pipeline stages 1, 2, ... begin; left out, stages are "
        "chosen to cost about the same",
    )  # fmt: skip
    pipeline.add_argument(
        "--virtual-stages", metavar="N", type=int,
        help="number of pipeline stages on each pipeline rank, where --stages is left out",
    )  # fmt: skip
    pipeline.add_argument("--chunks", action=Renamed, help=argparse.SUPPRESS)


class Renamed(argparse.Action):
    """A flag that has another name now: an error says which."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        new = RENAMED[self.dest].replace("_", "-")
        parser.error(f"{self.option_strings[0]} is called --{new}")


def _add_choices(parser: argparse.ArgumentParser) -> None:
    choices = parser.add_argument_group("memory and kernels")
    choices.add_argument(
        "--recompute", metavar="WHAT",
        help="what the backward computes again instead of keeping it from the forward: none, "
        "cheap (what costs little), attention, block (each whole block), or modules' paths A,B",
    )  # fmt: skip
    choices.add_argument(
        "--compile", choices=["none", "inductor"],
        help="inductor: torch.compile makes kernels of what is computed between two transfers",
    )  # fmt: skip
    choices.add_argument(
        "--backend", choices=["gloo", "nccl"],
        help="library that carries tensors between ranks; left out, that of the mesh's machines",
    )  # fmt: skip
    choices.add_argument(
        "--memory-bytes", metavar="N", type=int,
        help="bytes that a rank may hold at its peak; a program that needs more is refused",
    )  # fmt: skip


def _add_passes(parser: argparse.ArgumentParser) -> None:
    passes = parser.add_argument_group("the compiler's passes (`partc passes` lists them)")
    passes.add_argument(
        "--dump", metavar="DIR",
        help="folder for the graph's text after every pass; an earlier dump there is replaced",
    )  # fmt: skip
    passes.add_argument(
        "--disable", metavar="A,B", help="names of passes to leave out, to see what they are for"
    )
