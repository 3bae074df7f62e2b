"""Optimisers: Muon against PyTorch's and by its singular values, what decays at which rate, clipping by hand."""
import pytest
import torch

from slca.model import ModelConfig, Policy, new_policy
from slca.optim import Muon, optimizer_step, optimizers, orthogonalised, set_rate


def make(seed: int = 0) -> Policy:
    return new_policy(ModelConfig("qwen2", 41, 32, 48, 2, 4, 2), seed)


def test_muon_is_pytorchs_up_to_its_bfloat16():
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(s, generator=draw) for s in ((12, 40), (40, 12), (16, 16))]
    found = []
    for kind in (Muon, torch.optim.Muon):
        params = [torch.nn.Parameter(t.clone()) for t in start]
        optimizer, draw = kind(params, lr=0.1, weight_decay=0.2), torch.Generator().manual_seed(2)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=draw)
            optimizer.step()
        found.append([p.detach() - t for p, t in zip(params, start, strict=True)])
    for own, peer in zip(*found, strict=True):
        assert (own - peer).norm() / peer.norm() < 0.02


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_orthogonalised_keeps_the_directions_and_levels_the_singular_values(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    x = orthogonalised(g).float()
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    assert 0.5 < s.min() and s.max() < 1.3
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    inner = u.T @ x @ v.T  # diagonal in the singular vectors of g
    assert (inner - inner.diagonal().diag()).abs().max() < 0.03 and inner.diagonal().min() > 0.5


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_clipping_by_hand(clip):
    """SGD shows the clipped gradient; the norm returned is the one before."""
    policy = make()
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    before, n = policy.model.norm.weight.detach().clone(), sum(p.numel() for p in policy.parameters())
    norm = optimizer_step(policy, [torch.optim.SGD(policy.parameters(), lr=1.0)], clip)
    assert norm == pytest.approx(n ** 0.5, rel=1e-5)
    step = (before - policy.model.norm.weight.detach())[0]
    assert float(step) == pytest.approx(min(1.0, clip / n ** 0.5), rel=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizers_and_rates(kind):
    policy = make(1)
    found = optimizers(policy, kind, 0.02, 0.1, (0.8, 0.9), 0.003)
    groups = [g for o in found for g in o.param_groups]
    owners = {n: [g for g in groups if any(q is p for q in g["params"])] for n, p in policy.named_parameters()}
    for name, p in policy.named_parameters():
        (group,) = owners[name]  # each parameter has exactly one
        inside = p.ndim == 2 and name.startswith("model.layers")
        assert group["weight_decay"] == (0.1 if p.ndim == 2 else 0.0)
        assert group["peak"] == group["lr"] == (0.003 if kind == "muon" and not inside else 0.02)
    assert [type(o).__name__ for o in found] == (["Muon", "AdamW"] if kind == "muon" else ["AdamW"])
    assert found[-1].param_groups[0]["betas"] == (0.8, 0.9)
    for share in (0.25, 1.0, 0.0):  # of the peak, not of the last rate
        set_rate(found, share)
        assert all(g["lr"] == g["peak"] * share for g in groups)
