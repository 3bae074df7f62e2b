"""Segmentation: the golden vectors, hand examples, the strict rule, and that labels 1 and 2 partition the mask."""
import json
from pathlib import Path

import pytest
import torch

from slca.segments import runs, segment_labels

GOLDEN = json.loads((Path(__file__).parent / "golden" / "advantage_segmentation.json").read_text())


def row(digits: str) -> torch.Tensor:
    return torch.tensor([[int(d) for d in digits]])


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["id"])
def test_golden(case):
    mask, want = torch.tensor(case["input"]["policy_mask"]), case["expected"]
    for dtype in (torch.int64, torch.bool, torch.float32):
        labels = segment_labels(mask.to(dtype))
        assert labels.dtype == torch.int64 and labels.tolist() == want["token_labels"]
    assert [[list(r) for r in runs(m)] for m in mask] == want["runs"]
    assert (labels == 1).any(1).tolist() == want["tool_present"]
    assert (labels == 2).any(1).tolist() == want["summary_present"]


@pytest.mark.parametrize("mask, labels", [  # W1
    ("110011101", "110011102"), ("0011100000", "0022200000"), ("1100100110", "1100100220"), ("0000", "0000"),
    ("1110011001111", "1110011002222"), ("110011", "110022")])
def test_by_hand(mask, labels):
    assert segment_labels(row(mask)).tolist() == row(labels).tolist()


@pytest.mark.parametrize("mask, opens, labels", [
    ("110011", "110011", "110011"),  # the last run opens a call: it is tool use
    ("110011", "110001", "110011"),  # one token of the turn is enough, and the whole run follows
    ("110011", "110000", "110022"),
    ("001100", "000000", "002200"), ("001100", "001100", "001100"),
    ("110011", "111100", "110022"),  # tokens outside the mask do not count
])
def test_strict(mask, opens, labels):
    assert segment_labels(row(mask), "strict", row(opens).bool()).tolist() == row(labels).tolist()


def test_labels_partition_the_mask():
    """Invariant 1, against a row-by-row reading of the rule."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        mask = torch.rand(6, 17, generator=generator) < torch.rand(1, generator=generator)
        labels = segment_labels(mask)
        assert torch.equal(labels > 0, mask)
        for m, got in zip(mask, labels, strict=True):
            want = torch.zeros(17, dtype=torch.long)
            for i, (start, end) in enumerate(found := runs(m)):
                want[start:end] = 2 if i == len(found) - 1 else 1
            assert torch.equal(got, want)


@pytest.mark.parametrize("arguments", [
    (torch.ones(3),), (row("102"),), (torch.tensor([[0.5]]),), (row("10"), "none"), (row("10"), "strict"),
    (row("10"), "strict", row("101"))])
def test_refuses(arguments):
    with pytest.raises(ValueError):
        segment_labels(*arguments)
