"""Sampling from the policy: static KV cache, one cursor a row, log-probabilities stored at birth.

A prompt is prefilled once a group and its cache row copied to the members. Rows are never padded; a row that stops
leaves the batch at once (its cache row is swapped behind the live ones), and its place can be refilled. Every token
goes through the model once, over all turns of a dialogue. A token is drawn by inverse CDF with one uniform number of
the row's own stream, so a rollout depends on (seed, step, prompt, member) and not on who shares its batch. Left out on
purpose: top-k, top-p and penalties, under which the stored log-probability would not be that of the learner.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slca.model import KVCache, Policy

PREFILL_TOKENS = 8192  # padded tokens in one prefill call


@dataclass
class Completion:
    """ids: sampled tokens, the stop included; logprobs: one each; stopped: False where the length ran out."""

    ids: list[int]
    logprobs: list[float]
    stopped: bool


@dataclass(eq=False)
class Row:
    """One sequence being sampled. `fresh` restarts with every turn, the cache behind it does not."""

    slot: int
    uniforms: np.ndarray  # float32 [max_new], the stream of this row
    drawn: int = 0
    budget: int = 0  # tokens it may still draw in this turn
    fresh: Completion = field(default_factory=lambda: Completion([], [], False))


def row_stream(*key: int) -> np.random.Generator:
    """The explicit generator of one row, fixed by its key, e.g. (seed, step, prompt, member).

    The key's length is part of it: alone, numpy takes (1, 2) and (1, 2, 0) for the same.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([len(key), *map(int, key)])))


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits [n,V], uniforms float32 [n] in [0,1) -> token int64 [n] and its log-probability float32 [n].

    temperature 0 takes the most likely token and reports the log-probability of the untempered distribution.
    """
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    if temperature == 0:
        token = logp.argmax(-1)
    else:
        cdf = logp.exp().cumsum(-1)
        top = cdf[:, -1:]
        # strictly below the top, so that neither a token of probability 0 nor one past the end can be hit
        point = torch.minimum(uniforms[:, None] * top, torch.nextafter(top, torch.zeros_like(top)))
        token = torch.searchsorted(cdf, point, right=True).squeeze(1)
        token = token.clamp(max=logits.shape[1] - 1)  # NaN sorts past the end
    return token, logp.gather(1, token[:, None]).squeeze(1)


class Sampler:
    """A batch of `slots` cache rows over `max_len` tokens. Rows come and go with `admit` and `release`."""

    def __init__(self, policy: Policy, slots: int, max_len: int, temperature: float = 1.0,
                 stop_ids: Sequence[int] = (), stop_strings: Sequence[str] = (), tokenizer=None):
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature {temperature}: must be 0 (greedy) or more, and finite")
        stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if "" in stop_strings:
            raise ValueError("a stop string is empty")
        if stop_strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer")
        self.policy, self.temperature, self.tokenizer = policy, temperature, tokenizer
        self.cache = KVCache(policy.config, slots, max_len, policy.head.dtype, policy.device)
        self.state = torch.zeros(slots, policy.config.hidden_size, dtype=policy.head.dtype, device=policy.device)
        # ids the tokenizer does not know (a padded vocabulary) are cut off, here and in the learner alike
        self.vocabulary = min(policy.config.vocab_size, tokenizer.size if tokenizer else policy.config.vocab_size)
        self.stop_ids, self.stop_strings = set(stop_ids), stop_strings
        self._may_end: dict[int, bool] = {}  # id -> can it be the last token of a stop string?
        self.owner: list[Row | None] = [None] * slots
        self.tokens_run = 0  # tokens sent through the model, to prove that none goes twice

    @property
    def free(self) -> int:
        return self.owner.count(None)

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], uniforms: Sequence[Sequence[np.ndarray]]) -> list[list[Row]]:
        """Prefill each prompt once, give every member of its group a row. uniforms: [prompt][member] -> [max_new]."""
        slots = [s for s, row in enumerate(self.owner) if row is None]
        if sum(map(len, uniforms)) > len(slots):
            raise ValueError(f"{sum(map(len, uniforms))} rows asked for, {len(slots)} are free")
        groups, leaders = [], []
        for prompt, members in zip(prompts, uniforms, strict=True):
            if not len(prompt):
                raise ValueError("a prompt needs at least one token")
            group = [Row(slots.pop(0), u) for u in members]
            for row in group:
                self.owner[row.slot] = row
                self.cache.length[row.slot] = 0
            groups.append(group)
            leaders.append(group[0])
        self._run(leaders, prompts)
        target = [row.slot for group in groups for row in group[1:]]
        source = [group[0].slot for group in groups for _ in group[1:]]
        self._copy(source, target)
        return groups

    @torch.no_grad()
    def feed(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> None:
        """Append ids the policy did not sample (a tool turn) to rows that stopped; a new turn then begins."""
        # the token that stopped the row was sampled but not yet run
        self._run(rows, [[*row.fresh.ids[-1:], *new] for row, new in zip(rows, ids, strict=True)])
        for row in rows:
            row.fresh = Completion([], [], False)

    def _run(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> None:
        """Send ids through the model, in chunks of like length, and keep the last hidden state of each row."""
        order = sorted(range(len(rows)), key=lambda i: len(ids[i]))
        while order:
            width, size = len(ids[order[-1]]), 0
            while size < len(order) and (size + 1) * width <= max(PREFILL_TOKENS, width):
                size += 1
            chunk, order = order[-size:], order[:-size]
            batch = torch.zeros(size, width, dtype=torch.long)
            for j, i in enumerate(chunk):
                batch[j, :len(ids[i])] = torch.as_tensor(ids[i])
            count = torch.tensor([len(ids[i]) for i in chunk], device=self.policy.device)
            slot = torch.tensor([rows[i].slot for i in chunk], device=self.policy.device)
            hidden = self.policy.extend(batch.to(self.policy.device), self.cache, slot, count)
            self.state[slot] = hidden[torch.arange(size, device=slot.device), count - 1]
            self.tokens_run += int(count.sum())

    @torch.no_grad()
    def decode(self, rows: Sequence[Row], budgets: Sequence[int], leave_at: int | None = None) -> list[Row]:
        """Sample until every row (or `leave_at` of them) has stopped, by a stop token or by its budget.

        -> the rows that stopped, with their tokens in `fresh`; the others can be given to the next call.
        """
        device = self.policy.device
        self._to_front(rows)
        for row, budget in zip(rows, budgets, strict=True):
            row.budget = budget
            if row.drawn + budget > len(row.uniforms):
                raise ValueError(f"a row may draw {len(row.uniforms)} tokens, {row.drawn + budget} are asked for")
        live = [row for row in self.owner[:len(rows)]]
        done = [row for row in live if row.budget <= 0]
        live = self._drop(live, done)
        leave_at = len(rows) if leave_at is None else leave_at
        while live and len(done) < leave_at:
            uniforms = torch.tensor([row.uniforms[row.drawn] for row in live], device=device)
            logits = F.linear(self.state[:len(live)], self.policy.head[:self.vocabulary])
            token, logp = draw(logits, uniforms, self.temperature)
            stopped = []
            if not torch.isfinite(logp).all():
                raise FloatingPointError("a sampled log-probability is not finite, so the policy's weights are not")
            for row, i, lp in zip(live, token.tolist(), logp.tolist(), strict=True):
                row.fresh.ids.append(i)
                row.fresh.logprobs.append(lp)
                row.drawn, row.budget = row.drawn + 1, row.budget - 1
                row.fresh.stopped = i in self.stop_ids or bool(self.stop_strings) and self._ends(row.fresh.ids)
                if row.fresh.stopped or row.budget <= 0:
                    stopped.append(row)
            live = self._drop(live, stopped)
            done += stopped
            if live:
                feed = torch.tensor([[row.fresh.ids[-1]] for row in live], device=device)
                self.state[:len(live)] = self.policy.extend(feed, self.cache, len(live))[:, 0]
                self.tokens_run += len(live)
        return done

    def release(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.owner[row.slot] = None

    def _ends(self, ids: list[int]) -> bool:
        """Does the last token complete a stop string, however its text is cut into tokens? Only a tail is decoded."""
        last = ids[-1]
        if last not in self._may_end:
            text = self.tokenizer.decode([last])  # U+FFFD: a piece of a character
            self._may_end[last] = any(s[-1] in text or "\ufffd" in text for s in self.stop_strings)
        if not self._may_end[last]:
            return False
        longest = max(len(s.encode()) for s in self.stop_strings)  # a token may be a single byte
        tail = self.tokenizer.decode(ids[-longest - 4:])
        return any(s in tail for s in self.stop_strings)

    # ------------------------------------------------------------------ live rows stand in front, as views of the cache
    def _to_front(self, rows: Sequence[Row]) -> None:
        wanted = {id(row) for row in rows}
        vacant = [s for s in range(len(rows)) if id(self.owner[s]) not in wanted]
        self._swap([(row.slot, vacant.pop()) for row in rows if row.slot >= len(rows)])

    def _drop(self, live: list[Row], stopped: list[Row]) -> list[Row]:
        """Swap stopped rows behind the live ones -> the live rows in slot order."""
        if not stopped:
            return live
        gone = {id(row) for row in stopped}
        size = len(live) - len(stopped)
        movers = [row.slot for row in live[size:] if id(row) not in gone]
        holes = [row.slot for row in live[:size] if id(row) in gone]
        self._swap(list(zip(movers, holes, strict=True)))
        return self.owner[:size]

    def _swap(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        a, b = [p[0] for p in pairs], [p[1] for p in pairs]
        self._copy(a + b, b + a)
        for i, j in pairs:
            self.owner[i], self.owner[j] = self.owner[j], self.owner[i]
            for s in (i, j):
                if self.owner[s] is not None:
                    self.owner[s].slot = s

    def _copy(self, source: list[int], target: list[int]) -> None:
        if target:
            s, t = (torch.tensor(x, device=self.policy.device) for x in (source, target))
            self.cache.copy_rows(s, t)
            self.state[t] = self.state[s]


def generate(policy: Policy, prompts: Sequence[Sequence[int]], group_size: int = 1, max_new_tokens: int = 64,
             temperature: float = 1.0, stop_ids: Sequence[int] = (), stop_strings: Sequence[str] = (), tokenizer=None,
             seed: int = 0, max_rows: int = 128) -> list[Completion]:
    """Sample `group_size` completions a prompt (ids, ragged), members of a group adjacent in the result.

    temperature 0 is greedy. The stop stays in the ids; log-probabilities are of the tempered, vocabulary-masked
    distribution. At most `max_rows` rows live at once; freed rows take the next prompts.
    """
    if group_size < 1 or max_new_tokens < 1:
        raise ValueError(f"group_size {group_size} and max_new_tokens {max_new_tokens} must be 1 or more")
    if len(prompts) == 0:
        return []
    slots = max(group_size, min(max_rows, len(prompts) * group_size))
    sampler = Sampler(policy, slots, max(map(len, prompts)) + max_new_tokens, temperature, stop_ids, stop_strings,
                      tokenizer)
    waiting, live, results = list(range(len(prompts))), [], [[] for _ in prompts]
    while waiting or live:
        take = waiting[:sampler.free // group_size]
        waiting = waiting[len(take):]
        if take:
            streams = [[row_stream(seed, p, m).random(max_new_tokens, np.float32) for m in range(group_size)]
                       for p in take]
            for p, group in zip(take, sampler.admit([prompts[p] for p in take], streams), strict=True):
                results[p] = group
                live += group
        leave = min(len(live), max(group_size, slots // 4)) if waiting else None
        done = sampler.decode(live, [max_new_tokens - row.drawn for row in live], leave)
        sampler.release(done)
        live = [row for row in live if row not in done]
    return [row.fresh for group in results for row in group]
