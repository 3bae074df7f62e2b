"""Which token belongs to which reward stream: labels from the policy mask alone.

A rollout's policy tokens come in runs, one a turn, with tool results (mask 0) between them. Every run but the last is
tool use, the last is the summary. Left out: any look at the text (the strict rule is told which tokens open a call).
"""
from __future__ import annotations

import torch
from torch import Tensor

IGNORED, TOOL, SUMMARY = 0, 1, 2


def binary_mask(mask: Tensor, name: str = "policy_mask") -> Tensor:
    """mask [B,T], any dtype -> the same as bool. ValueError unless it is two-dimensional and holds only 0 and 1."""
    mask = torch.as_tensor(mask)
    if mask.dim() != 2:
        raise ValueError(f"{name} must have shape [B, T], got {list(mask.shape)}")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name} must hold only 0 and 1")
    return mask.bool()


def runs(mask_row: Tensor) -> list[tuple[int, int]]:
    """mask_row [T] of 0/1 -> its maximal runs of ones, left to right, as half-open (start, end)."""
    edges = torch.nn.functional.pad(torch.as_tensor(mask_row).bool().int(), (1, 1)).diff()
    starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def segment_labels(policy_mask: Tensor, rule: str = "positional", has_open_call: Tensor | None = None) -> Tensor:
    """policy_mask [B,T] of 0/1 -> int64 labels [B,T]: 0 ignored, 1 tool, 2 summary.

    `positional` (the paper's): the last run of a row is the summary, earlier runs are tool use; a row of one run is all
    summary. So a rollout that was cut on a call turn has that call labelled summary. `strict` (ours) repairs this with
    has_open_call, bool [B,T], true on tokens of turns that open a call: a last run with such a token is tool use.
    Raises ValueError for a bad shape, a mask that is not 0/1, an unknown rule, or strict without has_open_call.
    """
    mask = binary_mask(policy_mask)
    if rule not in ("positional", "strict"):
        raise ValueError(f"unknown segment rule {rule!r}: use 'positional' or 'strict'")
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    run = starts.long().cumsum(1)  # [B,T] number of the run a policy token is in, from 1
    last = mask & (run == run[:, -1:])  # [B,T] the last run of each row
    labels = mask.long() + last.long()
    if rule == "strict":
        if has_open_call is None:
            raise ValueError("rule 'strict' needs has_open_call")
        opens = binary_mask(has_open_call, "has_open_call")
        if opens.shape != mask.shape:
            raise ValueError(f"has_open_call has shape {list(opens.shape)}, policy_mask {list(mask.shape)}")
        ends_on_call = (last & opens).any(1, keepdim=True)  # [B,1]
        labels = torch.where(last & ends_on_call, TOOL, labels)
    return labels
