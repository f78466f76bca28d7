"""Facts about a node: its host, versions, network interfaces and a free port, read without torch."""

from __future__ import annotations

import fcntl
import hashlib
import platform
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from ... import __version__
from ...cli.host import free_ports, package_versions

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_ROOMS = ("schedules", "partition", "comm", "pipe", "cli", "experiments")  # all that figures depend on


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts that a node reports of itself."""

    host: str  # its own host name
    python: str
    torch: str
    stagewright: str
    code: str  # digest of stagewright's source files: checkouts of one version may differ
    interfaces: Mapping[str, tuple[str, ...]]  # addresses by network interface
    free_port: int  # a TCP port that was free a moment ago

    @classmethod
    def here(cls) -> NodeFacts:
        return cls(
            host=socket.gethostname(),
            python=platform.python_version(),
            torch=package_versions("torch")["torch"],
            stagewright=__version__,
            code=code_digest(),
            interfaces=interfaces(),
            free_port=free_ports(1)[0],
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NodeFacts:
        """Reads `asdict`; ignores unknown fields of other versions, and takes "unknown" for missing ones."""
        read = {field.name: values.get(field.name, "unknown") for field in fields(cls)}
        named = values.get("interfaces", {})
        return cls(**{**read, "interfaces": {name: tuple(addresses) for name, addresses in named.items()}})

    def interface_of(self, address: str) -> str:
        """The interface with an address, or "" without one."""
        return next((name for name, addresses in self.interfaces.items() if address in addresses), "")


def differences(one: NodeFacts, other: NodeFacts) -> list[str]:
    """Different versions, as "torch 2.9.0 instead of 2.13.0"; the code only if the versions agree."""
    found = [
        f"{name} {getattr(one, name)} instead of {getattr(other, name)}"
        for name in ("python", "torch", "stagewright")
        if getattr(one, name) != getattr(other, name)
    ]
    if not found and one.code != other.code:
        found = [f"other source files of stagewright {one.stagewright} (digest {one.code} instead of {other.code})"]
    return found


def interfaces() -> dict[str, tuple[str, ...]]:
    """Addresses by network interface of this host: the first IPv4 address, and all IPv6 addresses."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name, addresses in found.items():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return {name: tuple(addresses) for name, addresses in found.items()}


@cache
def code_digest() -> str:
    root = Path(__file__).parents[2]
    files = [*root.glob("*.py"), *(path for room in _ROOMS for path in (root / room).rglob("*.py"))]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
