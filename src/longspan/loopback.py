"""How the processes of one machine find each other, out of reach of other machines."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

STORE = "LONGSPAN_STORE"
"""Set by the launcher in the environment of its processes: the file through which they meet."""


def loopback_only(environment: MutableMapping[str, str]) -> None:
    """Let the processes of one machine listen on the loopback interface only, by default.

    Gloo and NCCL would choose an interface that other machines can reach.
    """
    loopback = "lo" if sys.platform == "linux" else "lo0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.setdefault(name, loopback)
