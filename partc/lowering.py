"""The compiler in order: the table of all passes, and the slices of it that a compile runs.

Rows with ``decides`` are choices: they try on copies, or compare what machines take, and write what
they chose into the plan. All others are passes, which apply the plan and see no machine: the same
plan gives the same programs on any machine. A plan that is compiled again has all keys, so that
passes alone run.

A step is on its way from a model to programs as a ``State`` (``passes/runner.py``). A pass reads
and changes what it names; ``partc passes`` prints the table. In three places the order is not a
line: ``trace`` records again while blocks turn out unequal, a pipeline of few distinct stages is
traced again with those alone, and a program that does not fit gives way to the next best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from torch import fx, nn

from partc import accounts, printing
from partc import pass_calls as calls
from partc.checks.local_graph import check
from partc.codegen.calls.tidy import tidy
from partc.collecting import no_collecting
from partc.graph import Graph
from partc.graph.folds import TracedStages
from partc.graph.given_back import hold_back, start_behind, waits_for_script
from partc.installed import RULES, load_installed
from partc.partition_given import check_given
from partc.passes.canonical.canonicalize import CANONICAL
from partc.passes.canonical.decompose_custom_ops import decompose_custom_ops
from partc.passes.canonical.dedupe_layers import Unfolded, check_plan
from partc.passes.canonical.functionalize import functionalize
from partc.passes.overlap.bucket_collectives import bucket_collectives
from partc.passes.overlap.check_compress import check_compress
from partc.passes.overlap.choose_buckets import choose_bucket_copies
from partc.passes.overlap.choose_hierarchical import choose_hierarchical
from partc.passes.overlap.code_gathers import check_compress_weights, code_gathers
from partc.passes.overlap.compress_sums import compress_sums
from partc.passes.overlap.hierarchical_all_reduce import hierarchical_all_reduce
from partc.passes.overlap.order_step import order_step
from partc.passes.overlap.overlap_clock import choose_overlap_clock
from partc.passes.overlap.share_gathers import share_gathers
from partc.passes.overlap.spare_weights import spare_weights
from partc.passes.overlap.stack_sums import stack_sums
from partc.passes.own_passes import with_own
from partc.passes.recompute.choose import recompute
from partc.passes.runner import Pass, State, Table, When, run
from partc.passes.shard.apply_preset import complete
from partc.passes.shard.check_given_out import check_given_out
from partc.passes.shard.check_islands import check_islands, has_islands
from partc.passes.shard.choose_microbatches import choose_microbatches
from partc.passes.shard.count_whole import count_whole
from partc.passes.shard.draw_whole import draw_whole
from partc.passes.shard.find_batch import find_batch
from partc.passes.shard.find_rows import find_rows
from partc.passes.shard.fuse_loss import fuse_loss
from partc.passes.shard.insert_collectives import insert_collectives
from partc.passes.shard.microbatches import count_targets
from partc.passes.shard.split_bias import fuse_bias, split_bias
from partc.passes.stages.choose_stages import choose_schedule, choose_stages, is_pipeline
from partc.passes.stages.schedule_stages import stage_ways
from partc.passes.stages.split_stages import split_stages
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.trace.capture import Objective
from partc.trace.record import Source
from partc.trace.scan_blocks import no_calls
from partc.wrong_calls import known_arguments

AUTO = When("auto", lambda s: True)  # a search runs it, and nothing else does
FOLDED = When("many blocks", lambda s: bool(s.made.get("fold")))
KEPT = When("pipelines", lambda s: s.made.get("kept") is not None)
PIPELINES = When("pipelines", lambda s: is_pipeline(s.plan, s.mesh))
STAGES = When("pipelines", lambda s: bool(s.plan.stages))
PHASED = When("pipelines", lambda s: bool(s.made.get("phased")))
SPREAD = When("pipelines", lambda s: s.graph.kept is not None)
ONE_STAGE = When("one stage", lambda s: not s.made.get("phased"))
MICROBATCHES = When("microbatches", lambda s: s.plan.microbatches > 1)
WHOLE_DRAWS = When("whole draws", lambda s: s.plan.random == "single-device")
LOCAL = When("local batch norm", lambda s: s.plan.batch_norm == "local")
COMPRESSED = When("compress", lambda s: s.plan.compress is not None)
GRADIENTS = When("compress", lambda s: COMPRESSED.holds(s) and s.graph.loss is not None)
CODED = When("compress_weights", lambda s: s.plan.compress_weights is not None)
GIVEN_OUT = When("script's loss", lambda s: waits_for_script(s.graph))
UNEVEN = When("uneven", lambda s: s.plan.uneven is not None)
ISLANDS = When("islands", lambda s: has_islands(s.plan, s.mesh))
PIECES = When("pieces", lambda s: s.plan.overlap_pieces > 1)

RECORDED, JOINT, PLAN, LOCAL_GRAPH = "recorded graph", "joint graph", "plan", "local graph"
SCHEDULED, PRINTED = "scheduled graph", "printed graph"
EVENTS, MEMORY, SOURCE, COST = "events", "memory", "source", "cost"

WIDTH, WHY = 120, " " * 9  # of the table as text, and how far its reasons are indented
LOOPS = (
    "Rows that leave `plan: NAME` are choices: they compare times on the machines and write NAME",
    "into the plan, and do nothing where the plan has it. All others apply the plan and see no",
    "machine. The order is a line but for three loops:",
    "- record to confirm_folds run again while blocks that were left out turn out unequal;",
    "- a pipeline of few distinct stages begins again at record, behind keep_stages, with those;",
    "- take_turns to account_step (split_stages to account_pipeline) run for the fastest order of",
    "  the step first, and where that does not fit into memory, for the next best.",
    "`partc compile --disable NAME` leaves out what is optional.",
)

PASSES = (
    # a model becomes one graph of forward and backward
    Pass(calls.spare_blocks, "model", "equal blocks need not each be recorded", FOLDED,
         on_graph=False),
    Pass(calls.record, RECORDED, "every op with its module, line and phase; again while blocks "
         "that were left out turn out unequal"),
    Pass(decompose_custom_ops, RECORDED, "programs import nothing but torch"),
    Pass(functionalize, RECORDED, "writes in place become new values, which can be moved and cut; "
         "calls that nobody reads go; buffers that the step does not change are no results"),
    Pass(calls.keep_known_buffers, RECORDED, "masks and frequencies are known when compiling"),
    Pass(calls.dedupe_layers, RECORDED, "middle blocks of a long row of equal blocks go, backward "
         "included, as far as spare_blocks left them: 80 layers compile as fast as 8", FOLDED),
    Pass(calls.confirm_folds, RECORDED, "stages were left out on trust", KEPT),
    *CANONICAL,
    # the plan is completed
    Pass(find_batch, PLAN, "samples do not mix along the batch, which need not be dim 0",
         on_graph=False),
    Pass(calls.choose_plan, PLAN, "the fastest step that fits; runs place_on_mesh to recompute on "
         "copies", AUTO, on_graph=False, machines=True),
    Pass(calls.place_on_mesh, JOINT, "line 1 of the graph has the mesh, whose axes shardings will "
         "name"),
    Pass(split_bias, JOINT, "a product whose inner dim is cut is summed before the bias"),
    Pass(fuse_loss, JOINT, "the backward's two calls for a cross entropy become partc's own "
         "cross_entropy_grad, which may write over log_softmax: one tensor of the scores' size is "
         "left of three, and a cut vocabulary needs no gather", optional=True),
    Pass(find_rows, PLAN, "an island that is faster computes more microbatches, which are runs of "
         "rows", UNEVEN, on_graph=False),
    Pass(complete, PLAN, "a preset's words become entries for every parameter and input",
         on_graph=False),
    Pass(check_compress, PLAN, "rounded sums change a step's numbers: allowed, and where they are "
         "built, or refused", COMPRESSED, on_graph=False),
    Pass(check_compress_weights, PLAN, "rounded weights change a step's numbers: allowed, and "
         "where they are built, or refused", CODED, on_graph=False),
    Pass(choose_microbatches, PLAN, "an island takes as many microbatches as its machines are fast",
         UNEVEN, on_graph=False, machines=True),
    Pass(check_islands, PLAN, "copies of the model that train apart are another training: allowed, "
         "or refused", ISLANDS, on_graph=False),
    Pass(check_given_out, PLAN, "a script that computes the loss needs all results at once: no "
         "turns, or refused", GIVEN_OUT, on_graph=False),
    Pass(choose_schedule, PLAN, "1f1b unless the plan says more", PIPELINES, on_graph=False,
         decides="schedule"),
    Pass(choose_stages, PLAN, "stages cut evenly by cost", PIPELINES, on_graph=False,
         decides="stages"),
    Pass(calls.keep_stages, PLAN, "of many layers: those stages that stand for all, with which "
         "all begins again at record", PIPELINES, on_graph=False),
    Pass(calls.assign_stages, JOINT, "every call belongs to a stage, or to all", STAGES),
    Pass(calls.lay_out, JOINT, "stages hold different values; microbatches are an axis in time"),
    Pass(draw_whole, JOINT, "numbers that no plan changes are drawn whole", WHOLE_DRAWS),
    Pass(count_targets, JOINT, "an average's count is known before the scores are", MICROBATCHES),
    Pass(calls.use_local_statistics, PLAN, "later microbatches have not run yet", MICROBATCHES,
         on_graph=False),
    Pass(calls.check_statistics, PLAN, "one value per channel has no variance", LOCAL,
         on_graph=False),
    # the graph of all ranks becomes that of one
    Pass(calls.propagate, JOINT, "a sharding for every value as it is computed with, by rules and "
         "bytes; a call that no axis may cut as it stands is opened into simpler calls"),
    Pass(insert_collectives, LOCAL_GRAPH, "one rank's calls on parameters as they are stored and "
         "inputs as they are given; transfers where shardings differ, sums over microbatches, "
         "copies (clone) where a kernel asks for strides"),
    Pass(hold_back, LOCAL_GRAPH, "buffers are written before a step waits for the script's loss",
         GIVEN_OUT),
    Pass(fuse_bias, LOCAL_GRAPH, "where nothing was summed, product and bias are one call",
         optional=True),
    Pass(count_whole, LOCAL_GRAPH, "ranks along the axis that cuts the vocabulary have the same "
         "targets: each counts them, and no sum over that axis is needed"),
    Pass(stack_sums, LOCAL_GRAPH, "small sums that do not wait for each other share a transfer: "
         "those of a batch norm's backward", optional=True),
    Pass(recompute, LOCAL_GRAPH, "the backward computes again what is cheaper than keeping it",
         optional=True),
    Pass(check_plan, LOCAL_GRAPH, "what the plan says of one block holds for those left out"),
    Pass(spare_weights, LOCAL_GRAPH, "no weight is gathered for a backward that reads its sizes "
         "alone", PIPELINES, name="spare_weights_of_stages"),
    Pass(calls.spread_params, PLAN, "the plan names the parameters of every stage", SPREAD,
         on_graph=False),
    # transfers start early and are waited for late
    Pass(share_gathers, LOCAL_GRAPH, "outside of blocks, forward and backward read one "
         "gathered weight (the head's, the last norm's)", ONE_STAGE,
         optional=True),
    Pass(spare_weights, LOCAL_GRAPH, "no weight is gathered for a backward that reads its sizes "
         "alone: the first convolution's, a layer norm's bias", ONE_STAGE),
    Pass(choose_hierarchical, PLAN, "between which axes slow links lie, and from how many bytes on "
         "they matter", ONE_STAGE, on_graph=False, decides="hierarchical"),
    Pass(hierarchical_all_reduce, LOCAL_GRAPH, "slow links carry only the piece of one machine",
         ONE_STAGE, optional=True),
    Pass(order_step, PLAN, "in how many pieces blocks are computed, in how many parts their "
         "gradients leave: take_turns to overlap_collectives run on copies, the fastest is taken",
         ONE_STAGE, on_graph=False, name="choose_pieces_and_parts", decides="overlap_pieces"),
    Pass(stage_ways, PLAN, "the same for pipelines; also the order of schedule=\"auto\", which "
         "stages sum gradients early, how many messages are under way", PHASED, on_graph=False,
         name="choose_order_and_pieces", decides="overlap_pieces"),
    Pass(calls.take_turns, LOCAL_GRAPH, "one piece of a block computes while another's sum is on "
         "its way", PIECES),
    Pass(split_stages, "stage graphs", "each pipeline rank runs its own part; what all "
         "microbatches share runs once, before them or after them", PHASED),
    Pass(choose_hierarchical, PLAN, "as for one stage, once stages are apart", PHASED,
         on_graph=False, name="choose_stage_hierarchy", decides="hierarchical"),
    Pass(hierarchical_all_reduce, "stage graphs", "as for one stage, once stages are apart", PHASED,
         optional=True, name="hierarchical_per_stage"),
    Pass(choose_bucket_copies, PLAN, "to copy a large tensor takes longer than to start a transfer",
         on_graph=False, decides="bucket_copy_mb"),
    Pass(bucket_collectives, LOCAL_GRAPH, "each start costs time: small transfers share one",
         optional=True),
    Pass(compress_sums, LOCAL_GRAPH, "a slow link carries fewer bytes: sums are rounded, and what "
         "that loses is sent in the next step", GRADIENTS),
    Pass(code_gathers, LOCAL_GRAPH, "a slow link carries fewer bytes: weights are rounded when "
         "they are gathered", CODED),
    Pass(calls.place_waits, SCHEDULED, "a transfer of a computed value starts right behind it, a "
         "gather of weights at its first reader; each is waited for where its result is read"),
    Pass(choose_overlap_clock, PLAN, "how long a transfer takes, in FLOPs: as many are put beside "
         "it", PIECES, on_graph=False, decides="flops_per_byte"),
    Pass(calls.overlap_collectives, SCHEDULED, "transfers start first in their block, and weight "
         "gradients run beside them", optional=True),
    Pass(start_behind, SCHEDULED, "no transfer is under way while a step waits for the script's "
         "loss, and perhaps is dropped", GIVEN_OUT),
    Pass(tidy, PRINTED, "calls that nobody reads go, calls that are one in torch become it; from "
         "here on the calls are those that are printed (the text may join, and write in place)"),
    Pass(calls.repeat_stages, PRINTED, "stages that were left out are like those that were not",
         PHASED),
    Pass(calls.choose_backend, PLAN, "programs have the text of one library: gloo's sums are "
         "scattered in other ways than NCCL's", on_graph=False, decides="backend"),
    # nothing is printed that is not proved
    Pass(check, PRINTED, "changes nothing: shapes, layouts, sums and waits are proved, or no "
         "program comes out", ONE_STAGE),
    Pass(calls.check_stages, PRINTED, "the same for each distinct stage", PHASED),
    Pass(calls.record_events, EVENTS, "predictions need no tensors", ONE_STAGE, on_graph=False),
    Pass(calls.record_stage_events, EVENTS, "of each distinct stage", PHASED, on_graph=False),
    Pass(calls.choose_messages, PLAN, "gloo's collectives copy what messages need not",
         on_graph=False, decides="messages"),
    # text
    Pass(printing.lay_islands, SOURCE, "how copies of the model that train apart meet is text that "
         "follows from the plan", ISLANDS, on_graph=False),
    # what fits into memory is decided here
    Pass(accounts.account_step, MEMORY, "what the program will hold, call by call: if that does "
         "not fit, the next best of take_turns to here", ONE_STAGE, on_graph=False, machines=True),
    Pass(accounts.account_pipeline, MEMORY, "the same for every pipeline rank, by the actions of "
         "its schedule", PHASED, on_graph=False, machines=True),
    Pass(printing.print_step, SOURCE, "blocks as loops, each call of the checked graph once; "
         "weights of a block are gathered while the block before it runs; read back by an "
         "allow-list",
         ONE_STAGE, on_graph=False),
    Pass(printing.print_pipeline, SOURCE, "one file for pipeline ranks that do the same", PHASED,
         on_graph=False),
    Pass(printing.cost_step, COST, "the printed program runs on tensors without data: its peak "
         "confirms the account", ONE_STAGE, on_graph=False,
         machines=True),
    Pass(printing.cost_pipeline, COST, "the same for every pipeline rank", PHASED, on_graph=False,
         machines=True),
)  # fmt: skip


def table(*, left_out: Sequence[str] = (), keep_texts: bool = False) -> Table:
    """The passes in force: partc's, and those of users' packages; UsageError where one that is to
    be left out does not exist or is needed. Sharding rules of packages are loaded beside them.
    """
    load_installed(RULES, "rule")
    found = with_own(PASSES).without(*left_out)
    return Table(found.passes, found.left_out, keep_texts)


def begin(graph: Graph, plan: Plan, rows: Table | None = None, *, strict: bool = False) -> State:
    """The state of a joint graph, whose mesh is that of all ranks, and a plan for it."""
    return State(graph, plan, graph.mesh, rows or table(), made={"strict": strict})


# a model to its joint graph ---------------------------------------------------------------------
def trace(
    model: nn.Module, inputs: Any, loss: Objective | None = None, *,
    fold: bool = False, kept: TracedStages | None = None,
) -> Graph:  # fmt: skip
    """The joint graph of ``loss(model, *inputs)`` and its backward; the model is left as it was.

    Without a loss the model's own result is the loss (or has one as ``.loss``); under
    ``torch.no_grad()`` it is then the forward alone, with every tensor of the result by name.
    With ``fold`` the middle of a stack of equal blocks is left out; ``graph.folds`` says which.
    ``kept`` leaves out what a folded graph has shown to be equal to the rest; Unfolded if the
    backward tells it apart.
    """
    return traced(Source.of(model, inputs, loss), table(), fold=fold, kept=kept).graph


@no_collecting()
def traced(source: Source, rows: Table, *, fold: bool, kept: TracedStages | None) -> State:
    """The state of a model's joint graph, on no mesh yet; ``fold`` and ``kept`` as for trace."""
    left_out = kept.left_out if kept else ()
    if path := no_calls(source.model, left_out):
        raise Unfolded(path)
    made = {"source": source, "left_out": left_out, "fold": fold, "kept": kept}
    state = State(Graph(fx.Graph()), Plan(), Mesh(()), rows, made=made)
    run(state, "spare_blocks")
    while True:
        try:
            run(state, "record", "confirm_folds")
            return run(state, CANONICAL[0].name, CANONICAL[-1].name)
        except Unfolded as unequal:
            if kept is not None:
                raise
            skipped = state.made["left_out"]
            state.made["left_out"] = [fold for fold in skipped if not fold.covers(str(unequal))]


