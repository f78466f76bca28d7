"""One node on this host with its own network, processes, host name and mounts.

    launcher --- stdin ---> unshare ---> sh: sets up, prints its process id, then `cat`   (process 1 of the node)
       |
       +------------------> nsenter ---> a command on the node

When process 1 ends, Linux kills all other processes of the node and removes its interfaces. It ends when its stdin
closes, and so with the launcher in any ending.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ....cli.processes import Process, let_go

# The shell reads its process id from the launcher's /proc, before it mounts the node's own.
# /sys lists interfaces; segments of shared memory belong to the node, and end with it.
_SET_UP = """
set -e
read -r pid rest < /proc/self/stat
echo "$1" > /proc/sys/kernel/hostname
mount -t proc proc /proc
mount -t sysfs sysfs /sys
if [ -d /dev/shm ]; then mount -t tmpfs tmpfs /dev/shm; fi
if [ -n "$2" ]; then mount --bind "$2" /etc/hosts; fi
ip link set lo up
echo "$pid"
exec cat > /dev/null
"""
_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")
_PATIENCE = 20.0  # [s] for a node to come up or to end: both take some 10 ms


class Host:
    """A node that is up; a context that removes it with all its processes.

    Arguments:
        name: its host name.
        hosts_file: content of /etc/hosts there; None: as on this machine.
        prefix: words before every command there, such as those of a share of the processor.

    Raises OSError, with Linux's message, if this process may not make namespaces.
    """

    def __init__(self, name: str, *, hosts_file: Path | None = None, prefix: Sequence[str] = ()) -> None:
        self.name = name
        self._prefix = tuple(prefix)
        command = [*_UNSHARE, "sh", "-c", _SET_UP, "sh", name, str(hosts_file or "")]
        self._started = Process.begin(command, None, out=subprocess.PIPE, err=subprocess.PIPE)
        self._holder = self._started.process
        try:
            self.pid = self._await_pid()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        let_go([self._started], patience=_PATIENCE)  # --kill-child: process 1 ends with the holder, too

    def words(self, command: Sequence[str]) -> tuple[str, ...]:
        """The command line that runs `command` on this node, in this process's working folder."""
        enter = ("nsenter", "--target", str(self.pid), "--net", "--uts", "--ipc", "--mount", "--pid")
        return (*self._prefix, *enter, f"--wdns={Path.cwd()}", *command)

    def start(
        self, command: Sequence[str], *, output: int | IO[bytes] | None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this node.

        Arguments:
            command: program and arguments, run without a shell.
            output: for stdout and stderr.
            environment: variables in addition to this process's own.
        """
        return subprocess.Popen(
            self.words(command),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def set_up(self, script: str) -> None:
        """Run a shell script in this node's network only: it sees this machine's files and processes.

        Raises OSError with its output if it fails.
        """
        enter = ("nsenter", "--target", str(self.pid), "--net", "sh", "-e", "-c", script)
        done = subprocess.run(enter, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{self.name}: {(done.stderr + done.stdout).strip()} (status {done.returncode} of: {script})")

    def crash(self) -> None:
        """End the node like a power failure, without a signal to its processes."""
        os.kill(self.pid, signal.SIGKILL)

    def _await_pid(self) -> int:
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        line = read_line(self._holder.stdout, _PATIENCE)
        if not line.strip().isdigit():
            self._holder.kill()
            said = self._holder.stderr.read().decode(errors="replace").strip()
            raise OSError(f"no namespaces for {self.name}: {said or f'no answer within {_PATIENCE:g} s'}")
        return int(line)


def read_line(stream: IO[bytes], timeout: float) -> bytes:
    """The first line of a process, read without a buffer; the part received if it ends, or after `timeout` [s]."""
    line, until = b"", time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, until - time.monotonic())):
            byte = os.read(stream.fileno(), 1)
            if not byte:
                break
            line += byte
    return line
