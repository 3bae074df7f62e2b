"""Optimisers of both stages, their learning rates, and one guarded step.

Muon is written here: PyTorch's multiplies in bfloat16 always, which a CPU without such units does a hundred times
slower, and it does not take sharded parameters. Left out: schedules (`sft.py`, `train.py`) and gradient scaling.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slca.model import Policy, bf16_runs
from slca.ranks import split_like, whole


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


def optimizers(policy: Policy, kind: str, lr: float, weight_decay: float, betas: tuple[float, float],
               adam_lr: float | None = None) -> list[torch.optim.Optimizer]:
    """kind "adamw": one AdamW. "muon": Muon for the matrices inside the blocks, AdamW (adam_lr) for all else.

    Each parameter group remembers its peak rate as `peak`; `set_rate` scales it. Norms and biases do not decay.
    """
    matrices = [p for n, p in policy.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    tables = [p for n, p in policy.named_parameters() if p.ndim == 2 and ("embed" in n or "lm_head" in n)]
    vectors = [p for p in policy.parameters() if p.ndim < 2]
    decayed, found = tables, []
    if kind == "muon":
        found.append(Muon(matrices, lr=lr, weight_decay=weight_decay))
        lr = lr if adam_lr is None else adam_lr
    else:
        decayed = matrices + tables
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    found.append(torch.optim.AdamW(groups, lr=lr, betas=betas))
    for group in (g for o in found for g in o.param_groups):
        group["peak"] = group["lr"]
    return found


def set_rate(found: Sequence[torch.optim.Optimizer], share: float) -> None:
    """Every learning rate becomes `share` of its peak."""
    for group in (g for o in found for g in o.param_groups):
        group["lr"] = group["peak"] * share


def optimizer_step(policy: Policy, found: Sequence[torch.optim.Optimizer], grad_clip: float) -> float:
    """Clip, step, clear -> gradient norm before clipping. Raises FloatingPointError where it is not finite."""
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = float(whole(torch.nn.utils.get_total_norm(grads)))
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm {norm}")
    torch.nn.utils.clip_grads_with_norm_(policy.parameters(), grad_clip, torch.tensor(norm, device=policy.device))
    for optimizer in found:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm
