"""Checkpoints as files of weights that other tools read: names, dtypes, sizes, and what is refused.

That transformers loads them, from any mesh, is shown in ``tests/whole/test_exports.py``.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import partc
from partc.errors import LoadError, PartcError, RunError, UsageError
from partc.program.weight_files import INDEX, ONE, dealt_out, num_bytes, written_weights
from partc.program.weights import Matched, check_names
from tests.program.trained import rewrite

pytestmark = pytest.mark.gloo
MB = 10**6


class Model(nn.Module):
    """Tied, without dims, in several dtypes; with buffers that a state dict has and has not."""

    count: Tensor
    mask: Tensor

    def __init__(self, width: int = 8, extra: torch.dtype = torch.bool) -> None:
        super().__init__()
        self.table = nn.Embedding(12, width)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.norm = nn.Linear(width, width).to(torch.bfloat16)
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("odd", torch.ones(3, dtype=extra))
        self.register_buffer("none", torch.ones(0, 4))
        self.register_buffer("mask", torch.arange(12.0) / 7, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scale * self.table(ids)
        x = x + self.norm(x.to(torch.bfloat16)).float()
        logits: Tensor = self.head(x) + self.mask
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def saved(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint of a model behind a step, and its whole state dict."""
    ids = torch.arange(12).view(2, 6)
    stage = partc.compile(model, "dp=1", ids, plan="ddp").module()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    stage.step(ids)
    optimizer.step()
    partc.save_checkpoint(folder, stage, optimizer, step=1)
    return stage.full_state_dict()


def content(folder: Path) -> dict[str, Tensor]:
    return {n: x for file in folder.glob("*.safetensors") for n, x in load_file(file).items()}


def is_same(found: dict[str, Tensor], state: dict[str, Tensor]) -> bool:
    return found.keys() == state.keys() and all(
        x.dtype == state[n].dtype and torch.equal(x, state[n]) and x.shape == state[n].shape
        for n, x in found.items()
    )


