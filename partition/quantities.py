"""Bandwidths, latencies and sizes as people type them: `1gbit`, `10Gbit/s`, `125MB/s`, `80GiB`, `1.5ms`."""

from __future__ import annotations

import re

from .strict import number

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NUMBER = r"(\d+(?:\.\d*)?(?:e\d+)?)"


def bandwidth(where: str, text: str) -> float:
    """Bytes per second. Bits may be written as `tc` does (`1gbit`); bytes need their `/s`.

    Raises ValueError that begins with `where` for another form.

    >>> bandwidth("--bandwidth", "1gbit"), bandwidth("--bandwidth", "10Gbit/s"), bandwidth("--bandwidth", "125MB/s")
    (125000000.0, 1250000000.0, 125000000.0)
    """
    match = re.fullmatch(rf"{_NUMBER}([kKmMgGtT]?)bit(?:/s)?|{_NUMBER}([KMGT]i?|k|)B/s", text)
    if match is None:
        raise ValueError(f"{where}: {text!r}: expected a number and a unit, such as 12GB/s, 16GiB/s, 100Gbit/s, 1gbit")
    bits, bit_prefix, whole, prefix = match.groups()
    if bits is None:
        return number(where, float(whole) * _PREFIXES[prefix], positive=True)
    return number(where, float(bits) * _PREFIXES[bit_prefix.upper()] / 8, positive=True)


def size(where: str, text: str) -> float:
    """Bytes; ValueError that begins with `where` for another form.

    >>> size("memory", "80GB")
    80000000000.0
    """
    match = re.fullmatch(rf"{_NUMBER}([KMGT]i?|k|)(B|bit)", text)
    if match is None or match[2] not in _PREFIXES:
        raise ValueError(f"{where}: {text!r}: expected a number and a unit, such as 12GB, 16GiB, 100Gbit")
    return number(where, float(match[1]) * _PREFIXES[match[2]] / (8 if match[3] == "bit" else 1), positive=True)


def latency(where: str, text: str) -> float:
    """Seconds; ValueError that begins with `where` for another form.

    >>> latency("--latency", "1.5ms")
    0.0015
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)(s|ms|us|ns)", text)
    if match is None:
        raise ValueError(f"{where}: {text!r}: expected a number and a unit, such as 5us")
    return float(match[1]) * _SECONDS[match[2]]
