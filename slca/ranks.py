"""Many ranks under torchrun: start, sums over ranks, sharded policies. On one rank every function is the identity.

A policy is sharded by FSDP2 (`fully_shard`): each block is a group, all else is the root's, the tied embedding and head
together. Gradients are summed over ranks, not averaged: the losses are divided by counts over all ranks. Objects travel
as JSON, since PyTorch's own gathering of objects unpickles what it gets. Left out: tensor and pipeline parallelism.
"""
from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from slca.model import Policy
from slca.products import bf16_runs


def start(timeout_s: float = 1800.0) -> torch.device:
    """Join the other ranks that torchrun started, if any -> this rank's device. A rank that waits longer ends."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    return device


def end() -> None:
    """Leave the other ranks; all of them must.

    Gloo's threads outlive the group. One that lets go of the last tensors while Python ends already is killed in the
    middle of it, and the process aborts ("terminate called without an active exception"): they get time for it first.
    """
    if dist.is_initialized():
        gather(None)
        dist.destroy_process_group()
        time.sleep(0.2)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sum(numbers: Mapping[str, float]) -> dict[str, float]:
    """Sums over the ranks, in float64; the names are the same on all of them."""
    return _reduced(numbers, dist.ReduceOp.SUM)


def all_max(numbers: Mapping[str, float]) -> dict[str, float]:
    return _reduced(numbers, dist.ReduceOp.MAX)


def _reduced(numbers: Mapping[str, float], how) -> dict[str, float]:
    if world() == 1 or not numbers:
        return dict(numbers)
    values = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(values, how)
    return dict(zip(numbers, values.tolist(), strict=True))


def gather(value) -> list:
    """The JSON value of every rank, on every rank."""
    if world() == 1:
        return [value]
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world())]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    parts = [torch.zeros(max(map(int, sizes)), dtype=torch.uint8) for _ in range(world())]
    dist.all_gather(parts, torch.nn.functional.pad(own, (0, len(parts[0]) - len(own))))
    return [json.loads(bytes(part[:int(n)].tolist())) for part, n in zip(parts, sizes, strict=True)]


def placed(policy: Policy, device: torch.device, precision: str, shard: bool = True) -> Policy:
    """The policy where it is trained: on the device, or sharded over the ranks if there are several.

    shard False: every rank keeps a whole one, which stays the same by the sum of gradients (`sum_gradients`).
    precision "bf16": gathered weights are bfloat16; the shards, their gradients and the sums over ranks are float32.
    """
    if world() == 1 or not shard:
        return policy.to(device)
    mixed = MixedPrecisionPolicy()
    if precision == "bf16" and bf16_runs(device):
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (world(),))
    for module in (*policy.model.layers, policy):  # reshards after every pass, the root too: nothing whole is left over
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=mixed)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    register_fsdp_forward_method(policy, "run")
    return policy


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum gradients that are whole on every rank, in one piece; FSDP has summed those of shards already."""
    grads = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
    if world() > 1 and grads:
        line = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(line)
        for g, part in zip(grads, line.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))


def whole(t: Tensor) -> Tensor:
    """A sharded tensor in full, on every rank; all of them must ask."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def split_like(t: Tensor, like: Tensor) -> Tensor:
    """A tensor that is the same on all ranks, sharded as another is."""
    return distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None) if isinstance(
        like, DTensor) else t


def share(count: int) -> list[int]:
    """Which of `count` things are this rank's: every world-th."""
    return list(range(rank(), count, world()))


def level_share(sizes: Sequence[int]) -> list[int]:
    """Which of these are this rank's: dealt out largest first, forth and back, for sums that are nearly level."""
    order, lap = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)), 2 * world()
    return [i for at, i in enumerate(order) if min(at % lap, lap - 1 - at % lap) == rank()]