def test_an_export_has_the_models_names_shapes_and_dtypes(alone: None, tmp_path: Path) -> None:
    state = saved(tmp_path / "run", Model())
    out = partc.export_safetensors(tmp_path / "run", tmp_path / "out")
    assert [each.name for each in out.iterdir()] == [ONE]
    with safe_open(out / ONE, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    assert state.pop("head.weight") is state["table.weight"]  # a tied weight stands in it once
    assert is_same(content(out), state)
    assert content(out)["scale"].shape == ()
    assert content(out)["none"].shape == (0, 4)


def test_files_are_those_of_hugging_face(alone: None, tmp_path: Path) -> None:
    state = saved(tmp_path / "run", Model())
    out = partc.export_safetensors(tmp_path / "run", tmp_path / "out", max_shard_size=100)
    split = split_torch_state_dict_into_shards(state, max_shard_size=100)
    weight_map = {n: f for n, f in split.tensor_to_filename.items() if n != "head.weight"}
    told = json.loads((out / INDEX).read_text())
    assert told["weight_map"] == weight_map
    assert told["metadata"]["total_size"] == split.metadata["total_size"]
    assert sorted(os.listdir(out)) == sorted({*weight_map.values(), INDEX})


def test_a_run_is_its_newest_step_and_an_export_replaces_an_earlier_one_alone(
    alone: None, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    saved(tmp_path / "run", Model())
    out = tmp_path / "out"
    step = tmp_path / "run" / "step-00000001"
    partc.export_safetensors(step, out, max_shard_size="1KB", config=config)
    partc.export_safetensors(tmp_path / "run", out, max_shard_size=50, config=tmp_path)
    assert written_weights(out) | {"config.json"} == {*os.listdir(out)}
    (out / "mine.txt").write_text("")
    with pytest.raises(UsageError, match=r"mine\.txt, which partc did not write"):
        partc.export_safetensors(tmp_path / "run", out)


def test_weights_of_others_are_not_replaced(alone: None, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = saved(tmp_path / "run", Model())
    (tmp_path / "out").mkdir()
    state.pop("head.weight")
    save_file(state, tmp_path / "out" / ONE, metadata={"format": "pt"})
    before = (tmp_path / "out" / ONE).read_bytes()
    with pytest.raises(UsageError, match="which partc did not write"):
        partc.export_safetensors(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / ONE).read_bytes() == before


def flip(run: Path) -> None:
    file = run / "step-00000001" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def forget(run: Path) -> None:
    rewrite(run / "step-00000001", lambda fields: fields.pop("model"))


def strange(run: Path) -> None:
    rewrite(run / "step-00000001", lambda fields: fields["model"]["names"].append("other"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("damage", "kind", "told"),
    [
        (flip, LoadError, "missing or damaged"),
        (forget, RunError, "does not say which names"),
        (strange, LoadError, "lacks model/other"),
        (lambda run: (run / "step-00000001" / "checkpoint.json").unlink(), LoadError, "has no"),
    ],
)
def test_what_is_damaged_is_refused_and_nothing_written(
    alone: None, tmp_path: Path, damage: Any, kind: type[PartcError], told: str
) -> None:
    saved(tmp_path / "run", Model())
    damage(tmp_path / "run")
    with pytest.raises(kind, match=told):
        partc.export_safetensors(tmp_path / "run", tmp_path / "out")
    assert os.listdir(tmp_path) == ["run"]


def test_a_folder_of_weights_is_no_checkpoint_and_names_of_experts_are_told(
    alone: None, tmp_path: Path
) -> None:
    saved(tmp_path / "run", Model())
    out = partc.export_safetensors(tmp_path / "run", tmp_path / "out")
    with pytest.raises(LoadError, match=r"It has weights alone: stage\.load_full"):
        partc.export_safetensors(out, tmp_path / "again")
    hub = Matched({}, ["layers.0.experts.down_proj"], ["layers.0.moe.experts.3.w2.weight"])
    with pytest.raises(LoadError, match="save_original_format=False"):
        check_names(hub)


def test_a_stage_in_another_dtype_is_saved_in_it(alone: None, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    program = partc.compile(nn.Linear(8, 8), "dp=1", x, loss=mean_square, plan="ddp")
    stage = program.module()
    before = stage.full_state_dict()
    partc.save_checkpoint(tmp_path / "run", stage.to(torch.bfloat16), step=1)
    assert partc.load_checkpoint(tmp_path / "run", program.module()) == 1
    found = content(partc.export_safetensors(tmp_path / "run", tmp_path / "out"))
    assert is_same(found, {name: x.to(torch.bfloat16) for name, x in before.items()})


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def killed(run: Path, out: Path, at: int) -> bool:
    """Whether a process was killed just before the ``at``-th time that it makes something durable,
    or gives it its name.
    """
    process = os.fork()
    if process == 0:
        count = 0

        def before(act: Any) -> Any:
            def counted(*arguments: Any) -> Any:
                nonlocal count
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return act(*arguments)

            return counted

        try:
            os.fsync, os.rename = before(os.fsync), before(os.rename)
            partc.export_safetensors(run, out, max_shard_size=200)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


def test_a_killed_export_leaves_the_earlier_one(alone: None, tmp_path: Path) -> None:
    saved(tmp_path / "run", Model())
    out = partc.export_safetensors(tmp_path / "run", tmp_path / "out")
    before, at = content(out), 1
    while killed(tmp_path / "run", out, at):
        assert os.listdir(out) == [ONE]
        assert is_same(content(out), before)
        at += 1
    assert at > 4
    assert is_same(content(out), before)
    assert INDEX in os.listdir(out)
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_a_dtype_that_the_format_does_not_know_is_refused(alone: None, tmp_path: Path) -> None:
    saved(tmp_path / "run", Model(extra=torch.complex128))
    with pytest.raises(RunError, match=r"no word for its dtype, torch\.complex128"):
        partc.export_safetensors(tmp_path / "run", tmp_path / "out")
    assert os.listdir(tmp_path) == ["run"]


def test_sizes() -> None:
    given = {"5GB": 5 * 10**9, "1.5 kb": 1500, "2GiB": 2**31, 77: 77, "100": 100}
    assert [num_bytes(each, "") for each in given] == [*given.values()]
    for wrong in ("", "GB", "0", "-1", "5XB", "0.1", True, None, 0):
        with pytest.raises(UsageError, match="no size of a file"):
            num_bytes(wrong, "max_shard_size=")
    assert dealt_out({}, 5) == [[]]
    assert dealt_out({"a": 5, "b": 5, "c": 6}, 5) == [["a"], ["c"], ["b"]]


def peak_of(act: Any) -> int:
    """The most bytes that an act adds to this process's memory, files that it maps apart."""

    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(each.split()[1]) for each in lines if each.startswith("RssAnon"))

    peaks, done = [now()], threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            peaks.append(now())

    thread = threading.Thread(target=watch)
    thread.start()
    act()
    done.set()
    thread.join()
    return max(peaks) - peaks[0]


class Deep(nn.Module):
    """32 layers of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sharded(folder: Path) -> None:
    x = torch.randn(4, 1000)
    stage = partc.compile(Deep(), "dp=4", x, plan="fsdp").module()
    partc.save_checkpoint(folder, stage, step=1)


def loaded(folder: Path) -> tuple[int, int]:
    """The memory that a load takes, and that which the rank's pieces have taken before."""
    with torch.device("meta"):
        model = Deep()
    stage = partc.compile(model, "dp=4", torch.randn(4, 1000), plan="fsdp").module()
    stage.load_full(folder)
    elements = sum(piece.numel() for _, piece in stage.pieces().values())
    return peak_of(lambda: stage.load_full(folder)), elements


@pytest.mark.exhaustive
def test_neither_an_export_nor_a_load_has_the_model_in_memory(world: Any, tmp_path: Path) -> None:
    world.run(sharded, tmp_path / "run")
    out = tmp_path / "out"
    peak = peak_of(lambda: partc.export_safetensors(tmp_path / "run", out, max_shard_size="40MB"))
    assert peak < 24 * MB  # of 128: a tensor, a piece of it, and what the allocator keeps
    for taken, elements in world.run(loaded, out):
        assert elements == 32 * 1000 * 1000 / 4
        assert taken < 12 * MB
