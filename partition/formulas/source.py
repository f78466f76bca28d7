"""Profiles of a GPT for the planner, by microbatch and tensor size."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cluster import Cluster
from ..profile import Profile
from ..strict import count
from .device_model import DeviceModel
from .layers import transformer_profile
from .transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSource:
    """Profiles of one model on one kind of device, by microbatch and tensor size; each is made once.

    Arguments:
        transformer, device, cluster: as for `transformer_profile`.
    """

    transformer: Transformer
    device: DeviceModel
    cluster: Cluster | None = None
    _made: dict[tuple[int, int], Profile] = field(default_factory=dict, init=False, repr=False, compare=False)

    def profile(self, *, microbatch_size: int, tensor: int = 1) -> Profile:
        """`transformer_profile`; what it needs beside the sizes is known."""
        key = (microbatch_size, tensor)
        if key not in self._made:
            self._made[key] = transformer_profile(
                self.transformer,
                microbatch_size=microbatch_size,
                tensor=tensor,
                device=self.device,
                cluster=self.cluster,
            )
        return self._made[key]

    def tensor_sizes(self, limit: int | None = None) -> tuple[int, ...]:
        """The tensor sizes worth trying: those that divide heads and MLP and stay within a node (and `limit`).

        >>> model = Transformer(layers=2, hidden=96, heads=6, vocabulary=100, length=8)
        >>> cluster = Cluster.parse("2x4:nvlink=300GB/s,net=25GB/s")
        >>> TransformerSource(transformer=model, device=DeviceModel.preset("A100-80GB"), cluster=cluster).tensor_sizes()
        (1, 2, 3)
        """
        most = self.transformer.heads if limit is None else count("limit", limit)
        if self.cluster is not None:
            most = min(most, self.cluster.levels[0].size)
        sizes = range(1, min(most, self.transformer.heads) + 1)
        return tuple(t for t in sizes if not self.transformer.heads % t and not self.transformer.mlp_width % t)
