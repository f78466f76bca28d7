"""Staging without a device: the copies of `CudaSide` between tensors of the CPU, as late as they may be."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from stagewright.comm import Groups, TensorSpec


class HostSide:
    """Buffers hold NaN until somebody waits for the copy, on whichever thread that is."""

    pins = False

    def __init__(self, _: torch.device) -> None:
        pass

    def to_host(
        self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]
    ) -> tuple[list[Tensor], Callable[[], None]]:
        hosts = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype) for spec in specs]
        for host in hosts:
            host.fill_(float("nan") if host.is_floating_point() else 1)

        def copied() -> None:
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor.detach())

        return hosts, copied

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(host.clone() for host in hosts)


@contextmanager
def staging() -> Iterator[None]:
    """Within, pipelines over gloo send and sum as those of CUDA devices that NCCL cannot connect."""
    side = mock.patch("stagewright.comm.staged.CudaSide", HostSide)
    with side, mock.patch.object(Groups, "is_staged", True):
        yield
