"""Back ends by name, and what the options of the command make of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inside import BACKENDS, Access, RunOptions, backend


def test_every_back_end_is_made_by_its_name_and_says_it(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb slots=2\n")
    access = Access(hosts=tmp_path / "hosts", slurm=("partition=long",), interface="eth0")
    for name in BACKENDS:
        assert backend(name, say=print, access=access).name == name
    assert access.arguments("slurm") == {"options": {"partition": "long"}, "interface": "eth0"}
    assert [host.host for host in access.arguments("ssh")["hosts"]] == ["a", "b"]


def test_options_that_are_missing_or_cannot_be_are_told() -> None:
    with pytest.raises(ValueError, match="--backend ssh: type --hosts FILE, one host a line"):
        backend("ssh", say=print)
    with pytest.raises(ValueError, match="--slurm partition: expected NAME=VALUE, such as partition=long"):
        backend("slurm", say=print, access=Access(slurm=("partition",)))
    with pytest.raises(ValueError, match="unknown back end 'slrum'; did you mean slurm"):
        backend("slrum", say=print)
    with pytest.raises(ValueError, match="--hosts is for --backend ssh, not for --backend local"):
        RunOptions(name="x", backend="local", hosts=Path("hosts")).changes()
