"""Errors a user can act on: each says where, what, why and what to do, and has a stable code."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar


class PartcError(Exception):
    """An error that a user can act on, in four parts; a mistake inside partc is an AssertionError.

    >>> print(PartcError(where="w1 (m.py:4)", what="no cut by tp=2", why="7 is odd", do="Pad it."))
    w1 (m.py:4): no cut by tp=2 (7 is odd). Pad it.
    """

    code: ClassVar[str] = "PTC000"

    def __init__(self, *, where: str, what: str, why: str, do: str) -> None:
        """Keep the four parts; `why` may be empty where `what` says it all."""
        self.where, self.what = where.strip(), what.strip()
        self.why, self.do = why.strip(), do.strip()
        super().__init__(_sentence(self.where, self.what, self.why, self.do))

    def __reduce__(self) -> tuple[Callable[[], "PartcError"], tuple[()]]:
        """Pickle the four parts, since exceptions with keyword arguments cannot be pickled else.

        A child process passes its error to its parent as a pickle.
        """
        return partial(type(self), where=self.where, what=self.what, why=self.why, do=self.do), ()

    def as_dict(self) -> dict[str, str]:
        """The code and the four parts, for `--json`."""
        parts = {"where": self.where, "what": self.what, "why": self.why, "do": self.do}
        return {"code": self.code, **parts}


class TraceError(PartcError):
    """The model with its loss cannot be traced into one graph for these inputs."""

    code = "PTC010"
    made: ClassVar[list["TraceError"] | None] = None  # while code of the user's may catch them

    def __init__(self, *, where: str, what: str, why: str, do: str) -> None:
        super().__init__(where=where, what=what, why=why, do=do)
        if TraceError.made is not None:
            TraceError.made.append(self)


class PlanError(PartcError):
    """A plan cannot be read, contradicts itself, or asks for what the model or mesh cannot do."""

    code = "PTC020"


class MemoryLimitError(PlanError):
    """A step needs more memory than a rank has."""

    code = "PTC021"


class ShardingError(PartcError):
    """A tensor cannot be sharded as the plan or an op asks."""

    code = "PTC030"


class RuleError(PartcError):
    """An op's sharding rule is malformed or does not hold."""

    code = "PTC040"


class CheckError(PartcError):
    """A generated program, or its result, differs from the model on a single device."""

    code = "PTC050"


class LoadError(PartcError):
    """A saved program, plan or state dict is damaged or was made for something else."""

    code = "PTC060"


class RunError(PartcError):
    """A generated program failed, or was started with wrong ranks, devices or backend."""

    code = "PTC070"


class TransferError(RunError, RuntimeError):
    """Ranks did not meet in a transfer: one has ended, has failed, or runs something else.

    Also a RuntimeError, which torch raises there.
    """

    code = "PTC071"


class UsageError(PartcError):
    """An argument of a command or of a call is unknown or impossible."""

    code = "PTC080"


