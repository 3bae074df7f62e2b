"""Optimisers of both stages, their learning rates, and one guarded step.

Muon is written here: PyTorch's multiplies in bfloat16 always, which a CPU without such units does a hundred times
slower, and it does not take sharded parameters. AdamW is PyTorch's, or the one here where its moments are to take less
of the device's memory. Left out: schedules (`sft.py`, `train.py`) and gradient scaling.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slca.model import Policy
from slca.products import bf16_runs
from slca.ranks import rank, split_like, sum_gradients, whole
from slca.settings import OptimConfig

CHUNK = 2 ** 24  # elements updated at a time: what is float32 or on the device for a moment stays small


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; for matrices. Jordan et al. 2024, and the same update as torch.optim.Muon.

    p <- (1 - lr * weight_decay) p - lr * sqrt(max(1, rows / columns)) * orthogonalised(g + momentum-averaged g)
    """

    def __init__(self, params, lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalised(whole(p.grad.lerp(state["momentum_buffer"], group["momentum"]))).to(p.dtype)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(split_like(update, p), alpha=-group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])))


def orthogonalised(g: Tensor) -> Tensor:
    """g [n,m] with its singular values brought near 1 (.7 to 1.2) by five Newton-Schulz steps, in bfloat16 if it runs.

    Coefficients of https://github.com/KellerJordan/Muon.
    """
    x = g.to(torch.bfloat16 if bf16_runs(g.device) else torch.float32)
    x = x.T if g.shape[0] > g.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if g.shape[0] > g.shape[1] else x


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019; the update of torch.optim.AdamW) whose moments take less of the device.

    dtype: of the moments, float32 or bfloat16; offload: keep them on the CPU (pinned) and bring them a piece at a time.
    The state of a parameter is three tensors: step (a number), exp_avg and exp_avg_sq, sharded as the parameter is. The
    noise of the rounding follows from seed, step, parameter and the rank that holds these rows of it, so a run that is
    resumed repeats bit for bit.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.01,
                 dtype: torch.dtype = torch.float32, offload: bool = False, seed: int = 0, eps: float = 1e-8):
        self.dtype, self.offload, self.seed = dtype, offload, seed
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        for i, (group, p) in enumerate(pairs):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros(())
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(p, dtype=self.dtype, device="cpu" if self.offload else None)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = self._kept(state[name], p)
            state["step"] += 1
            step = int(state["step"])
            part = rank() if isinstance(p, DTensor) else 0  # replicas have to stay equal
            key = np.random.SeedSequence((self.seed, step, i, part)).generate_state(1)
            noise = torch.Generator(p.device).manual_seed(int(key[0]))
            kept = [_local(t).view(-1) for t in (p, state["exp_avg"], state["exp_avg_sq"])]  # views: changed in place
            for piece in zip(*(t.split(CHUNK) for t in (_local(p.grad).reshape(-1), *kept)), strict=True):
                self._update(*piece, group, step, noise)
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies to the CPU have arrived before anyone reads them there

    def _update(self, grad: Tensor, p: Tensor, kept_m: Tensor, kept_v: Tensor, group: dict, step: int,
                noise: torch.Generator) -> None:
        wide = torch.promote_types(p.dtype, torch.float32)
        m, v = (t.to(p.device, wide, non_blocking=True) for t in (kept_m, kept_v))
        (beta1, beta2), lr = group["betas"], group["lr"]
        grad = grad.to(wide)
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = v.sqrt().div_(math.sqrt(1 - beta2 ** step)).add_(group["eps"])
        p.mul_(1 - lr * group["weight_decay"])
        p.addcdiv_(m, scale, value=-lr / (1 - beta1 ** step))
        for kept, new in ((kept_m, m), (kept_v, v)):
            kept.copy_(randomly_rounded(new, noise) if self.dtype == torch.bfloat16 else new, non_blocking=True)

    def _kept(self, t: Tensor, p: Tensor) -> Tensor:
        """State as and where it is to be, also after a checkpoint has put it elsewhere."""
        t = t.to("cpu" if self.offload else p.device, self.dtype)
        if self.offload and p.is_cuda and not _local(t).is_pinned():
            _local(t).set_(_local(t).pin_memory())
        return t


def randomly_rounded(x: Tensor, draw: torch.Generator) -> Tensor:
    """float32 -> bfloat16, up or down by chance, so that the mean is x: random bits under the cut, then the cut.

    To the nearest would freeze exp_avg_sq: neighbours in bfloat16 are 2^-8 to 2^-7 of a value apart, and with
    beta2 = .999 a step takes v down by .001 v at most and up by more than .002 v only where g^2 > 3 v.
    """
    bits = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=draw)
    return bits.add_(x.float().view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)


def _local(t: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, in place."""
    return t.to_local() if isinstance(t, DTensor) else t


def optimizers(policy: Policy, kind: str, lr: float, weight_decay: float, betas: tuple[float, float],
               adam_lr: float | None = None, options: OptimConfig | None = None,
               seed: int = 0) -> list[torch.optim.Optimizer]:
    """kind "adamw": one AdamW. "muon": Muon for the matrices inside the blocks, AdamW (adam_lr) for all else.

    Frozen parameters get none. Each parameter group remembers its peak rate as `peak`; `set_rate` scales it. Norms and
    biases do not decay. options: how AdamW keeps its moments (Muon's stay float32, on the device); seed: of their
    rounding.
    """
    trained = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    tables = [p for n, p in trained if p.ndim == 2 and ("embed" in n or "lm_head" in n)]
    vectors = [p for n, p in trained if p.ndim < 2]
    decayed, found = tables, []
    if kind == "muon":
        found.append(Muon(matrices, lr=lr, weight_decay=weight_decay))
        lr = lr if adam_lr is None else adam_lr
    else:
        decayed = matrices + tables
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if groups := [group for group in groups if group["params"]]:
        found.append(torch.optim.AdamW(groups, lr=lr, betas=betas) if options in (None, OptimConfig()) else AdamW(
            groups, lr, betas, dtype=torch.bfloat16 if options.state == "bf16" else torch.float32,
            offload=options.offload, seed=seed))
    for group in (g for o in found for g in o.param_groups):
        group["peak"] = group["lr"]
    return found


def set_rate(found: Sequence[torch.optim.Optimizer], share: float) -> None:
    """Every learning rate becomes `share` of its peak."""
    for group in (g for o in found for g in o.param_groups):
        group["lr"] = group["peak"] * share


def optimizer_step(policy: Policy, found: Sequence[torch.optim.Optimizer], grad_clip: float) -> float:
    """Clip, step, clear -> gradient norm before clipping. Raises FloatingPointError where it is not finite."""
    sum_gradients(policy.parameters())
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = float(whole(torch.nn.utils.get_total_norm(grads)))
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm {norm}")
    torch.nn.utils.clip_grads_with_norm_(policy.parameters(), grad_clip, torch.tensor(norm, device=policy.device))
    for optimizer in found:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm
