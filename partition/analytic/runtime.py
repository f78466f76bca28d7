"""Work that a training's runtime overlaps with its products, and how its gradients and weights go round."""

from __future__ import annotations

from typing import NamedTuple

SPLITS = 4  # of a product whose sums are scattered, at most: `num_splits` of Transformer Engine and NVIDIA's settings


class Runtime(NamedTuple):
    """A runtime, as far as formulas see it; by default nothing overlaps, as in Megatron-LM of 2021.

    Arguments:
        overlaps_sums: sums over the T tensor ranks are cut into T parts, of which all but one travel while the products
            before or after them compute: Transformer Engine's userbuffers (`tp_comm_overlap`). Not with products in 4
            bits: NVIDIA's settings of NVFP4 turn it off (Megatron-Bridge at 067f987, perf_recipes/llama; MLPerf
            Training v5.1, config_GB200_1280x4x16xtp4pp8cp2_cg_fp4.sh).
        overlaps_context: keys and values of a context's members travel in a ring while the parts that are there already
            attend (`cp_comm_type="p2p"`).
        gathers_ahead: updated weights are gathered before the forwards that need them, in place of after the update
            (`overlap_param_gather`).
        gathers_casts: activations are gathered over tensor ranks in the layers' precision (Transformer Engine).
        gathers_bytes: weights are gathered over replicas in 8 bits, where the layers' are (`fp8_param_gather`).
        keeps_bytes: and held in 8 bits alone (the same, with MXFP8 too: "do not use any other intermediate dtype").
        adds_gradients: W reads and writes the gradients of matrices besides its products, to add a microbatch's; False:
            the device's efficiency has that in it, as where it was fitted to trainings.
        sums_early: a stage's last backward sums each bucket of gradients over replicas as it makes it
            (`overlap_grad_reduce`; torch's DDP).
        sums_whole: where the optimizer's state is divided, gradients are all-reduced as one after the last backward.
        sums_by_chunk: where a rank has several stages, each of them is one bucket, summed after its last backward.
        fuses: activations, rotary positions and the loss are one kernel each, none copies for another layout, and
            products add gradients themselves.
        gathers_again: inputs that sequence parallelism divides are gathered for I once more.
        pieces: at most, of a product next to a sum that does not overlap.
        scales_blocks: 8-bit values have a scale for each 32 (MXFP8), with which products are slower.
        adds_fast: Hopper adds F's 8-bit products in fewer bits (Transformer Engine's module/base.py).
        part_seconds: of the host for each parameter and replica, where updated weights are gathered by themselves [s].
        attention: causal FLOP/s of its kernels over those of other products, forward and backward, where scores are not
            stored; and tokens, for which each kernel takes as if so many more were there: of a sequence, or of each
            part in a ring. None: all FLOPs, as fast as other products.
    """

    overlaps_sums: bool = False
    overlaps_context: bool = False
    gathers_ahead: bool = False
    gathers_casts: bool = False
    gathers_bytes: bool = False
    keeps_bytes: bool = False
    adds_gradients: bool = False
    sums_early: bool = False
    sums_whole: bool = False
    sums_by_chunk: bool = False
    fuses: bool = True
    gathers_again: bool = False
    pieces: int = 1
    scales_blocks: bool = False
    adds_fast: bool = False
    part_seconds: float = 0.0
    attention: tuple[float, float, float] | None = None


FLASH_2 = (0.395, 0.314, 0)
"""FlashAttention-2 on an H100, heads of 128: 314 and 249 TFLOP/s at 4,096 tokens, 325 and 277 at 8,192 (NVIDIA's
cudnn-frontend at 505fcfeb, benchmark/benchmark_results.csv, PyTorch's kernels; Shah et al. 2024, arXiv 2407.08608, have
319 and 333 forward, 284 for heads of 64), over the best product of 794.5 (Bekman, see `PRESETS`)."""
CUDNN = (0.94, 0.76, 1100)
"""cuDNN with Llama's heads, causal, 2,048 to 32,768 tokens on an H200 and a GB200 (cudnn-frontend at 3929da2,
benchmark/sdpa_benchmark_training: 644 and 541, 1574 and 1332 TFLOP/s at 8,192), over the best products of 794.5 and
1822; least squares of logarithms, off by 3.3% on average."""
BLOCK_SPEED = 0.951
"""MXFP8's products over those with one scale a tensor: Transformer Engine's at a layer's sizes on a B300, 6.812 and
7.161 ms (docs/examples/gemm_profiling at d0067d0da)."""
FAST_SPEED = 1.042
"""8-bit products of an H200 that add in fewer bits, over 16-bit ones: 1.905 (gemm_profiling, as above), where those of
`PRESETS` have 1.828."""
PLAIN = Runtime()
MEGATRON_CORE = Runtime(
    overlaps_sums=True,
    overlaps_context=True,
    gathers_ahead=True,
    gathers_casts=True,
    gathers_bytes=True,
    keeps_bytes=True,
    adds_gradients=True,
    sums_early=True,
    sums_by_chunk=True,
    adds_fast=True,
    attention=CUDNN,
)
"""Megatron-Core with Transformer Engine, as NeMo and Megatron-Bridge configure it for speed (their performance guides;
NVIDIA's configurations of MLPerf Training v3.1 and v4.0, whose `distributed_fused_adam.yaml` has overlap_grad_sync)."""
NANOTRON = Runtime(
    adds_gradients=True,
    sums_early=True,
    sums_whole=True,
    fuses=False,
    gathers_again=True,
    pieces=3,
    part_seconds=1e-5,
    attention=FLASH_2,
)
"""huggingface/nanotron at 2411b022: DDP without ZeRO (`optim/gradient_accumulator.py`); with ZeRO-1 one all-reduce of
all gradients (`trainer.py`, reduce_scatter=False), then `all_gather_coalesced`, which takes each replica's part of each
parameter out of a buffer by a copy of its own. The host takes 5 to 25 us for a kernel of PyTorch (dispatch and launch,
jiahuanglin.xyz, "From PyTorch op to kernel launch"), without autograd about 10. Its products gather beside themselves
(`tensor_parallel/functional.py`): beside its own rows of a product, which it multiplies apart from those of the ranks
before and after it; and beside products of the backward, for which it gathers inputs again. NCCL takes 24 of 132
multiprocessors: an H100's product of 80% of the peak falls to 47% (NVIDIA's forum, 337991), so nothing is won."""
