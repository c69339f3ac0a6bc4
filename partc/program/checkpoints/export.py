"""Write the model of a checkpoint as files of weights that other tools read."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from partc.atomic import atomic_directory, check_output
from partc.errors import RunError, UsageError
from partc.file_text import Unreadable, file_text, json_value
from partc.program.checkpoints.checkpoint import latest
from partc.program.checkpoints.files import flush
from partc.program.checkpoints.saved_checkpoint import Saved
from partc.program.weight_files import MOST, num_bytes, write_weights, written_weights
from partc.wrong_calls import as_path, known_arguments, quoted

CONFIG = "config.json"


@known_arguments
def export_safetensors(
    checkpoint: str | Path, folder: str | Path, *, max_shard_size: int | str = MOST,
    config: str | Path | None = None,
) -> Path:  # fmt: skip
    """Write the model of a checkpoint as safetensors files, under its own names and dtypes.

    The files are those of Hugging Face's ``save_pretrained``: a tied weight stands in them once,
    and several files have an index. One process does it, for a checkpoint of any mesh, and has one
    tensor at a time in memory. The folder appears whole or not at all.

    Args:
        checkpoint: the folder of a run, of which the newest step is taken, or that of one step.
        folder: a new one, or one of an earlier export, which is replaced.
        max_shard_size: of a file, in bytes or as ``"5GB"``; only a tensor may be larger.
        config: a config.json, or a folder with one, which is copied beside the weights, so that
            ``AutoModel.from_pretrained(folder)`` reads them.

    Returns:
        The folder.

    Raises:
        LoadError: there is no checkpoint, or a file of it is missing or damaged.
        UsageError: the folder has files that no export wrote, or cannot be written.
        RunError: the checkpoint was saved by a partc that did not write down the model's names.

    Example::

        partc.export_safetensors("run", "weights", config="model/config.json")
        model = AutoModelForCausalLM.from_pretrained("weights")
    """
    target = as_path(folder, "export_safetensors")
    most = num_bytes(max_shard_size, "max_shard_size=")
    beside = None if config is None else _config(as_path(config, "export_safetensors"))
    check_output(target, _exported)
    saved = Saved.read(latest(as_path(checkpoint, "export_safetensors")))
    keys = _keys(saved)
    for rank in range(saved.mesh.num_ranks):
        saved.check(rank)
    typed = {n: (saved.shards[key].shape, saved.shards[key].dtype) for n, key in keys.items()}
    with atomic_directory(target, _exported) as new:
        write_weights(new, typed, lambda name: saved.whole(keys[name]), most)
        if beside is not None:
            shutil.copyfile(beside, new / CONFIG)
            flush(new / CONFIG)
        flush(new)
    return target


def _keys(saved: Saved) -> dict[str, str]:
    """By name of the model's state dict the key of its tensor, without second names of tied ones;
    RunError for a checkpoint that does not say the names.
    """
    if not saved.model:
        raise RunError(
            where=str(saved.path), what="it does not say which names the model's state dict has",
            why="an earlier partc has saved it",
            do="Load it into a stage and save it again: partc.load_checkpoint, "
            "partc.save_checkpoint.",
        )  # fmt: skip
    every = saved.model
    names = {first: name for name, first in reversed([*every.items()])}  # the first of several
    names |= {first: first for first in names if first in every}
    return {name: f"model/{first}" for name, first in every.items() if names[first] == name}


def _exported(folder: Path) -> Collection[str]:
    """The files of an earlier export in a folder, and the config beside them."""
    names = written_weights(folder)
    return {*names, CONFIG} if names else names


def _config(path: Path) -> Path:
    """The file of a configuration; UsageError for what is none."""
    file = path / CONFIG if path.is_dir() else path
    try:
        if isinstance(json_value(file_text(file)), dict):
            return file
        why = "it has no keys"
    except Unreadable as error:
        why = str(error)
    raise UsageError(
        where=f"config={quoted(str(path))}", what="it is no configuration of a model", why=why,
        do="Name the config.json of the model, or the folder that has it.",
    )  # fmt: skip
