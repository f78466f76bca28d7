"""A case of an experiment: one point of its grid."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...partition import quantities
from ...partition.strict import count, fail, number
from ..backends.records import Nodes, Shape

Value = str | int | float | bool | tuple[int, ...]
NODE_KEYS = ("ranks", "nodes", "bandwidth", "latency", "sites", "site_bandwidth", "site_latency", "cpu_share")


@dataclass(frozen=True, slots=True)
class Case:
    """Values by key, in order; keys are words of lower-case letters.

    >>> case = Case.of({"schedule": "1f1b", "ranks": 4})
    >>> str(case), case.count("ranks"), str(case.also(microbatches=8))
    ('schedule=1f1b ranks=4', 4, 'schedule=1f1b ranks=4 microbatches=8')
    """

    items: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Case:
        """Case of values from TOML or JSON. Raises ValueError for an invalid key or value."""
        return cls(tuple((_key(key), _value(key, value)) for key, value in values.items()))

    @property
    def values(self) -> dict[str, Value]:
        return dict(self.items)

    def __str__(self) -> str:
        return " ".join(f"{key}={shown(value)}" for key, value in self.items)

    def __contains__(self, key: str) -> bool:
        return any(each == key for each, _ in self.items)

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.items)

    def also(self, **values: Value) -> Case:
        """The case with additional or other values, for a figure of a part of the case."""
        return Case.of({**self.values, **values})

    def only(self, keys: Iterable[str]) -> Case:
        """The case with only those of `keys` that it has, in their order."""
        own = self.values
        return Case(tuple((key, own[key]) for key in keys if key in own))

    def get(self, key: str, default: Value | None = None) -> Value | None:
        return self.values.get(key, default)

    def text(self, key: str) -> str:
        value = self._need(key)
        return value if isinstance(value, str) else fail(self._at(key), value, "text")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; `default` if the key is missing, unless None."""
        if default is not None and key not in self:
            return default
        return count(self._at(key), self._need(key))

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of at least 0; `default` likewise."""
        if default is not None and key not in self:
            return default
        return number(self._at(key), self._need(key))

    def bandwidth(self, key: str) -> float:
        """A value such as "1gbit" [bytes/s]."""
        return quantities.bandwidth(self._at(key), self.text(key))

    def seconds(self, key: str) -> float:
        """A value such as "20ms" [s]."""
        return quantities.latency(self._at(key), self.text(key))

    def _need(self, key: str) -> Value:
        if key not in self:
            raise ValueError(f"case {self}: no {key}: expected one in the declaration's cases")
        return self.values[key]

    def _at(self, key: str) -> str:
        return f"case {self}: {key}"


def grid(values: Mapping[str, object]) -> list[Case]:
    """All cases of a grid: a list means each of its members in turn, the last key varies fastest.

    >>> [str(case) for case in grid({"schedule": ["gpipe", "1f1b"], "ranks": 4})]
    ['schedule=gpipe ranks=4', 'schedule=1f1b ranks=4']
    """
    columns = [each if isinstance(each, list) else [each] for each in values.values()]
    for key, column in zip(values, columns, strict=True):
        if not column:
            fail(key, column, "at least one value in the list")
    return [Case.of(dict(zip(values, row, strict=True))) for row in itertools.product(*columns)]


def shown(value: Value) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _key(key: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
        raise ValueError(f"{key!r}: expected a key of lower-case letters, digits and underscores")
    return key


def _value(key: str, value: object) -> Value:
    if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        return tuple(value)
    if isinstance(value, bool | int | float) or (isinstance(value, str) and value and value.isprintable()):
        return value
    fail(key, value, "text in one line, a number, true, false, or whole numbers in a list of their own ([[0, 1]])")


def nodes_of(case: Case) -> Nodes:
    """Nodes of a case: `ranks` in total (1) on `nodes` (1), and the shape of links between them.

    Keys of the shape: `bandwidth` and `site_bandwidth` ("1gbit"), `latency` and `site_latency` ("1ms"), `sites` (per
    node, [[0, 0, 1, 1]]), `cpu_share`.

    Raises ValueError for another value, or ranks that cannot be spread evenly over the nodes.

    >>> nodes_of(Case.of({"ranks": 4, "nodes": 2, "bandwidth": "1gbit"})).ranks_per_node
    2
    """
    ranks, nodes = case.count("ranks", 1), case.count("nodes", 1)
    if ranks % nodes:
        fail(f"case {case}: ranks", ranks, f"a multiple of its {nodes} nodes")
    sites = case.get("sites", ())
    if not isinstance(sites, tuple) or (sites and len(sites) != nodes):
        fail(
            f"case {case}: sites", sites, f"the site of each of its {nodes} nodes, in a list of its own: [[0, 0, 1, 1]]"
        )
    bandwidths, latencies = ("bandwidth", "site_bandwidth"), ("latency", "site_latency")
    read = dict.fromkeys(bandwidths, case.bandwidth) | dict.fromkeys(latencies, case.seconds)
    given = {key: of(key) for key, of in read.items() if key in case}
    share = case.number("cpu_share") if "cpu_share" in case else None
    return Nodes(num_nodes=nodes, ranks_per_node=ranks // nodes, shape=Shape(sites=sites, cpu_share=share, **given))
