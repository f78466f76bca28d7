"""The hosts file of `--backend ssh`: one host per line.

# address for ssh                                 options
ada@node1.example.org:2222                        slots=4 python=/opt/stagewright/bin/python
node2                                             slots=4 address=10.0.0.2
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Excludes all that ssh or a shell could read as an option or as several words.
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+\]")
_USER = re.compile(r"[A-Za-z0-9_]([\w.-]*)\$?", flags=re.ASCII)
_PLACE = re.compile(r"((?P<user>[^@]*)@)?(?P<host>\[[^\]]*\]|[^:]*)(:(?P<port>.*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHost:
    """One host that ssh reaches.

    Arguments:
        host: a name, an alias of the user's ssh configuration, or an address.
        user, port: empty and None: as ssh is configured.
        slots: most ranks on it; None: no limit.
        python: a Python with stagewright installed.
        address: by which the other hosts reach it; empty: the host's name as ssh resolves it.
    """

    host: str
    user: str = ""
    port: int | None = None
    slots: int | None = None
    python: str = sys.executable
    address: str = ""

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ValueError(
                f"host {self.host!r}: expected a name of letters, digits, '.', '-' or '_', or [IPv6 address]"
            )
        if self.user and not _USER.fullmatch(self.user):
            raise ValueError(f"user {self.user!r}: expected a name of letters, digits, '.', '-' or '_'")
        if self.port is not None and not 0 < self.port < 2**16:
            raise ValueError(f"port {self.port}: expected 1 to 65535")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"slots={self.slots}: expected at least 1")

    @classmethod
    def parse(cls, line: str) -> RemoteHost:
        """`[user@]host[:port] [slots=N] [python=PATH] [address=ADDRESS]`. Raises ValueError."""
        place, *settings = shlex.split(line)
        match = _PLACE.fullmatch(place)
        if match is None:
            raise ValueError(f"{place!r}: expected [user@]host[:port]")
        values: dict[str, Any] = {"host": match["host"], "user": match["user"] or ""}
        if match["user"] == "":
            raise ValueError(f"{place!r}: expected a user's name before '@'")
        if match["port"] is not None:
            values["port"] = _number("port", match["port"])
        for setting in settings:
            name, equals, value = setting.partition("=")
            if name not in ("slots", "python", "address") or not equals or not value:
                raise ValueError(f"{setting!r}: expected slots=N, python=PATH or address=ADDRESS")
            values[name] = _number(name, value) if name == "slots" else value
        return cls(**values)


def read_hosts(path: Path) -> tuple[RemoteHost, ...]:
    """The hosts of a file, in their order. Raises ValueError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hosts file {str(path)!r} cannot be read: {error}") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        try:
            if shlex.split(line, comments=True):
                hosts.append(RemoteHost.parse(line.partition("#")[0]))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not hosts:
        raise ValueError(f"hosts file {str(path)!r} names no host: expected one a line, such as user@host:22 slots=4")
    return tuple(hosts)


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} {text!r}: expected a whole number")
    return int(text)
