"""Programs and rights that nodes in namespaces need, and which of them are missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from .host import Host

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
_TUN = Path("/dev/net/tun")


def what_is_missing() -> str:
    """Why nodes cannot be made here, and the remedy; empty if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    programs = [name for name in _PACKAGES if shutil.which(name) is None]
    if programs:
        packages = " ".join(sorted({_PACKAGES[name] for name in programs}))
        return f"not found: {', '.join(programs)} (Debian: apt install {packages})"
    if os.geteuid() != 0:
        return f"network namespaces need root, and this is user {os.geteuid()}"
    try:
        with Host("probe"):
            return ""
    except OSError as error:
        return f"root may not make namespaces here ({error}); a container needs --privileged, or CAP_SYS_ADMIN"


def has_netem() -> bool:
    """Whether this kernel can delay packets. Raises OSError if namespaces cannot be made."""
    with Host("probe") as host:
        try:
            host.set_up("tc qdisc add dev lo root netem delay 1ms")
        except OSError:
            return False
        return True


def why_no_wire() -> str:
    """Why a process cannot carry packets here; empty if it can."""
    if _TUN.exists():
        return ""
    return f"{_TUN} is missing: modprobe tun; a container needs --device {_TUN} too"
