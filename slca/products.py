"""Matrix products and attention of the policy, each by the library that is the fastest on this machine.

Which one it is changes time and the last bits, never the mathematics. Left out: kernels of our own.
"""
from __future__ import annotations

import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

AVX512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
CPUINFO = Path("/proc/cpuinfo")
INTEL = "GenuineIntel" in (CPUINFO.read_text() if CPUINFO.exists() else platform.processor())
MKL_512 = AVX512 and INTEL and torch.backends.mkl.is_available()  # MKL uses AVX-512 on Intel's CPUs alone
MANY_ROWS = 512
PLAIN_SCORES = 2 ** 20  # queries times keys of a head up to which plain attention is the faster


def bf16_runs(device: torch.device) -> bool:
    """Has the machine bfloat16 units? Without, a CPU's products are six (AVX-512) to a hundred times slower than in
    float32, whether oneDNN offers them or not."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (
        torch.cpu._is_avx512_bf16_supported() or platform.machine().lower() not in ("x86_64", "amd64"))


def onednn_runs(weight: Tensor) -> bool:
    """Do oneDNN's kernels multiply by this matrix? Float32 is MKL's where that uses AVX-512.

    (One thread of an Intel Xeon, hidden 128: 1.5 to 3 x in weight gradients, 1 to 3 x in decoding 1 to 128 rows.)
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 and not MKL_512 or weight.dtype == torch.bfloat16 and bf16_runs(weight.device)


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] (of any stride, or packed by oneDNN) -> [..., out]; no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """F.linear and its gradients by oneDNN."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (onednn(grad, weight.t()) if need_x else None, onednn(flat.t(), rows.t()) if need_weight else None,
                flat.sum(0) if need_bias else None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; many rows of float32 by oneDNN where the CPU has AVX-512 and MKL does not use it (on AMD: 2 x).

    (Few rows gain little, and are the bits other libraries get.)
    """
    many = AVX512 and x.numel() >= MANY_ROWS * x.shape[-1]
    fast = many and x.dtype == weight.dtype == torch.float32 and onednn_runs(weight)
    if not fast or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    return _Product.apply(x, weight, bias)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """q [B,H,N,D], k and v [B,K,S,D] -> [B,H,N,D]. bias: of `score_bias`; None: a causal block, N == S.

    Plain products where they are faster than the fused kernel: short bfloat16 blocks on a CPU, most of all backwards.
    """
    b, h, n, d = q.shape
    span, groups = k.shape[2], h // k.shape[1]
    plain = q.dtype == torch.bfloat16 and q.device.type == "cpu" and n * span <= PLAIN_SCORES
    if bias is None and not plain:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    q = q.reshape(b, k.shape[1], groups * n, d)  # the query heads of a key head: keys are not repeated
    if not plain:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).reshape(b, h, n, d)
    with torch.autocast("cpu", enabled=False):
        if bias is None:
            bias = score_bias(torch.ones(1, n, n, dtype=torch.bool).tril(), groups, q.dtype)
        scores = torch.matmul(q * d ** -0.5, k.transpose(-1, -2))
        return torch.matmul(torch.softmax(scores + bias, -1), v).view(b, h, n, d)


def score_bias(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """mask bool [B,N,S], True is seen -> what is added to the scores of `groups` query heads a key head, 0 or -inf.

    [B,1,groups*N,S]; made once for all layers, which then save one tensor.
    """
    hidden = ~mask[:, None].repeat(1, 1, groups, 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=mask.device).masked_fill_(hidden, float("-inf"))
