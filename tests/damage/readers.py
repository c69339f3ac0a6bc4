"""What reads a damaged thing, and whether the numbers are those of the undamaged one."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import partc
from partc.cli.main import main
from partc.program import Program
from tests.damage.alone import SAID
from tests.damage.built import (
    RankFailed,
    batch_of,
    content,
    free_port,
    is_right,
    loss_of,
    model_of,
    ranks,
    trained,
)
from tests.damage.verdicts import Verdict, joined, told

MODEL = "tests.damage.built:target"
MOST_RANKS = 8  # of a program that is run; the numbers of larger ones follow from the same passes


# programs ------------------------------------------------------------------------------------
def read_program(folder: Path, other: Path, losses: str | None, *, forged: bool = False) -> Verdict:
    """The verdict of every command and call that reads a saved program.

    Args:
        other: a whole program, with which ``diff`` compares it.
        losses: what ``run.py`` of the undamaged program prints; None where that is no reader, as
            it is what was damaged.
        forged: the digests are right again, so that only ``check`` can tell.
    """
    accepted = told(lambda: _loads(folder))
    commands = [["explain", str(folder)], ["simulate", str(folder)]]
    verdicts = [told(partial(command, each)) for each in commands]
    # what was edited is not refused by `diff`, which runs nothing and says that it was
    compared = told(lambda: command(["diff", str(folder), str(other)]))
    of_model = told(lambda: _loads(folder, model_of()))
    if accepted.word == "harmless":
        verdicts.append(apart(lambda: _checked(folder)))
    else:
        verdicts.append(told(lambda: command(["check", str(folder)])))
        if any(each.word == "harmless" for each in verdicts):
            verdicts.append(Verdict("wrong", f"a command takes what load refuses: {accepted.why}"))
    # run.py cannot judge code whose digests were forged: what partc refuses then is not run
    if losses is not None and (not forged or verdicts[-1].word == "harmless"):
        verdicts.append(told(lambda: run_script(folder, losses)))
    return joined([accepted, of_model, compared, *verdicts])


def _loads(folder: Path, model: nn.Module | None = None) -> None:
    partc.load(folder, model)


def apart(read: Callable[[], Verdict | None]) -> Verdict:
    """The verdict of a reader in a fork: what has run ranks in threads cannot start others."""
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(mouth, json.dumps(told(read)).encode()[:60_000])
        os._exit(0)
    os.close(mouth)
    with os.fdopen(ear, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return Verdict(*json.loads(text)) if text else Verdict("raw", "the process died")


def _checked(folder: Path) -> Verdict | None:
    """What ``check`` says, and if it accepts, the numbers."""
    checked = told(lambda: command(["check", str(folder)]))
    return numbers(partc.load(folder)) if checked.word == "harmless" else checked


def numbers(program: Program) -> Verdict | None:
    """Whether a program, and those of other shapes with it, computes what the model does."""
    if program.mesh.num_ranks <= MOST_RANKS and not is_right(program):
        return Verdict("wrong", "verify tells other numbers")
    return None


def command(arguments: list[str]) -> Verdict | None:
    """Run a command of partc here; a refusal has to be a sentence with its code."""
    said = _said()
    start = said.stat().st_size if said.exists() else 0
    code = main(arguments)
    text = said.read_bytes()[start:].decode("utf-8", "replace") if said.exists() else ""
    odd = sorted({c for c in text if not (c.isprintable() or c in "\n\r\t")})
    if odd:
        return Verdict("raw", f"{arguments[0]} prints the control characters {odd}")
    if code == 2:
        return Verdict("refused", text[-2000:])
    return None


def _said() -> Path:
    """The file that takes what this case prints."""
    return Path.cwd().parent / SAID


# run.py --------------------------------------------------------------------------------------
def run_script(folder: Path, losses: str) -> Verdict | None:
    """Run ``run.py`` on all its ranks, if its folder passes, and compare the losses of rank 0."""
    names = runpy.run_path(str(folder / "run.py"), run_name="damaged")
    manifest, _ = names["read_manifest"]()
    num = sum(each for each, _ in manifest["roles"])
    if num > MOST_RANKS:
        return None
    found = run_ranks(folder, num)
    if isinstance(found, str) and found != losses:
        return Verdict("wrong", f"run.py has the losses {found}, not {losses}")
    return None if isinstance(found, str) else found


def run_ranks(folder: Path, num: int) -> Verdict | str:
    """Run ``run.py`` on forked ranks: the losses that rank 0 prints, or what failed."""
    port, outs = str(free_port()), [Path.cwd() / f"rank-{r}.txt" for r in range(num)]
    children = [start_rank(folder, rank, num, port, out) for rank, out in enumerate(outs)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
    texts = [out.read_text(encoding="utf-8", errors="replace") for out in outs]
    if any(codes):
        raw = [text for code, text in zip(codes, texts, strict=True) if code not in (0, 2)]
        return Verdict("raw", f"run.py: {raw[0][-600:]}") if raw else Verdict("refused")
    lines = (line.split() for line in texts[0].splitlines())
    return " ".join(words[3] for words in lines if words[:1] == ["step"])


def start_rank(
    folder: Path, rank: int, num: int, port: str, out: Path,
    options: Sequence[str] = ("--steps", "2"), environ: Mapping[str, str] = MappingProxyType({}),
) -> int:  # fmt: skip
    """Fork, and run ``run.py`` as one rank, which prints into ``out``; the process."""
    child = os.fork()
    if child:
        return child
    code: Any = 1
    try:
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num), LOCAL_RANK=str(rank),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=port)  # fmt: skip
        os.environ.update(environ)
        sys.argv = [str(folder / "run.py"), "--device", "cpu", *options]
        runpy.run_path(str(folder / "run.py"), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        import traceback

        print("".join(traceback.format_exception(error)), file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


# what is given to compile --------------------------------------------------------------------
def read_for_compile(mesh: Any, **given: Any) -> Verdict | None:
    """Compile with a damaged plan, mesh or schedule; what compiles has to be right."""
    program = partc.compile(model_of(), mesh, batch_of(), loss=loss_of, **given)
    return numbers(program)


# checkpoints and weights ---------------------------------------------------------------------
class Differs(Exception):
    """A rank has other tensors than the undamaged thing gives."""


class AsItSays(Exception):
    """A rank has other tensors, which are just those that the file holds."""


def read_checkpoint(folder: Path, good: Path, program: Path, num: int, forged: bool) -> Verdict:
    """Load a checkpoint on ``num`` ranks, and compare every tensor with what ``good`` gives.

    Args:
        forged: its digests are right again, so that other hyperparameters are what it says.
    """

    def work() -> None:
        found, groups = _loaded(folder, program)
        wanted, wanted_groups = _loaded(good, program)
        odd = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        if odd:
            raise Differs(f"{odd[0]} differs")
        if groups != wanted_groups:
            raise (AsItSays if forged else Differs)(f"{groups} is not {wanted_groups}")

    return _on_ranks(num, work)


def _loaded(folder: Path, program: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """What a checkpoint gives to a stage and AdamW: digests of tensors, and the groups."""
    stage, optimizer = trained(program, 0)
    partc.load_checkpoint(folder, stage, optimizer)
    found = content(stage, optimizer)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    stage.step(*batch_of())
    optimizer.step()  # hyperparameters that were misread end here
    return found, groups


def read_weights(path: Path, files: list[Path], program: Path) -> Verdict:
    """Load weights on one rank; the safetensors package says what the files hold."""
    return _on_ranks(1, lambda: _read_weights(path, files, program))


def _read_weights(path: Path, files: list[Path], program: Path) -> None:
    stage = partc.load(program).module()
    stage.load_full(path)
    try:
        held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise Differs(f"the safetensors package refuses it: {error}") from None
    good = model_of(5).state_dict()
    for name, tensor in stage.full_state_dict().items():
        if name not in held or not same(tensor, held[name].to(tensor.dtype)):
            raise Differs(f"{name} is not as the safetensors package reads it")
    if not all(same(good[name], held[name]) for name in good):
        raise AsItSays


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)))


def _on_ranks(num: int, work: Callable[[], None]) -> Verdict:
    """The verdict of what ranks raise, which comes as a type and a text."""
    try:
        ranks(num, work, Path.cwd() / "ranks")
    except RankFailed as failed:
        kind, _, _ = str(failed).partition(": ")
        words = {"Differs": "wrong", "AsItSays": "as it says"}
        known = words.get(kind) or ("refused" if hasattr(partc.errors, kind) else "raw")
        return Verdict(known, str(failed))
    return Verdict("harmless")
