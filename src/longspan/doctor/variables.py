"""Environment variables of NCCL and of PyTorch's use of it: current names, and why to set them.

The names are those that NCCL 2.30 and PyTorch 2.13 read. Imports no torch.
"""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from longspan.doctor.finding import Finding


@dataclass(frozen=True)
class Variable:
    """A variable that may be worth setting."""

    name: str
    when: str
    why: str


ADVICE = (
    Variable(
        "NCCL_SOCKET_IFNAME",
        "a machine has several networks",
        "names the interfaces, by prefix, that NCCL's sockets use: the first one found may be a "
        "management network or a bridge of containers. GLOO_SOCKET_IFNAME is gloo's, and takes "
        "whole names",
    ),
    Variable(
        "NCCL_IB_HCA",
        "InfiniBand or RoCE with several adapters",
        "names the adapters that NCCL may use: one for storage, or one that is down, makes the "
        "start fail or all collectives slow",
    ),
    Variable(
        "NCCL_IB_DISABLE",
        "no other way to start, only to find a fault",
        "1 uses sockets instead of InfiniBand: if the run starts with it, the fault is in the "
        "adapters or in `ulimit -l`. Slow: remove it afterwards",
    ),
    Variable(
        "NCCL_P2P_DISABLE",
        "a hang within one machine, only to find a fault",
        "1 copies through host memory: if that helps, look at ACS and IOMMU in the BIOS. Slow: "
        "remove it afterwards",
    ),
    Variable(
        "NCCL_DEBUG",
        "NCCL fails or is slow",
        "INFO prints version, interfaces and the links that it has chosen; WARN only errors",
    ),
    Variable(
        "NCCL_DEBUG_FILE",
        "with NCCL_DEBUG=INFO on many ranks",
        "writes to a file per process (%h is the host, %p the process), not all to one console",
    ),
    Variable(
        "NCCL_TOPO_DUMP_FILE",
        "a collective is slower than the links",
        "writes the links that NCCL sees: in containers and virtual machines some may be hidden",
    ),
    Variable(
        "NCCL_CUMEM_HOST_ENABLE",
        "the start fails in a container with a small /dev/shm",
        "0 or 1 chooses how NCCL allocates memory that processes share; better raise /dev/shm",
    ),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        "never: Longspan sets 2000",
        "collectives that PyTorch's flight recorder keeps; the watchdog names the one that hangs "
        "from it. 0 turns it off",
    ),
    Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "collectives time out",
        "1 writes the flight recorder's collectives of each rank to TORCH_FR_DUMP_TEMP_FILE",
    ),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "never: the default ends the process",
        "0 lets a rank wait for ever for one that is lost, and no restart begins",
    ),
)

RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "NCCL_CHECKS_DISABLE": "NCCL_CHECK_POINTERS",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_SINGLE_RING_THRESHOLD": "NCCL_ALGO",
    "NCCL_RINGS": "NCCL_GRAPH_FILE",
}
"""Names that are deprecated or no longer read, and the current ones."""

