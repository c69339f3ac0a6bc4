"""What the links of a machine mean for a launch: where a node ends, and which variables its network
needs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from partc.machines.topology import Level, Topology
from partc.registry import Registry

RECORDED = 2000  # the last collectives of each rank that torch keeps, to tell where a run stood


@dataclass(frozen=True)
class Variable:
    """A variable of the environment, its value, and a line that says why it is set."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Network:
    """A kind of network between nodes.

    ``words`` are those of a level's name that tell it. ``variables`` are what NCCL needs on it.
    ``plugin``: what has to be installed beside torch; "" where nothing has to be.
    """

    words: tuple[str, ...]
    variables: tuple[Variable, ...] = ()
    plugin: str = ""


NETWORKS: Registry[Network] = Registry("network")
NETWORKS.add(
    "infiniband",
    Network(
        ("infiniband", "ib", "hdr", "ndr", "xdr"),
        (Variable("NCCL_NET", "IB", "fail where InfiniBand is missing: TCP is far slower"),),
    ),
)
NETWORKS.add(
    "roce",
    Network(("roce",), (Variable("NCCL_NET", "IB", "fail where RDMA is missing: TCP is slower"),)),
)
NETWORKS.add(
    "efa",
    Network(
        ("efa",),
        (
            Variable("FI_PROVIDER", "efa", "libfabric's provider for EFA"),
            Variable("NCCL_NET", "AWS Libfabric", "fail where the plugin is missing: TCP is slow"),
        ),
        "aws-ofi-nccl",
    ),
)
NETWORKS.add("ethernet", Network(("ethernet", "tcp")))
NETWORKS.add("other", Network(("network", "between nodes")))


def network_of(level: Level) -> str | None:
    """The network that a level's name tells, as a name in ``NETWORKS``; None for links inside of a
    node, such as NVLink.
    """
    name = level.name.lower()
    told = {name, *name.replace("-", " ").split()}
    return next((kind for kind, each in NETWORKS.items() if told & {*each.words}), None)


def devices_of_node(machine: Topology) -> int:
    """How many devices a node has: those that the levels below the first network join.

    Where no level's name tells a network, a node is what the innermost level joins.
    """
    inside = next((number for number, level in enumerate(machine.levels) if network_of(level)), 1)
    return prod(level.size for level in machine.levels[:inside])


def network_between_nodes(machine: Topology) -> str:
    """The name in ``NETWORKS`` of the innermost level that is a network; "other" without one."""
    return next(filter(None, map(network_of, machine.levels)), "other")


def variables_of(machine: Topology, network: str, interface: str) -> tuple[Variable, ...]:
    """The environment of ranks on these machines, in the order in which files set it.

    ``interface`` is the network interface over which ranks find each other, "" where libraries
    shall choose.
    """
    found: list[Variable] = []
    if machine.library == "nccl":
        found += NETWORKS[network].variables
        found += [
            Variable("NCCL_DEBUG", "WARN", "say why a connection fails"),
            Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "write the record where a rank waits"),
        ]
    found.append(
        Variable("TORCH_FR_BUFFER_SIZE", str(RECORDED), "record the last collectives of a rank")
    )
    if interface:
        for name in ("GLOO_SOCKET_IFNAME", *["NCCL_SOCKET_IFNAME"] * (machine.library == "nccl")):
            found.append(Variable(name, interface, "the interface that joins the nodes"))
    return tuple(found)