EXPLANATIONS: dict[str, str] = {
    "PTC000": """\
PTC000: a failure that belongs to no narrower class.
The message itself is the whole explanation. If its advice does not help, it is worth a bug report:
run the command again with --json and attach what it prints.""",
    "PTC010": """\
PTC010: tracing. partc needs the whole training step as one graph, so the model runs once on fake
tensors that have shapes but no values.
Usual causes: Python control flow that depends on tensor values (`if x.sum() > 0`, `.item()`), an
output size that depends on data (`nonzero`, boolean masks), a custom op without a fake kernel, or
a loss that is not one scalar.
What to do: go to the source line in the message. Replace the branch by `torch.where`, give the op
a fake kernel with `torch.library.register_fake`, or move that part out of the compiled model.""",
    "PTC020": """\
PTC020: plan. A plan is a TOML file that holds every decision; it may pin some and leave the rest.
Usual causes: a misspelt parameter pattern or axis, two pins that exclude each other, more stages
than blocks, a batch that the data axes and microbatches do not divide, or too little memory.
What to do: correct or delete the named line (the search fills in what is missing), or compile with
plan="auto" and edit the plan that comes out.
For example:
  preset = "fsdp+megatron"
  microbatches = 4
  schedule = "1f1b"
  stages = ["blocks.4"]
  [params]
  "blocks.*.up.weight" = { tp = 0 }""",
    "PTC021": """\
PTC021: memory. The predicted peak of a rank's program is above memory_bytes.
Usual causes: optimizer states or parameters that are not sharded, large microbatches, many of them
in flight, or activations that are kept where blocks could be computed again.
What to do: shard more (plan fsdp, more tp or pp ranks), take more microbatches, set
recompute = "block", or raise memory_bytes; plan="auto" takes the fastest plan that fits.""",
    "PTC030": """\
PTC030: sharding. A dim is cut by a mesh axis only if the op allows it and the size divides.
Usual causes: an odd vocabulary or hidden size, fewer attention heads than tensor-parallel ranks,
one mesh axis used for two dims of a tensor, or an unfinished sum where the whole value is needed.
What to do: pad the dim, use a smaller axis, cut another dim, or leave the tensor out of the
plan.""",
    "PTC040": """\
PTC040: rule. A rule says in letters how an op may be cut: `mm: "mk,kn->mn"`.
Usual causes: as many operands in the rule as the op has not, a letter that stands for two sizes,
two rules for one op, or a rule that its proof (cut, run, recombine, compare) disproved.
What to do: correct the rule in the named file, mark a dim that may not be cut with `!`, or remove
the rule: the op is then discovered by experiment, or replicated.""",
    "PTC050": """\
PTC050: check. The program was examined or run, and is not equivalent to the model. partc hands
out no such program.
Usual causes: a custom pass, schedule or rule that drops a wait or a reduction, a hand-edited
source, or a model whose result depends on randomness or on batch statistics.
What to do: compile without your own passes (disable=...) to find the one at fault, and look at what
it makes of the graph (dump=...). If nothing of it is yours, it is our bug: report it with the
plan.""",
    "PTC060": """\
PTC060: load. Saved programs carry a fingerprint of model, mesh, plan and schema, and a digest of
each source.
Usual causes: the model changed after compiling, a source edited by hand, an incomplete copy, a
newer partc or torch, or a state dict with missing or extra names.
What to do: compile again from the saved plan (`plan="build/plan.toml"`); for a state dict compare
the names that the message lists.""",
    "PTC070": """\
PTC070: run. A rank program did not start or did not finish.
Usual causes: torchrun with another number of processes than the mesh has, a missing backend, a
batch of another shape than the example inputs, a peer that died, or a device out of memory.
What to do: read the first failing rank's message, the others follow from it; start as many
processes as the plan's mesh has ranks; `partc check` tells whether the files are whole.""",
    "PTC071": """\
PTC071: transfer. Ranks did not meet in a transfer: one has ended, has failed, or runs something
else.
Usual causes: a script that failed on another rank, one batch more on some ranks, a call of all
ranks behind `if rank == 0`, or a process that was killed.
What to do: mend what the named rank printed; give every rank as many batches
(model.loader(dataset), or DataLoader(drop_last=True)); make calls of all ranks on every rank.""",
    "PTC080": """\
PTC080: usage. An argument of a command or a call is unknown, misspelt or of the wrong kind.
Usual causes: a misspelt name (the message lists close ones), a model that is not
`package.module:callable` or `hf:<config>`, or an output folder that holds something else.
What to do: take a name from the list, or see `partc <command> --help`.""",
}


def explain(code: str) -> str:
    """The paragraph that explains an error code such as "PTC030" (or "ptc030").

    UsageError if there is no such code.
    """
    text = EXPLANATIONS.get(code.strip().upper())
    if text is None:
        known = ", ".join(EXPLANATIONS)
        raise UsageError(where=code, what="no such error code", why="", do=f"Known are {known}.")
    return text


def visible(text: str) -> str:
    """The text without characters that a terminal obeys: escapes, or marks that turn lines round.

    Names of models and files may come from strangers.

    >>> visible("model \\x1b[2J")
    'model \\\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _sentence(where: str, what: str, why: str, do: str) -> str:
    """Join the parts that are not empty as `where: what (why). do`."""
    claim = what.rstrip(".") + (f" ({why.rstrip('.')})" if why else "")
    return visible((f"{where}: " if where else "") + f"{claim}." + (f" {do}" if do else ""))
