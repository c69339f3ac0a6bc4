"""The model under PyTorch's own layouts: DDP, FSDP2, DTensor tensor and sequence parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Side, full_grad_norm, rows_of
from benchmarks.workload import Size, build_batch, build_model, loss_of

Styles = dict[str, Any]
Build = Callable[[Size], Side]


def ddp(size: Size) -> Side:
    """DistributedDataParallel over all ranks, gradients as views of its buckets."""
    model = DistributedDataParallel(build_model(size), gradient_as_bucket_view=True)
    return _side("DDP", model, _rows(size, dist.get_rank(), dist.get_world_size()))


def fsdp(size: Size, *, prefetch: bool) -> Side:
    """FSDP2 over all ranks, one group per layer; ``prefetch`` gathers the next layer ahead."""
    model = build_model(size)
    _fully_shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), prefetch)
    name = "FSDP2 prefetch" if prefetch else "FSDP2"
    return _side(name, model, _rows(size, dist.get_rank(), dist.get_world_size()))


def tensor_parallel(size: Size, *, prepared: bool, cut_loss: bool) -> Side:
    """DTensor tensor parallelism over all ranks.

    ``prepared`` adds PrepareModuleInput, so that the input gradients of one block's linears are
    added before they are reduced; ``cut_loss`` leaves the logits cut for ``loss_parallel``.
    """
    model = build_model(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _parallelize(model, mesh, _block_styles(prepared), _ends(cut_loss))
    name = "TP" + " prepared" * prepared + " loss" * cut_loss
    return _side(name, model, build_batch(size), cut_loss)


def sequence_parallel(size: Size, *, cut_loss: bool) -> Side:
    """DTensor tensor parallelism with norms and residuals cut along the sequence."""
    model = build_model(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _parallelize(model, mesh, _sequence_block_styles(), _sequence_ends(cut_loss))
    return _side("TP+SP" + " loss" * cut_loss, model, build_batch(size), cut_loss)


def fsdp_tensor_parallel(size: Size, *, strong: bool) -> Side:
    """FSDP2 over the outer half of the ranks, tensor parallelism over the inner two.

    ``strong`` adds prefetch, PrepareModuleInput and ``loss_parallel``.
    """
    num_dp = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (num_dp, 2), mesh_dim_names=("dp", "tp"))
    model = build_model(size)
    _parallelize(model, mesh["tp"], _block_styles(strong), _ends(strong))
    _fully_shard(model, mesh["dp"], strong)
    name = "FSDP2 x TP" + " prefetch prepared loss" * strong
    return _side(name, model, _rows(size, mesh.get_local_rank("dp"), num_dp), strong)


def _rows(size: Size, index: int, num: int) -> tuple[Tensor, Tensor]:
    ids, targets = build_batch(size)
    return rows_of(ids, index, num), rows_of(targets, index, num)


def _side(
    name: str, model: nn.Module, batch: tuple[Tensor, Tensor], cut_loss: bool = False
) -> Side:
    def forward_backward() -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        return loss

    def forward_backward_cut() -> Tensor:
        with loss_parallel():
            return forward_backward()

    parameters = list(model.parameters())
    run = forward_backward_cut if cut_loss else forward_backward
    return Side(name, parameters, run, partial(full_grad_norm, parameters))


def _layers(model: nn.Module) -> list[Any]:
    return list(model.get_submodule("model.layers").children())


def _fully_shard(model: nn.Module, mesh: DeviceMesh, prefetch: bool) -> None:
    layers = _layers(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    if not prefetch:
        return
    root._set_unshard_async_op(True)
    for before, after in itertools.pairwise(layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def _parallelize(model: nn.Module, mesh: DeviceMesh, block: Styles, ends: Styles) -> None:
    for layer in _layers(model):
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, ends)


_COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def _block_styles(prepared: bool) -> Styles:
    styles: Styles = {name: ColwiseParallel() for name in _COLUMNS}
    styles |= {name: RowwiseParallel() for name in _ROWS}
    if prepared:
        styles |= _prepared_inputs(Replicate())
    return styles


def _prepared_inputs(given: Replicate | Shard) -> Styles:
    attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": given},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    )
    mlp = PrepareModuleInput(input_layouts=(given,), desired_input_layouts=(Replicate(),))
    return {"self_attn": attention, "mlp": mlp}


def _ends(cut_loss: bool) -> Styles:
    logits = Shard(-1) if cut_loss else Replicate()
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=logits, use_local_output=not cut_loss),
    }


def _sequence_block_styles() -> Styles:
    styles: Styles = {name: ColwiseParallel() for name in _COLUMNS}
    styles |= {
        name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in _ROWS
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return styles | _prepared_inputs(Shard(1)) | {name: SequenceParallel() for name in norms}


def _sequence_ends(cut_loss: bool) -> Styles:
    logits = Shard(-1) if cut_loss else Replicate()
    embed = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    )
    head = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=logits, use_local_output=not cut_loss
    )
    return {"model.embed_tokens": embed, "model.norm": SequenceParallel(), "lm_head": head}
