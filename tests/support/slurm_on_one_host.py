"""A throw-away Slurm cluster on this host: real munged, slurmctld and slurmd of loopback, removed at the end.

With SLURM_CONF set sbatch, srun and `--backend slurm` find this cluster and no other. It needs root (slurmd starts
other users' jobs) and Debian's slurmctld, slurmd, slurm-client and munge; no cgroups, no accounting.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from support.inside import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_HOST = "127.0.0.1"
_PATIENCE = 30.0  # [s] for the daemons to come up
_END = 5.0  # [s] for one to go after it was asked
_POLL = 0.1  # [s]


def missing() -> str:
    """Why there can be no such cluster here; empty where there can."""
    lacking = [name for name in PROGRAMS if _program(name) is None]
    if lacking:
        return f"no {', '.join(lacking)} here: apt install slurmctld slurmd slurm-client munge"
    return "" if os.getuid() == 0 else "slurmd needs root"


@contextmanager
def one_host_cluster(num_nodes: int) -> Iterator[Path]:
    """The folder of a cluster of nodes n1, n2, ... on this host, one CPU each as far as Slurm knows.

    Raises ValueError where it cannot be, RuntimeError with the daemons' last lines where it does not come up.
    """
    if reason := missing():
        raise ValueError(f"no Slurm on this host: {reason}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stagewright-slurm-")))
        folder.chmod(0o755)  # the daemons want to see their files
        names = [f"n{number}" for number in range(1, num_nodes + 1)]
        (folder / "slurm.conf").write_text(_configuration(folder, names))
        for name in ("state", *(f"spool.{name}" for name in names)):
            (folder / name).mkdir()
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for command in _daemons(folder, names):
            stack.enter_context(_daemon(command, environment, folder))
        _wait_until_idle(folder, environment, num_nodes)
        yield folder


def _configuration(folder: Path, names: Sequence[str]) -> str:
    user = pwd.getpwuid(os.getuid()).pw_name
    control, *ports = free_ports(1 + len(names), host=_HOST)
    lines = [
        "ClusterName=stagewright",
        f"SlurmctldHost={socket.gethostname()}({_HOST})",
        f"SlurmctldPort={control}",
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",  # loopback alone
        f"AuthType=auth/munge\nCredType=cred/munge\nAuthInfo=socket={folder}/munge.socket",
        f"SlurmUser={user}\nSlurmdUser={user}",
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log\nSlurmdLogFile={folder}/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none",  # no cgroups
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core",
        "SwitchType=switch/none\nMpiDefault=none",
        "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1\nReturnToService=2\nKillWait=5\nInactiveLimit=0",
    ]
    for name, port in zip(names, ports, strict=True):
        lines.append(f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr={_HOST} Port={port} CPUs=1")
    lines.append(f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=60 State=UP")
    return "\n".join(lines) + "\n"


def _daemons(folder: Path, names: Sequence[str]) -> Iterator[list[str]]:
    """Commands in the order of their start, each in the foreground."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = {"key-file": key} | {
        name: folder / f"munge.{ending}"
        for name, ending in (("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))
    }
    # --force: the folder stands in /tmp, which others may write to, if not in this folder
    yield [_path("munged"), "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())]
    yield [_path("slurmctld"), "-D", "-c", "-f", str(folder / "slurm.conf")]
    for name in names:
        yield [_path("slurmd"), "-D", "-c", "-N", name, "-f", str(folder / "slurm.conf")]


@contextmanager
def _daemon(command: Sequence[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / "daemons.out").open("ab") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_END)


def _wait_until_idle(folder: Path, environment: dict[str, str], num_nodes: int) -> None:
    command = [_path("sinfo"), "-h", "-N", "-o", "%T"]
    until = time.monotonic() + _PATIENCE
    states: list[str] = []
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            asked = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_PATIENCE
            )
            states = asked.stdout.split()
        if states == ["idle"] * num_nodes:
            return
        time.sleep(_POLL)
    logs = "\n".join(
        f"{path.name}: {line}"
        for path in sorted(folder.glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()[-5:]
    )
    raise RuntimeError(f"the cluster did not come up in {_PATIENCE:g} s (nodes: {' '.join(states) or 'none'})\n{logs}")


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _path(name: str) -> str:
    found = _program(name)
    assert found is not None
    return found
