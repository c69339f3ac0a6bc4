"""Published training runs: rows are read as they were configured, and ordered as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published import candidate_of, predict, topology
from benchmarks.published_rows import Row, rows


def row(name: str) -> Row:
    return next(each for each in rows() if each.name == name)


@pytest.mark.parametrize("each", list(rows()), ids=lambda each: each.name)
def test_rows_are_whole(each: Row) -> None:
    """Ranks and microbatches divide, and the machine has as many devices."""
    assert each.data_ranks * each.tp * each.pp == each.devices
    assert each.data_ranks * each.microbatches * each.microbatch == each.batch
    mesh = candidate_of(each).mesh(topology(each.machine, each.devices))
    assert mesh.num_ranks == each.devices


def test_published_flops_are_those_of_published_times() -> None:
    """Both papers ran 530B: their FLOP/s and seconds follow from one formula."""
    full, theirs = row("Megatron-LM 530B full"), row("Megatron-LM 530B selective")
    flops = theirs.batch * theirs.dims.model_flops_per_sequence
    assert flops / theirs.seconds / theirs.devices / 312e12 == pytest.approx(0.56, abs=0.001)
    assert full.seconds / theirs.seconds == pytest.approx(1.297, abs=0.001)


@pytest.mark.exhaustive
def test_recomputing_less_is_faster_and_holds_more() -> None:
    """The recompute study's order, on its smallest model with fewer layers."""
    selective = row("Megatron-LM 22B selective")
    small = replace(selective, dims=replace(selective.dims, layers=12))
    full = replace(small, recompute="none", sequence_parallel=False, whole_blocks=True)
    fast, slow, kept = (predict(each) for each in (small, full, replace(small, recompute="none")))
    assert kept.peer_s < fast.peer_s < slow.peer_s
    assert slow.own_bytes < fast.own_bytes < kept.own_bytes


@pytest.mark.exhaustive
def test_a_compiler_that_fuses_saves_time() -> None:
    eager = replace(
        row("torchtitan 8B on 8"), dims=replace(row("torchtitan 8B on 8").dims, layers=6)
    )
    gain = predict(eager).peer_s / predict(replace(eager, kernels="compiled")).peer_s
    assert 1.05 < gain < 1.25  # published: 1.16
