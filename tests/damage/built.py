"""What the cases damage: programs, checkpoints, weights, a plan, a machine and a schedule."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.program import Program
from partc.program.stage.runtime import Stage
from tests.patience import patience

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("dp=1", {"plan": "ddp"}),
    "ddp": ("dp=2", {"plan": "ddp"}),
    "sharded": ("dp=2,tp=2", {"plan": "fsdp+megatron"}),
    "zero1": ("dp=2", {"plan": "zero1"}),
    "pipeline": ("pp=2", {"plan": "ddp", "microbatches": 2}),
}
SMALL = ("one", "zero1")
MACHINE = "mesh.toml"
SCHEDULE = "own.csv"


class Damaged(nn.Module):
    """An MLP with a norm, a buffer and dropout, which are a saved program's kinds of content."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training)
        y: Tensor = (x + self.down(h)) * self.scale
        return y


def model_of(seed: int = 0) -> Damaged:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Damaged()


def batch_of() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 8, 8, generator=generator)
    return x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def target() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    """What ``--model tests.damage.built:target`` names."""
    return model_of(), batch_of(), loss_of


def compiled(mesh: Any, **given: Any) -> Program:
    return partc.compile(model_of(), mesh, batch_of(), loss=loss_of, **given)


def is_right(program: Program) -> bool:
    """Whether a program computes what the model does, on threads of this process."""
    report = partc.verify(program, model_of(), batch_of(), loss=loss_of, timeout=patience(40.0))
    return report.ok()


@dataclass
class Built:
    """The folder of all undamaged things, and what was read from them.

    ``programs/NAME``, ``other/NAME`` (the same layouts of another model), ``checkpoint`` (of two
    ranks, with AdamW), ``weights.safetensors``, ``shards`` (with an index), ``mesh.toml``.
    """

    folder: Path
    losses: dict[str, str] = field(default_factory=dict)  # that run.py of each program prints

    @property
    def names(self) -> list[str]:
        """The programs that were built."""
        return sorted(each.name for each in (self.folder / "programs").iterdir())

    def program(self, name: str) -> Path:
        return self.folder / "programs" / name


def built_aside(folder: Path, *, small: bool = False) -> Built:
    """As ``build``, by a process of its own, and import here what it has imported.

    Where torch is built for GPUs, no fork computes gradients once its parent has.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            built = build(folder, small=small)
            (folder / "losses.json").write_text(json.dumps([built.losses, [*sys.modules]]))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit("nothing was built: see the traceback above")
    losses, modules = json.loads((folder / "losses.json").read_text())
    for name in modules:
        with suppress(Exception):  # some are made by hand, and are no files
            importlib.import_module(name)
    return Built(folder, losses)


def build(folder: Path, *, small: bool = False) -> Built:
    """Make everything that cases damage, or, in less time, two programs and what goes with them."""
    torch.set_num_threads(1)  # a fork has the threads of its parent no longer
    for name, (mesh, given) in LAYOUTS.items():
        if small and name not in SMALL:
            continue
        compiled(mesh, **given).save(folder / "programs" / name)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        partc.compile(model, mesh, batch_of(), loss=loss_of, **given).save(folder / "other" / name)
    if not small:
        _save_modes(folder / "programs/modes")
    weights = model_of(5).state_dict()
    save_file(weights, folder / "weights.safetensors")
    (folder / "shards").mkdir()
    _write_shards(folder / "shards", weights)
    machine = str(partc.Topology.load("dgx-a100", devices=2))
    (folder / MACHINE).write_text(machine + "[axes]\ndp = 2\n")
    (folder / SCHEDULE).write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    compiled(str(folder / MACHINE), plan="ddp")  # or each damage of it would be refused
    ranks(2, lambda: _save(folder), folder / "saving")
    built = Built(folder)
    for name in built.names:
        built.losses[name] = _losses(built.program(name), folder / "run")
    return built


def _save_modes(folder: Path) -> None:
    """A program with others of other modes beside it."""
    one = compiled("dp=1", plan="ddp").for_shapes(batch_of(), modes=("eval",))
    one.for_shapes(batch_of()[:1], modes=("forward",)).save(folder)


def _losses(program: Path, place: Path) -> str:
    """What ``run.py`` of a whole program prints."""
    from tests.damage.readers import run_ranks

    place.mkdir(exist_ok=True)
    with chdir(place):
        found = run_ranks(program, partc.load(program).mesh.num_ranks)
    assert isinstance(found, str), found
    return found


def _write_shards(folder: Path, model: Mapping[str, Tensor]) -> None:
    """Two safetensors files and the index that names them."""
    names = sorted(model)
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: model[n] for n in names if files[n] == file}, folder / file)
    text = json.dumps({"metadata": {}, "weight_map": files}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


# ranks ---------------------------------------------------------------------------------------
def ranks(num: int, work: Callable[[], None], place: Path) -> None:
    """Run ``work`` on forked ranks of one gloo group; the error of the first that has one.

    TimeoutError is not raised here: the case's own limit ends all.
    """
    place.mkdir(parents=True, exist_ok=True)
    children = [_rank(rank, num, work, place) for rank in range(num)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        raise RankFailed((place / f"error-{failed[0]}").read_text())


class RankFailed(Exception):
    """What a forked rank raised, as text."""


def _rank(rank: int, num: int, work: Callable[[], None], place: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with group(rank, num, place / "store"):
            work()
        code = 0
    except BaseException as error:
        (place / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        os._exit(code)


@contextmanager
def group(rank: int, num: int, store: Path) -> Iterator[None]:
    """A gloo group over a file, which needs no port."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num), LOCAL_RANK=str(rank))
    file = f"file://{store.resolve()}"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=num)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(folder: Path, steps: int) -> tuple[Stage, torch.optim.Optimizer]:
    """A stage of a saved program with other weights, and AdamW, after some steps."""
    stage = partc.load(folder).module()
    stage.load_full(model_of(3))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    for _ in range(steps):
        stage.step(*batch_of())
        optimizer.step()
        optimizer.zero_grad()
    return stage, optimizer


def _save(folder: Path) -> None:
    stage, optimizer = trained(folder / "programs/zero1", 2)
    partc.save_checkpoint(folder / "checkpoint", stage, optimizer, step=2)


# numbers -------------------------------------------------------------------------------------
def content(stage: Stage, optimizer: torch.optim.Optimizer | None = None) -> dict[str, str]:
    """A digest of every tensor of a stage and its optimizer, and the groups as text."""
    found = {name: digest(tensor) for name, tensor in stage.full_state_dict().items()}
    if optimizer is None:
        return found
    for name, param in stage.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{key} of {name}"] = digest(local(value))
    return found


def local(tensor: Any) -> Tensor:
    """A tensor, or this rank's piece of a DTensor."""
    piece: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return piece


def digest(tensor: Any) -> str:
    plain = local(tensor).detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{list(plain.shape)} {sha256(raw).hexdigest()[:16]}"


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