_NCCL = """
ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_MODE CHECK_POINTERS COLLNET_ENABLE
COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID COMM_SPLIT_SHARE_RESOURCES CONF_FILE CROSS_NIC
CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT
DMABUF_ENABLE ENV_PLUGIN GDRCOPY_ENABLE GDR_FLUSH_DISABLE GRAPH_DUMP_FILE GRAPH_FILE
GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IBVERBS_LIB IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY
IB_ADDR_RANGE IB_AR_THRESHOLD IB_DATA_DIRECT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX
IB_HCA IB_MERGE_NICS IB_MERGE_VFS IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY IB_QPS_PER_CONNECTION
IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT
IB_USE_INLINE IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P LAUNCH_MODE LAUNCH_ORDER_IMPLICIT
LL128_BUFFSIZE LL128_NTHREADS LL_BUFFSIZE LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MAX_P2P_NCHANNELS
MIN_CTAS MIN_NCHANNELS MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID
NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_MERGE NET_GDR_C2C
NET_GDR_LEVEL NET_GDR_READ NET_MERGE_LEVEL NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS
NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS NVTX_DISABLE
OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD
P2P_NET_CHUNKSIZE P2P_PXN_LEVEL P2P_READ_ENABLE P2P_USE_CUDA_MEMCPY PAT_ENABLE PROFILER_PLUGIN
PROTO PROXY_CPUSET PXN_C2C PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR RUNTIME_CONNECT
SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SHM_LOCALITY SHM_USE_CUDA_MEMCPY SOCKET_FAMILY
SOCKET_IFNAME SOCKET_NTHREADS SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SYM_CTAS SYM_KERNEL
TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK TOPO_FILE TUNER_CONFIG_FILE TUNER_PLUGIN WIN_ENABLE
WORK_FIFO_BYTES
"""
_TORCH_NCCL = """
ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BCAST_UNIQUEID BLOCKING_WAIT COORD_CHECK_MILSEC
CUDA_EVENT_CACHE DEBUG_INFO_PIPE_FILE DESYNC_DEBUG DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING
EXTRA_DUMP_ON_EXEC HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK
PROPAGATE_ERROR RANKS_PER_ROOT RETHROW_CUDA_ERRORS SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
USE_COMM_NONBLOCKING USE_TENSOR_REGISTER_ALLOCATOR_HOOK WAIT_TIMEOUT_DUMP_MILSEC
"""
CURRENT = {f"NCCL_{name}" for name in _NCCL.split()}
CURRENT |= {f"TORCH_NCCL_{name}" for name in _TORCH_NCCL.split()}
CURRENT |= {f"TORCH_FR_{name}" for name in ("BUFFER_SIZE", "CPP_STACK", "DUMP_TEMP_FILE")}
CURRENT |= {"TORCH_FR_DUMP_DYNAMIC_FILE_NAME"}

SLOWS = {
    name: f"{name} = 1 makes collectives slow, and is for finding a fault: unset it"
    for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
}


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables of NCCL that are deprecated, misspelt or left over from debugging."""
    names = sorted(name for name in environment if re.match(r"(TORCH_)?NCCL_|TORCH_FR_", name))
    wrong = 0
    for name in names:
        seen, advice = f"{name} is set", ""
        if name in RENAMED:
            seen += ", but is deprecated or no longer read"
            advice = f"set {RENAMED[name]} instead"
        elif name not in CURRENT:
            # Plugins have names of their own; only what differs by a letter or two is a mistake.
            close = difflib.get_close_matches(name, CURRENT, n=1, cutoff=0.92)
            if close:
                seen += ", but neither NCCL nor PyTorch reads it"
                advice = f"did you mean {close[0]}?"
        elif name in SLOWS and environment[name] not in ("", "0"):
            advice = SLOWS[name]
        if advice:
            wrong += 1
            yield Finding("NCCL variables", "warning", seen, advice)
    if not wrong:
        yield Finding(
            "NCCL variables", "ok", f"set: {', '.join(names)}" if names else "none is set"
        )


def check_interfaces(
    environment: Mapping[str, str], interfaces: Sequence[str] | None = None
) -> Iterator[Finding]:
    """Find network interfaces that NCCL or gloo is told to use, and that are not there."""
    if interfaces is None:
        interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        if not value or value.startswith("^"):
            continue
        is_exact = value.startswith("=") or variable.startswith("GLOO")
        wanted = value.removeprefix("=").split(",")
        found = [
            any(name == want if is_exact else name.startswith(want) for name in interfaces)
            for want in wanted
        ]
        # NCCL needs one of those it may use; gloo opens each.
        if not (any(found) if variable.startswith("NCCL") else all(found)):
            yield Finding(
                "interfaces",
                "error",
                f"{variable} is {value!r}, but the interfaces are {', '.join(interfaces)}",
                f"set {variable} to one of these, or unset it",
            )
        else:
            yield Finding("interfaces", "ok", f"{variable} is {value}")