# a joint graph to one rank's --------------------------------------------------------------------
def staged_plan(state: State) -> State:
    """The plan completed, with the stages and the schedule of a pipeline; biases stand apart."""
    return run(state, "place_on_mesh", "choose_stages")


def to_local_graph(state: State) -> State:
    """The plan completed, and the graph that of one rank, its waits not yet placed."""
    staged_plan(state)
    return run(state, "assign_stages", "recompute")


@known_arguments
def partition(graph: Graph, plan: Plan, *, strict: bool = False) -> tuple[Plan, Graph]:
    """Complete a plan for a traced graph, whose ``mesh`` is set, and make the local graph of one
    rank that is printed.
    """
    check_given(graph, plan)
    state = next(order_step(to_local_graph(begin(graph, plan, strict=strict))))
    run(state, "tidy")
    return printing.noted_pieces(state.plan, [state.graph]), state.graph


def described(rows: Table) -> Iterator[str]:
    """The table as lines of text, two for a pass: number, name, which steps take it, what is there
    behind it, and its file; below that why it is there. Then where the order is not a line.

    Of a choice the field of the plan stands there that it writes: ``plan: hierarchical``.
    """
    wide = max(len(each.name) for each in rows.passes)
    yield f"{'':>3}  {'pass':{wide}} {'only':16} {'leaves':20} where"
    for number, each in enumerate(rows.passes, start=1):
        may = "; left out" if each.name in rows.left_out else "; optional" * each.optional
        out = f"plan: {each.decides}" if each.decides else each.out
        yield f"{number:3}  {each.name:{wide}} {each.when.word:16} {out:20} {each.where}{may}"
        yield from wrap(each.why, WIDTH, initial_indent=WHY, subsequent_indent=WHY)
    yield ""
    yield from LOOPS
