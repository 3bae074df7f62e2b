"""Low-rank adapters, LoRA (Hu et al. 2021, arXiv 2106.09685): y = W x + alpha / rank * B A x; A and B are trained.

The base stays frozen, in bfloat16 if wanted, under adapters in float32. Without its adapters a policy is its own
reference for the KL term. Sampling and export see one merged matrix. Left out: dropout, adapters of embeddings, files
of adapters alone.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slca.model import Linear, Policy
from slca.products import linear
from slca.ranks import rank, split_like, whole


class LoRALinear(Linear):
    """A frozen Linear with an adapter: lora_a [rank, in] from Kaiming's uniform, lora_b [out, rank] zeros."""

    def __init__(self, base: Linear, rank: int, alpha: float, draw: torch.Generator):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.weight, self.bias = (
            base.in_features, base.out_features, base.weight, base.bias)
        self.alpha, self.on = alpha, True
        like = {"dtype": torch.promote_types(base.weight.dtype, torch.float32), "device": base.weight.device}
        self.lora_a = nn.Parameter(first_a(rank, self.in_features, draw).to(**like))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)
        if not self.on:
            return y
        low = linear(x, self.lora_a.to(x.dtype)) * (self.alpha / len(self.lora_a))
        return y + linear(low, self.lora_b.to(low.dtype))


def first_a(rank: int, size: int, draw: torch.Generator) -> Tensor:
    """lora_a before training, float32 [rank, size]: kaiming_uniform_(a=sqrt(5)) as in loralib and peft."""
    return torch.empty(rank, size).uniform_(-size ** -0.5, size ** -0.5, generator=draw)


def adapters(policy: Policy) -> list[LoRALinear]:
    return [m for m in policy.modules() if isinstance(m, LoRALinear)]


def add_lora(policy: Policy, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Freeze the policy and give every `targets` matrix of its blocks an adapter; before the policy is sharded.

    Raises ValueError where a target is not the name of such a matrix, or there are adapters already.
    """
    blocks = policy.model.layers
    places = [(part, name) for block in blocks for part in block.children()
              for name, module in part.named_children() if isinstance(module, Linear)]
    names = list(dict.fromkeys(name for _, name in places))
    if wrong := [t for t in targets if t not in names]:
        raise ValueError(f"lora.targets: no matrix is called {', '.join(wrong)}; expected some of {', '.join(names)}")
    if rank < 1 or not targets or adapters(policy):
        raise ValueError("adapters need a rank of 1 or more, a target and a policy without any")
    policy.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for part, name in places:
        if name in targets:
            setattr(part, name, LoRALinear(getattr(part, name), rank, alpha, draw))


@contextmanager
def adapters_off(policy: Policy | None) -> Iterator[None]:
    """The policy without its adapters: the one that training began with. Nothing happens where it has none."""
    found = [] if policy is None else adapters(policy)
    for module in found:
        module.on = False
    try:
        yield
    finally:
        for module in found:
            module.on = True


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """W + alpha / rank * B A in the adapter's type, float32 or wider; [out, in]."""
    return torch.addmm(weight.to(b.dtype), b, a, alpha=alpha / len(a))


def merged_tensors(state: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Whole tensors by name, adapters among them -> those of a plain policy, each in its own type."""
    found = {name: t for name, t in state.items() if not name.endswith((".lora_a", ".lora_b"))}
    for name in (n.removesuffix(".lora_a") for n in state if n.endswith(".lora_a")):
        weight = state[f"{name}.weight"]
        found[f"{name}.weight"] = merged_weight(weight, state[f"{name}.lora_a"], state[f"{name}.lora_b"], alpha).to(
            weight.dtype)
    return found


def whole_weight(policy: Policy, name: str) -> Tensor:
    """A parameter by its name in checkpoints, in full, its adapter merged; every rank must ask."""
    module = policy.get_submodule(name.rpartition(".")[0])
    weight = whole(policy.get_parameter(name))
    if not (isinstance(module, LoRALinear) and name.endswith(".weight")):
        return weight
    return merged_weight(weight, whole(module.lora_a), whole(module.lora_b), module.alpha)


@torch.no_grad()
def merged_state(policy: Policy) -> dict[str, Tensor]:
    """Plain checkpoint names -> whole weights in their own type, adapters merged, on the CPU of rank 0.

    Empty on the other ranks, which all must ask.
    """
    found = {}
    for name, p in policy.named_parameters():
        if not name.endswith((".lora_a", ".lora_b")):
            t = whole_weight(policy, name)
            if rank() == 0:
                found[name] = t.to("cpu", p.dtype)
    return found


@torch.no_grad()
def merge_adapters(policy: Policy, seed: int) -> None:
    """Take the adapters into the weights (rounded to their type) and start anew: a stage of a run ends so.

    The policy samples as before, what `adapters_off` gives is now this policy, and it is the one that `add_lora` with
    this seed makes of its checkpoint.
    """
    draw = torch.Generator().manual_seed(seed)
    for module in adapters(policy):
        weight, a, b = module.weight, whole(module.lora_a), module.lora_b
        rows, own_b = (t.to_local() if isinstance(t, DTensor) else t for t in (weight, b))  # the same rows of both
        rows.copy_(merged_weight(rows, a, own_b, module.alpha))
        fresh = first_a(*a.shape, draw).to(a)
        module.lora_a.copy_(split_like(fresh, module.lora_a))
        own_b.zero_()
