"""Sampling from the policy: which rows run, what they draw, when they stop; log-probabilities stored at birth.

A prompt is prefilled once a group and read by all its rows (`engine.py`). A row that stops leaves the batch at once
(`slots.py`), and its place can be refilled. Every token goes through the model once, over all turns of a dialogue. A
token is drawn by inverse CDF with one uniform number of the row's own stream, so a rollout depends on (seed, step,
prompt, member) and not on who shares its batch. Left out on purpose: top-k, top-p and penalties, under which the stored
log-probability would not be that of the learner.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from slca.engine import Cache
from slca.model import Policy
from slca.phases import phases
from slca.slots import WIDTH_STEP, Completion, Prompt, Row, Slots, rounded

PREFILL_TOKENS = 8192  # padded tokens in one prefill call


def row_stream(*key: int) -> np.random.Generator:
    """The explicit generator of one row, fixed by its key, e.g. (seed, step, prompt, member).

    The key's length is part of it: alone, numpy takes (1, 2) and (1, 2, 0) for the same.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([len(key), *map(int, key)])))


class Sampler(Slots):
    """Up to `slots` rows of up to `max_len` tokens each. Rows come and go with `admit` and `release`.

    temperature: of all rows, or None, where each row brings its own (`admit`, `fork`).
    dtype: of weights and cache; None: the policy's own. The weights are packed here; `refresh` packs them again.
    """

    def __init__(self, policy: Policy, slots: int, max_len: int, temperature: float | None = 1.0,
                 stop_ids: Sequence[int] = (), stop_strings: Sequence[str] = (), tokenizer=None,
                 dtype: torch.dtype | None = None):
        if temperature is not None and not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature {temperature}: must be 0 (greedy) or more, and finite")
        stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if "" in stop_strings:
            raise ValueError("a stop string is empty")
        if stop_strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer")
        self.tokenizer = tokenizer
        # ids the tokenizer does not know (a padded vocabulary) are cut off, here and in the learner alike
        vocabulary = min(policy.config.vocab_size, tokenizer.size if tokenizer else policy.config.vocab_size)
        self.stop_ids, self.stop_strings = set(stop_ids), stop_strings
        self._may_end = np.full(vocabulary, -1, np.int8)  # id -> can it be the last of a row? -1: not looked at yet
        self.tokens_run = 0  # tokens sent through the model and kept, to prove that none goes twice
        super().__init__(policy, slots, max_len, temperature, vocabulary, dtype)

    @property
    def free(self) -> int:
        return self.owner.count(None)

    @torch.inference_mode()
    def admit(self, prompts: Sequence[Sequence[int]], uniforms: Sequence[Sequence[np.ndarray]],
              temperatures: Sequence[float] | None = None) -> list[list[Row]]:
        """Prefill each prompt once, give every member of its group a row. uniforms: [prompt][member] -> [max_new].

        temperatures: one a prompt, for a sampler that has none of its own.
        """
        slots = [s for s, row in enumerate(self.owner) if row is None]
        if sum(map(len, uniforms)) > len(slots):
            raise ValueError(f"{sum(map(len, uniforms))} rows asked for, {len(slots)} are free")
        for ids in prompts:
            if not len(ids):
                raise ValueError("a prompt needs at least one token")
            if len(ids) > self.max_len:
                raise ValueError(f"the KV cache holds {self.max_len} tokens a row, {len(ids)} are needed")
        groups = []
        for ids, members in zip(prompts, uniforms, strict=True):
            prompt = None
            if len(members) > 1:
                prompt = Prompt(self.groups.index(None), len(ids), len(members))
                self.groups[prompt.slot] = prompt
            groups.append([Row(slots.pop(0), u, prompt, 0 if prompt else len(ids)) for u in members])
            for row in groups[-1]:
                self.owner[row.slot] = row
        for cache in (self.cache, self.prompts):  # alone in the row's slot, or for all of the group
            chosen = [(group[0], ids) for group, ids in zip(groups, prompts, strict=True)
                      if group and (group[0].prompt is None) == (cache is self.cache)]
            self._prefill([row for row, _ in chosen], [ids for _, ids in chosen], cache)
        rows = [row for group in groups for row in group]
        if rows:
            at = self._ints(row.slot for row in rows)
            self.state[at] = self.state[self._ints(group[0].slot for group in groups for _ in group)]
            self.length[at], self.start[at] = self._ints(r.length for r in rows), self._ints(map(_start, rows))
            self.drawn[at] = 0
            self._store_streams(rows, at)
            if self.temperature is None:
                each = zip(temperatures, groups, strict=True)
                self.heat[at] = torch.tensor([t for t, group in each for _ in group], device=self.device)
        return groups

    @torch.inference_mode()
    def fork(self, source: Row, keep: int, uniforms: np.ndarray, temperature: float = 0.0,
             into: Row | None = None) -> Row:
        """A row that begins with the first `keep` tokens of another one's slot; it is to be fed next.

        into: an ended row, the source itself perhaps, that gives up its slot for it; None takes a free one.
        """
        if source.prompt is not None or not 0 < keep <= source.length:
            raise ValueError(f"a row of {source.length} tokens with a prompt of its own is needed, to keep {keep}")
        slot = self.owner.index(None) if into is None else into.slot
        if slot != source.slot:
            self.cache.copy(self._ints([source.slot]), self._ints([slot]), keep)
        self.owner[slot] = row = Row(slot, uniforms, length=keep)
        at = self._ints([slot])
        self.length[at], self.start[at], self.drawn[at], self.heat[at] = keep, 0, 0, temperature
        self._store_streams([row], at)
        return row

    def _prefill(self, leaders: list[Row], prompts: list[Sequence[int]], cache: Cache) -> None:
        """Run prompts into slots of the cache and keep the last hidden states as the leaders'."""
        for chunk in _chunks(prompts):
            some = [leaders[i] for i in chunk]
            ids, count = self._batch([prompts[i] for i in chunk])
            with phases("prefill", sum(len(prompts[i]) for i in chunk)):
                self._reserve(cache, ids.shape[1])
                slots = self._ints(r.slot if cache is self.cache else r.prompt.slot for r in some)
                hidden = self.engine.prefill(ids, cache, slots)
                self.state[self._ints(r.slot for r in some)] = hidden[self.engine.numbers(len(some)), count - 1]
        self.tokens_run += sum(map(len, prompts))

    @torch.inference_mode()
    def feed(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> None:
        """Append ids the policy did not sample (a tool turn) to rows that stopped; a new turn then begins."""
        # the token that stopped the row was sampled but not yet run
        ids = [[*(row.fresh.ids[-1:] if row.ended else ()), *new] for row, new in zip(rows, ids, strict=True)]
        for row, new in zip(rows, ids, strict=True):
            if not new:
                raise ValueError("a row is fed no token and has none left to run")
            self._check_room(row, len(new))
        for chunk in _chunks(ids):
            some = [rows[i] for i in chunk]
            batch, count = self._batch([ids[i] for i in chunk])
            with phases("prefill", sum(len(ids[i]) for i in chunk)):
                slots, length = self._ints(r.slot for r in some), self._ints(r.length for r in some)
                span = rounded(max(r.length + len(ids[i]) for r, i in zip(some, chunk, strict=True)), self.column_step)
                self._reserve(self.cache, span)
                hidden = self.engine.extend(
                    batch, self.cache, slots, length, span, self._ints(map(_start, some)), self.prompts,
                    self._ints(r.prompt.slot if r.prompt else 0 for r in some), max(map(_start, some)))
                self.state[slots] = hidden[self.engine.numbers(len(some)), count - 1]
                self.length[slots] = length + count
        for row, new in zip(rows, ids, strict=True):
            row.length += len(new)
            self.tokens_run += len(new)
            row.fresh, row.ended = Completion([], [], False), False

    @torch.inference_mode()
    def decode(self, rows: Sequence[Row], budgets: Sequence[int], leave_at: int | None = None,
               looks: int | None = None) -> list[Row]:
        """Sample until every row (or `leave_at` of them) has stopped, by a stop token or by its budget.

        looks: come back after so many looks at the tokens in any case (one a token, or one in `look_every` on a GPU).
        -> the rows that stopped, with their tokens in `fresh`; the others can be given to the next call.
        """
        for row, budget in zip(rows, budgets, strict=True):
            if row.ended and budget > 0:
                raise ValueError("a row whose turn has ended is to be fed or released, not decoded")
            row.budget = budget
            if row.drawn + budget > len(row.uniforms):
                raise ValueError(f"a row may draw {len(row.uniforms)} tokens, {row.drawn + budget} are asked for")
            self._check_room(row, budget - 1)  # the last one is drawn, and not run before the next turn
        done = [row for row in rows if row.budget <= 0]
        live = self._to_front([row for row in rows if row.budget > 0])
        leave_at = len(rows) if leave_at is None else leave_at
        while live and len(done) < leave_at and looks != 0:
            looks = None if looks is None else looks - 1
            before = self.tokens_run
            with phases("decode"):
                stopped = self._record(live, *self._look(live))
                if stopped:
                    live = self._to_front([row for row in live if row not in stopped])
                    done += stopped
                if live:
                    b, span = self._sizes(live, 1)
                    with self._untouched(len(live), b):
                        self._run(b, span)
                    for row in live:
                        row.length += 1
                    self.tokens_run += len(live)
            phases.add_tokens("decode", self.tokens_run - before)
        return done

    def release(self, rows: Sequence[Row]) -> None:
        """Give the rows' slots back, and those of prompts that no row needs any more."""
        for row in rows:
            self.owner[row.slot] = None
            if row.prompt is not None:
                row.prompt.rows -= 1
                if not row.prompt.rows:
                    self.groups[row.prompt.slot] = None

    def _look(self, live: list[Row]) -> tuple[np.ndarray, np.ndarray]:
        """Draw and run `look_every` tokens a row (the last one is only drawn) -> tokens, logprobs [rows, steps]."""
        steps = min(self.look_every, min(row.budget for row in live))
        b, span = self._sizes(live, steps)
        if steps == 1 and b == len(live):
            self._draw(b)
            return self.token[:b, None].cpu().numpy(), self.logprob[:b].cpu().numpy()
        tokens, logprobs = [], []
        with self._untouched(len(live), b):
            for step in range(steps):
                self._advance(b, span) if step else self._draw(b)
                tokens.append(self.token[:b].clone())
                logprobs.append(self.logprob[:b, 0].clone())
        return (torch.stack(x, 1)[:len(live)].cpu().numpy() for x in (tokens, logprobs))

    # ------------------------------------------------------------------------------------------- rows, as the host sees
    def _record(self, live: list[Row], tokens: np.ndarray, logprobs: np.ndarray) -> list[Row]:
        """Take over drawn tokens up to a stop -> the rows that stopped."""
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("a sampled log-probability is not finite, so the policy's weights are not")
        ends = self._may_end[tokens]
        if (ends < 0).any():
            for i in set(tokens[ends < 0].tolist()):
                text = self.tokenizer.decode([i]) if self.stop_strings else ""  # U+FFFD: a piece of a character
                self._may_end[i] = i in self.stop_ids or any(s[-1] in text or "\ufffd" in text
                                                             for s in self.stop_strings)
            ends = self._may_end[tokens]
        stopped, cut = [], []
        for row, ids, lps, may_end in zip(live, tokens.tolist(), logprobs.tolist(), ends.any(1).tolist(), strict=True):
            turn, count = row.fresh, 0
            for count in range(1, len(ids) + 1) if may_end else ():
                turn.stopped = ids[count - 1] in self.stop_ids or self._ends([*turn.ids, *ids[:count]])
                if turn.stopped:
                    break
            count = count if turn.stopped else len(ids)
            turn.ids += ids[:count]
            turn.logprobs += lps[:count]
            row.drawn, row.budget, row.length = row.drawn + count, row.budget - count, row.length + count - 1
            self.tokens_run += count - 1
            if turn.stopped or row.budget <= 0:
                row.ended = True
                stopped.append(row)
            if count < len(ids):
                cut.append(row)
        if cut:  # these ran on behind their stop: columns past the length are never read
            at = self._ints(row.slot for row in cut)
            self.length[at], self.drawn[at] = self._ints(r.length for r in cut), self._ints(r.drawn for r in cut)
        return stopped

    def _ends(self, ids: list[int]) -> bool:
        """Does the last token complete a stop string, however its text is cut into tokens? Only a tail is decoded."""
        if not self.stop_strings or not self._may_end[ids[-1]]:
            return False
        longest = max(len(s.encode()) for s in self.stop_strings)  # a token may be a single byte
        tail = self.tokenizer.decode(ids[-longest - 4:])
        return any(s in tail for s in self.stop_strings)

    def _check_room(self, row: Row, more: int) -> None:
        if _start(row) + row.length + more > self.max_len:
            raise ValueError(f"the KV cache holds {self.max_len} tokens a row, {_start(row) + row.length + more} are "
                             f"needed")


def _start(row: Row) -> int:
    return row.prompt.length if row.prompt else 0


def _chunks(ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices in chunks of like length, longest first, so that little is padded."""
    order, chunks = sorted(range(len(ids)), key=lambda i: -len(ids[i])), []
    while order:
        size = max(1, PREFILL_TOKENS // rounded(len(ids[order[0]]), WIDTH_STEP))
        chunks.append(order[:size])
        order = order[size:]
    return chunks


def generate(policy: Policy, prompts: Sequence[Sequence[int]], group_size: int = 1, max_new_tokens: int = 64,
             temperature: float = 1.0, stop_ids: Sequence[int] = (), stop_strings: Sequence[str] = (), tokenizer=None,
             seed: int = 0, max_rows: int = 128, dtype: torch.dtype | None = None) -> list[Completion]:
    """Sample `group_size` completions a prompt (ids, ragged), members of a group adjacent in the result.

    temperature 0 is greedy. The stop stays in the ids; log-probabilities are of the tempered, vocabulary-masked
    distribution. At most `max_rows` rows live at once; freed rows take the next prompts. dtype: see
    `Sampler`.
    """
    if group_size < 1 or max_new_tokens < 1:
        raise ValueError(f"group_size {group_size} and max_new_tokens {max_new_tokens} must be 1 or more")
    if len(prompts) == 0:
        return []
    slots = max(group_size, min(max_rows, len(prompts) * group_size))
    sampler = Sampler(policy, slots, max(map(len, prompts)) + max_new_tokens, temperature, stop_ids, stop_strings,
                      tokenizer, dtype)
    return complete(sampler, prompts, group_size, max_new_tokens, lambda p, m: row_stream(seed, p, m))


def complete(sampler: Sampler, prompts: Sequence[Sequence[int]], group_size: int, max_new_tokens: int,
             stream: Callable[[int, int], np.random.Generator]) -> list[Completion]:
    """`generate` on a sampler without rows, of `group_size` slots at least. stream: (prompt, member) -> its numbers."""
    slots = len(sampler.owner)
    waiting, live, results = list(range(len(prompts))), [], [[] for _ in prompts]
    while waiting or live:
        take = waiting[:sampler.free // group_size]
        waiting = waiting[len(take):]
        if take:
            streams = [[stream(p, m).random(max_new_tokens, np.float32) for m in range(group_size)] for p in take]
            for p, group in zip(take, sampler.admit([prompts[p] for p in take], streams), strict=True):
                results[p] = group
                live += group
        leave = min(len(live), max(group_size, slots // 4)) if waiting else None
        done = sampler.decode(live, [max_new_tokens - row.drawn for row in live], leave)
        sampler.release(done)
        live = [row for row in live if row not in done]
    return [row.fresh for group in results for row in group]
