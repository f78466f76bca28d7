"""Counts, durations and sizes as they are printed for people."""

from __future__ import annotations

import math
import re
import textwrap

_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_UNIT = re.compile(r"(?<=\d) (?=(?:[mun]?s|[kMGT]B|bytes)\b)")
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))


def count(number: int, noun: str) -> str:
    """A number of things, the noun in its singular.

    >>> count(1, "rank"), count(2, "microbatch"), count(12345, "parameter")
    ('1 rank', '2 microbatches', '12,345 parameters')
    """
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def printable(text: str) -> str:
    """Text with control characters, such as those of an escape sequence, written as escapes.

    >>> printable("a\\n\\x1b[2J")
    'a\\n\\\\x1b[2J'
    """
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


def wrapped(text: str, width: int = 80) -> str:
    """Text with long lines wrapped, indented to the second column where they have two.

    >>> print(wrapped("time      F 3.20 ms, B 10.5 ms, update 2 ms\\nnote: short", 32))
    time      F 3.20 ms, B 10.5 ms,
              update 2 ms
    note: short
    """
    lines: list[str] = []
    for line in text.splitlines():
        begin = re.match(r"\s*(?:\S+(?: \S+)*\s{2,})?", line)
        column = begin.end() if begin is not None else 0
        indent = " " * (column if column <= width // 3 else 0) or "  "
        kept = _UNIT.sub("\xa0", line)  # a number and its unit stay together
        lines += (
            textwrap.wrap(kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
            if len(line) > width
            else [line]
        )
    return "\n".join(lines).replace("\xa0", " ")


def duration(seconds: float) -> str:
    """A time to three digits, in the largest unit in which it is at least 1.

    >>> duration(10.584088), duration(0.0123), duration(5.2e-5), duration(3599.0), duration(0.0)
    ('10.6 s', '12.3 ms', '52.0 us', '3,599 s', '0 s')
    """
    return _scaled(seconds, _SECONDS)


def size(num_bytes: float) -> str:
    """Bytes to three digits, in the largest decimal unit in which they are at least 1.

    >>> size(5_123_456), size(80e9), size(12)
    ('5.12 MB', '80.0 GB', '12 bytes')
    """
    return f"{num_bytes:.0f} bytes" if abs(num_bytes) < 1000 else _scaled(num_bytes, _BYTES)


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {units[0][0]}"
    rounded = abs(float(f"{value:.3g}"))  # 0.9996 s are 1 s
    name, unit = next((each for each in units if rounded >= each[1]), units[-1])
    scaled = value / unit
    digits = max(0, 2 - math.floor(math.log10(max(abs(float(f"{scaled:.3g}")), 1.0))))
    return f"{scaled:,.{digits}f} {name}"
