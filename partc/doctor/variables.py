"""Variables of the environment that matter to a run, and what their values mean for it.

``RULES.add("NAME", rule)`` adds one: a function of the value (None: not set) and of the rank, that
returns a finding, or None where there is nothing to say.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from partc.amounts import counted
from partc.doctor.finding import NOTE, OK, WRONG, Finding
from partc.doctor.looked_at import Here
from partc.launch.network import RECORDED, devices_of_node, network_between_nodes
from partc.registry import Registry
from partc.wrong_calls import did_you_mean

Said = tuple[str, str, str]  # state, what is found, what to do
Rule = Callable[[str | None, Here], Said | None]
RULES: Registry[Rule] = Registry("variable")
RDMA = ("infiniband", "roce", "efa")
FAMILIES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "OMP_")
RENAMED = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
}
PLAIN = (  # whose values need no opinion
    "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT", "NCCL_IB_TC", "NCCL_IB_SL",
    "NCCL_CROSS_NIC", "NCCL_NET_PLUGIN", "NCCL_NET_GDR_LEVEL", "NCCL_TOPO_FILE", "NCCL_CONF_FILE",
    "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_BUFFSIZE", "NCCL_CUMEM_ENABLE",
    "NCCL_NVLS_ENABLE", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_FR_CPP_STACK", "TORCH_FR_DUMP_DYNAMIC_FILE_NAME", "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_NAN_CHECK", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_HIGH_PRIORITY",
    "GLOO_DEVICE_TRANSPORT", "GLOO_LOG_LEVEL", "OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE",
    "OMP_DYNAMIC", "OMP_WAIT_POLICY",
)  # fmt: skip


def look_at_variables(here: Here) -> Iterator[Finding]:
    """A finding for each variable that matters, that is set or should be."""
    for name, rule in RULES.items():
        said = rule(here.variables.get(name), here)
        if said is not None:
            yield Finding(said[0], name, said[1], said[2])
    for name in sorted(here.variables):
        if name in RENAMED:
            do = f"Set {RENAMED[name]}."
            yield Finding(NOTE, name, "torch has another name for it", do)
        elif name.startswith(FAMILIES) and name not in RULES and name not in PLAIN:
            yield Finding(
                NOTE, name, f"is {here.variables[name]}, which partc does not know",
                did_you_mean(name, [*RULES, *PLAIN], 0.9),
            )  # fmt: skip


def _off(means: str, only: Callable[[Here], bool] = lambda here: True) -> Rule:
    """A switch that is right while it is off; ``means`` is what it does to a run when it is on."""

    def rule(value: str | None, here: Here) -> Said | None:
        if value is None:
            return None
        if value in ("", "0") or not only(here):
            return OK, f"is {value or 'empty'}", ""
        return WRONG, f"is {value}: {means}", "Unset it."

    return rule


def _forced(value: str | None, here: Here) -> Said | None:
    if value is None:
        return None
    do = "Unset it, unless a measurement says that it is faster here."
    return NOTE, f"is {value}; predictions are for what NCCL chooses by itself", do


def _on_rdma(here: Here) -> bool:
    """Whether the program's machine has several nodes, which RDMA joins."""
    machine = here.machine
    if machine is None or machine.num_devices <= devices_of_node(machine):
        return False
    return network_between_nodes(machine) in RDMA


def _interface(value: str | None, here: Here) -> Said | None:
    """Names of interfaces: prefixes for NCCL, ``=eth0`` for one, ``^lo`` for all others."""
    if value is None:
        return None
    known = [name for _, name in socket.if_nameindex()]
    exact = value.startswith("=")
    wanted = [each for each in value.lstrip("^=").split(",") if each]
    met = [
        name
        for name in known
        if any(name == w or (not exact and name.startswith(w)) for w in wanted)
    ]
    if value.startswith("^") or met:
        return OK, f"is {value}; this node has {', '.join(known)}", ""
    return WRONG, f"is {value}, and this node has {', '.join(known)}", "Name one of these."


def _omp(value: str | None, here: Here) -> Said | None:
    if value is None and here.ranks == 1:
        return None
    if value is None:
        do = f"Set it to {max(1, here.cores // here.ranks)}."
        return WRONG, f"is not set: each of {here.ranks} ranks takes all {here.cores} cores", do
    if not value.isdecimal():
        return WRONG, f"is {value}, which is no whole number", "Set it to 1 or more."
    text = f"is {value}, for {counted(here.ranks, 'rank')} on {counted(here.cores, 'core')}"
    if int(value) * here.ranks > max(here.cores, here.ranks):
        return WRONG, text, f"Threads take turns: set it to {max(1, here.cores // here.ranks)}."
    return OK, text, ""


def _visible(value: str | None, here: Here) -> Said | None:
    if value is None:
        return None
    num = len([each for each in value.split(",") if each.strip()])
    text = f"is {value or 'empty'}: {counted(num, 'device')} for {counted(here.ranks, 'rank')}"
    if here.library == "nccl" and num < here.ranks:
        return WRONG, text, "List as many devices as the node has ranks, or unset it."
    return OK, text, ""


def _recorded(value: str | None, here: Here) -> Said:
    if value and value.isdecimal() and int(value):
        return OK, f"is {value}: where a run stood can be told afterwards", ""
    return NOTE, "is not set: nothing tells where a run stood that hung", f"Set it to {RECORDED}."


def _net(value: str | None, here: Here) -> Said | None:
    if value is None:
        return None
    if value.lower() == "socket" and _on_rdma(here):
        return WRONG, f"is {value}: transfers between nodes go over TCP", "Unset it."
    return OK, f"is {value}", ""


def _debug(value: str | None, here: Here) -> Said | None:
    if value is None:
        return None
    if value.upper() in ("INFO", "TRACE"):
        return NOTE, f"is {value}, which fills logs", "Set it to WARN when all is well."
    return OK, f"is {value}", ""


def _detail(value: str | None, here: Here) -> Said | None:
    if value is None:
        return None
    if value.upper() == "DETAIL":
        return NOTE, "is DETAIL: each collective is compared between ranks", "Unset it to train."
    return OK, f"is {value}", ""


def _errors(value: str | None, here: Here) -> Said | None:
    if value is None:
        return None
    if value == "0":
        return WRONG, "is 0: after a failure the other ranks wait for ever", "Unset it."
    return OK, f"is {value}", ""


RULES.add("OMP_NUM_THREADS", _omp)
RULES.add("CUDA_VISIBLE_DEVICES", _visible)
RULES.add("CUDA_LAUNCH_BLOCKING", _off("each kernel is waited for, so that nothing overlaps"))
RULES.add("TORCH_FR_BUFFER_SIZE", _recorded)
RULES.add("TORCH_NCCL_BLOCKING_WAIT", _off("the host waits in each wait, so that less overlaps"))
RULES.add("TORCH_NCCL_ASYNC_ERROR_HANDLING", _errors)
RULES.add("TORCH_DISTRIBUTED_DEBUG", _detail)
RULES.add("NCCL_SOCKET_IFNAME", _interface)
RULES.add("GLOO_SOCKET_IFNAME", _interface)
RULES.add("NCCL_NET", _net)
RULES.add("NCCL_IB_DISABLE", _off("transfers between nodes go over TCP", _on_rdma))
RULES.add("NCCL_P2P_DISABLE", _off("GPUs of a node do not use their links"))
RULES.add("NCCL_SHM_DISABLE", _off("ranks of a node without links go over the network"))
RULES.add("NCCL_DEBUG", _debug)
for _name in (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NTHREADS",
):
    RULES.add(_name, _forced)
