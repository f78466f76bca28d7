"""Work that a training's runtime overlaps with its products, and the type in which it gathers."""

from __future__ import annotations

from typing import NamedTuple

SPLITS = 4  # of a product whose sums are scattered, at most: `num_splits` of Transformer Engine and NVIDIA's settings


class Runtime(NamedTuple):
    """A runtime, as far as formulas see it; all False: nothing overlaps, as in Megatron-LM of 2021.

    Arguments:
        overlaps_sums: sums over the T tensor ranks are cut into T parts, of which all but one travel while the products
            before or after them compute: Transformer Engine's userbuffers (`tp_comm_overlap`).
        gathers_ahead: updated weights are gathered before the forwards that need them, in place of after the update
            (`overlap_param_gather`).
        gathers_casts: what is gathered are casts: activations over tensor ranks in the layers' precision (Transformer
            Engine), and weights over replicas in 8 bits (`fp8_param_gather`).
        adds_gradients: W reads and writes the gradients of matrices besides its products, to add a microbatch's; False:
            the device's efficiency has that in it, as where it was fitted to trainings.
    """

    overlaps_sums: bool = False
    gathers_ahead: bool = False
    gathers_casts: bool = False
    adds_gradients: bool = False


PLAIN = Runtime()
MEGATRON_CORE = Runtime(overlaps_sums=True, gathers_ahead=True, gathers_casts=True, adds_gradients=True)
"""Megatron-Core with Transformer Engine, as NeMo and Megatron-Bridge configure it for speed (their performance guides;
NVIDIA's configurations of MLPerf Training v3.1 and v4.0)."""
