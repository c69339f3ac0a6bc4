"""What a program says of the data that its ranks read: methods of ``Program``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partc.wrong_calls import check_flag, check_whole_number, known_arguments

if TYPE_CHECKING:
    from partc.data.order import Last
    from partc.data.sampler import RowSampler
    from partc.data.share import Batch
    from partc.program import Program


def data_world(program: Program) -> int:
    """The number of pieces that the plan cuts the batch into, or the batches of all islands:
    DistributedSampler's ``num_replicas``.
    """
    from partc.program.reading import division_of

    return division_of(program).num_batches * division_of(program).world


@known_arguments
def data_rank(self: Program, rank: int) -> int:
    """The number of the piece that a rank computes: DistributedSampler's ``rank``.

    Ranks that differ along ``tp`` or ``pp`` have the same.
    """
    from partc.program.reading import division_of

    self.role_of(rank)
    return division_of(self).rank(rank)


@known_arguments
def sampler(
    self: Program,
    dataset: Any,
    rank: int | None = None,
    *,
    seed: int = 0,
    shuffle: bool = True,
    last: Last = "drop",
    batch: Batch | None = None,
    rows_per_step: int | None = None,
) -> RowSampler:
    """The rows that one rank reads in each step, for a DataLoader's ``batch_sampler``.

    With workers, take ``Stage.loader``: it knows which batches the script has taken.

    Args:
        dataset: or the number of its rows.
        rank: None: this process's.
        seed: of the order; the same on all ranks.
        shuffle: whether every epoch has an order of its own.
        last: ``"drop"``, ``"partial"`` or ``"next"``: rows that fill no step at the end of an
            epoch are left out, are a smaller step, or begin the next epoch.
        batch: ``"local"``: the rank's piece of the batch; ``"global"``: all of it; None: what
            the program's step takes.
        rows_per_step: rows of all data ranks together; None: as many as were compiled.

    Raises:
        UsageError: the dataset is smaller than one step, or the rows cannot be divided among
            the ranks.
    """
    from partc.data.order import Order
    from partc.data.sampler import RowSampler
    from partc.program.reading import num_rows, rank_or_own, rows_of

    check_flag(shuffle, "sampler(shuffle=...)")
    if rows_per_step is not None:
        check_whole_number(rows_per_step, "sampler(rows_per_step=...)", 1)
    share = rows_of(self, rank_or_own(rank), batch, rows_per_step, last)
    order = Order(num_rows(dataset), share.per_step, shuffle, last)
    return RowSampler(order, share, seed, dataset=None if isinstance(dataset, int) else dataset)
