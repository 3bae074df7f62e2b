"""Where a step's time goes: seconds and tokens of each phase, for `train.py --profile`.

    with phases("decode", tokens): ...

One set of counters a process. Off, a phase costs nothing but the call; on, a GPU is waited for at its ends.
"""
from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Counters by phase, in order of first use: seconds, tokens, calls."""

    def __init__(self):
        self.on = False
        self.found: dict[str, list] = {}

    def clear(self) -> None:
        self.found = {}

    @contextmanager
    def __call__(self, name: str, tokens: int = 0) -> Iterator[None]:
        if not self.on:
            yield
            return
        start = _now()
        try:
            yield
        finally:
            entry = self.found.setdefault(name, [0.0, 0, 0])
            entry[0], entry[1], entry[2] = entry[0] + _now() - start, entry[1] + tokens, entry[2] + 1

    def add_tokens(self, name: str, tokens: int) -> None:
        """Tokens that are counted only after the phase."""
        if self.on:
            self.found[name][1] += tokens

    def table(self, wall: float) -> str:
        """Seconds, share of `wall` seconds, tokens and tokens a second of every phase; the rest is "other"."""
        rows = [(name, *entry) for name, entry in self.found.items()]
        rows.append(("other", wall - sum(row[1] for row in rows), 0, 0))
        lines = [f"{'phase':<18}{'seconds':>9}{'share':>8}{'tokens':>10}{'tokens/s':>10}{'calls':>8}"]
        for name, seconds, tokens, calls in rows:
            rate = f"{tokens / seconds:.0f}" if tokens and seconds > 0 else "-"
            lines.append(f"{name:<18}{seconds:>9.3f}{seconds / max(wall, 1e-9):>8.1%}{tokens or '-':>10}{rate:>10}"
                         f"{calls or '-':>8}")
        return "\n".join(lines)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


phases = Phases()
