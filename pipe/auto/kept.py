"""Profiles that outlive a run: measured once for a model, a microbatch, options, a machine and versions.

A file a profile, named by a digest of all that its figures depend on, each rank's: another digest is another file, so
that nothing is ever found to be old. JSON alone; what is no profile is measured again. Rank 0 reads and writes; the
newest files stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

from ...partition.model.fingerprint import lasting_digest
from ...partition.profile import Profile

VARIABLE = "STAGEWRIGHT_CACHE"
Measured = list[tuple[str, str]]  # by rank: its host, its profile as JSON

_FORMAT = 1
_MOST = 64  # files
_ROOMS = ("comm", "partition", "pipe", "schedules")  # whose code makes the figures
_SETTINGS = ("ATEN_", "CUDA_", "CUBLAS", "DNNL_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "NVIDIA_", "OMP_",
             "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_")  # fmt: skip


def cache_folder() -> Path | None:
    """Where profiles are kept: STAGEWRIGHT_CACHE, else the platform's folder for caches; None: nowhere."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return None if given.lower() in ("", "off", "0") else Path(given).expanduser()
    if sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(RuntimeError):  # a user without a home
        return Path(base).expanduser() / "stagewright"
    return None


def profile_key(*measured: object, device: torch.device) -> str:
    """Digest of all that a profile made in this process depends on. Raises ValueError where that cannot be told.

    Arguments:
        measured: the model, a microbatch, and all options of the profiler.
    """
    try:
        return lasting_digest(measured, _machine(device), _torch_settings(device), _package())
    except ValueError:
        raise
    except Exception as error:  # user code: what stands in for an attribute may raise anything
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_kept(folder: Path, key: str, num_ranks: int) -> tuple[Measured, str] | None:
    """Measurements of the ranks, and when; None where no such file is, or its content is none of a profile."""
    path = _path(folder, key)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = [(str(host), str(profile)) for host, profile in content["measured"]]
        if content["format"] != _FORMAT or content["key"] != key or len(found) != num_ranks:
            return None
        for _, profile in found:
            Profile.from_json(profile)
        return found, time.strftime("%d %b %Y %H:%M", time.localtime(path.stat().st_mtime))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def keep(folder: Path, key: str, measured: Measured) -> bool:
    """Write what was measured, as a whole or not at all; whether that could be done."""
    text = json.dumps({"format": _FORMAT, "key": key, "measured": measured})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, _path(folder, key))
        ours = folder.glob(_path(folder, "[0-9a-f]" * len(key)).name)
        for old in sorted(ours, key=lambda path: path.stat().st_mtime, reverse=True)[_MOST:]:
            old.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _path(folder: Path, key: str) -> Path:
    return folder / f"profile-{key}.json"


def _machine(device: torch.device) -> list[object]:
    lines: list[object] = [platform.platform(), platform.machine(), platform.python_version(), os.cpu_count()]
    if hasattr(os, "sched_getaffinity"):
        lines.append(len(os.sched_getaffinity(0)))
    for path, wanted in (("/proc/cpuinfo", "model name"), ("/sys/fs/cgroup/cpu.max", "")):
        with contextlib.suppress(OSError):
            lines += {line for line in Path(path).read_text().splitlines() if line.startswith(wanted)}
    if device.type == "cuda":
        lines.append(str(torch.cuda.get_device_properties(device)))
    return lines


def _torch_settings(device: torch.device) -> list[object]:
    backends = torch.backends
    loaded = [(path, os.stat(path).st_mtime_ns) for path in sorted(torch.ops.loaded_libraries)]
    return [
        *(torch.__version__, torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype()),
        *(torch.__config__.parallel_info(), backends.cpu.get_cpu_capability(), loaded),
        *(torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        *(torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type), torch.is_anomaly_enabled()),
        *(backends.mkldnn.enabled, backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.allow_tf32),
        *(torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled()),
        *(torch._C._get_math_sdp_enabled(), device.type),
        sorted((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS)),
    ]


@cache
def _package() -> str:
    """Digest of this package's own code."""
    root = Path(__file__).parents[2]
    files = sorted(path for room in _ROOMS for path in (root / room).rglob("*.py"))
    return lasting_digest([path.read_bytes() for path in files])
