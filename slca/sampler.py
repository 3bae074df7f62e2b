"""Sampling from the policy: which rows run, what they draw, when they stop; log-probabilities stored at birth.

A prompt is prefilled once a group and read by all its rows (`engine.py`). A row that stops leaves the batch at once
(its slot is swapped behind the live ones), and its place can be refilled. Every token goes through the model once,
over all turns of a dialogue. A token is drawn by inverse CDF with one uniform number of
the row's own stream, so a rollout depends on (seed, step, prompt, member) and not on who shares its batch. Left out on
purpose: top-k, top-p and penalties, under which the stored log-probability would not be that of the learner.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slca.engine import Cache, Engine, Shared
from slca.model import Policy
from slca.phases import phases

PREFILL_TOKENS = 8192  # padded tokens in one prefill call
CAPTURING = threading.Lock()
MAX_GRAPHS, GROUP_STEP = 64, 4  # captured steps on a GPU, and what their prompts and members are rounded up to
WIDTH_STEP = 32  # their width is rounded up to few sizes: the CPU's matrix library keeps a kernel for each shape


@dataclass
class Completion:
    """ids: sampled tokens, the stop included; logprobs: one each; stopped: False where the length ran out."""

    ids: list[int]
    logprobs: list[float]
    stopped: bool


@dataclass(eq=False)
class Prompt:
    """A prompt that stands once in the cache for the rows of its group."""

    slot: int
    length: int
    rows: int  # members that are not released


@dataclass(eq=False)
class Row:
    """One sequence being sampled. `fresh` restarts with every turn, the cache behind it does not."""

    slot: int
    uniforms: np.ndarray  # float32 [max_new], the stream of this row
    prompt: Prompt | None = None  # None: the prompt stands in the row's own slot
    length: int = 0  # tokens in its slot
    drawn: int = 0
    budget: int = 0  # tokens it may still draw in this turn
    ended: bool = False  # its last token is drawn and not run: `feed` or `release` must come next
    fresh: Completion = field(default_factory=lambda: Completion([], [], False))


def row_stream(*key: int) -> np.random.Generator:
    """The explicit generator of one row, fixed by its key, e.g. (seed, step, prompt, member).

    The key's length is part of it: alone, numpy takes (1, 2) and (1, 2, 0) for the same.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([len(key), *map(int, key)])))


def draw(logits: Tensor, uniforms: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """logits [n,V], uniforms float32 [n] in [0,1) -> token int64 [n] and its log-probability float32 [n].

    temperature: one for all, or float32 [n]. 0 takes the most likely token and reports the log-probability of the
    untempered distribution.
    """
    if isinstance(temperature, Tensor):
        greedy, heat = temperature == 0, temperature.where(temperature > 0, 1.0)
        drawn, best = draw(logits.float() / heat[:, None], uniforms, 1.0), draw(logits, uniforms, 0.0)
        return tuple(torch.where(greedy, b, d) for d, b in zip(drawn, best, strict=True))
    p = torch.softmax(logits.float() if temperature in (0, 1) else logits.float() / temperature, -1)
    if temperature == 0:
        token = p.argmax(-1, keepdim=True)
    else:
        cdf = p.cumsum(-1)
        # a uniform is at most 1 - 2^-24, so the product is below the top: no token of probability 0 can be hit
        token = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)
        token = token.clamp(max=logits.shape[1] - 1)  # NaN sorts past the end
    return token.squeeze(1), p.gather(1, token).squeeze(1).log()


class Sampler:
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
        self.max_len, self.temperature, self.tokenizer = max_len, temperature, tokenizer
        # ids the tokenizer does not know (a padded vocabulary) are cut off, here and in the learner alike
        vocabulary = min(policy.config.vocab_size, tokenizer.size if tokenizer else policy.config.vocab_size)
        self.stop_ids, self.stop_strings = set(stop_ids), stop_strings
        self._may_end = np.full(vocabulary, -1, np.int8)  # id -> can it be the last of a row? -1: not looked at yet
        gpu = policy.device.type == "cuda"
        # a GPU is not waited for at every token: the host looks once in so many steps, and the batch, the columns and
        # so the captured graphs come in few sizes
        self.look_every, self.row_step, self.column_step = (16, 8, 256) if gpu else (1, 1, 32)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph | None] | None = {} if gpu else None
        self.graph_memory = torch.cuda.graph_pool_handle() if gpu else None  # one for all: they never run at once
        self.tokens_run = 0  # tokens sent through the model and kept, to prove that none goes twice
        self.engine = Engine(policy, max_len + 64, dtype, vocabulary)
        self.device = policy.device
        self.cache, self.prompts = (Cache(policy.config, self.engine.dtype, self.device) for _ in range(2))
        self.sizes: list[tuple[int, int]] = []  # (slots, columns) of both that are held ready (`memory.reserve`)
        self.owner: list[Row | None] = [None] * slots
        self.groups: list[Prompt | None] = [None] * slots
        with torch.inference_mode():
            # of each slot: last hidden state, tokens in the slot, tokens of the shared prompt, tokens drawn, last
            # token, random stream
            self.state = torch.zeros(slots, policy.config.hidden_size, dtype=self.engine.dtype, device=self.device)
            self.length, self.start, self.drawn, self.token = torch.zeros(4, slots, dtype=torch.long,
                                                                          device=self.device)
            self.logprob, self.uniforms = (torch.zeros(slots, n, device=self.device) for n in (1, 0))
            self.heat = torch.zeros(slots, device=self.device)  # temperatures of rows that bring their own
            # `Shared`'s tensors, with room for rounding up
            self.shared_length, self.grid, self.back = (torch.zeros(n, dtype=torch.long, device=self.device)
                                                        for n in (slots + GROUP_STEP, (slots + GROUP_STEP) ** 2, slots))
        self.shared: Shared | None = None

    @property
    def _group_step(self) -> int:
        return 1 if self.row_step == 1 else GROUP_STEP

    @property
    def free(self) -> int:
        return self.owner.count(None)

    def refresh(self) -> None:
        """Take over the policy's weights as they are now."""
        self.engine.refresh()
        self.take_room()

    def set_temperature(self, temperature: float) -> None:
        if temperature != self.temperature:
            self.temperature = temperature
            self._forget_graphs()  # it is a constant in them

    def take_room(self) -> None:
        """The caches at the sizes that were asked for, if any were."""
        for cache, (slots, columns) in zip((self.cache, self.prompts), self.sizes, strict=False):
            if slots and cache.reserve(slots, columns, columns):
                self._forget_graphs()

    def rest(self) -> None:
        """With no row left: give the memory of weights and cache back, until `refresh`."""
        self.engine.drop()
        self.cache, self.prompts = (Cache(self.engine.config, self.engine.dtype, self.device) for _ in range(2))
        self._forget_graphs()

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

    def _store_streams(self, rows: list[Row], at: Tensor) -> None:
        width = max(len(row.uniforms) for row in rows) + self.look_every  # a row that ended may run on unread
        if width > self.uniforms.shape[1]:
            self.uniforms = F.pad(self.uniforms, (0, width - self.uniforms.shape[1]))
            self._forget_graphs()
        streams = np.zeros((len(rows), self.uniforms.shape[1]), np.float32)
        for i, row in enumerate(rows):
            streams[i, :len(row.uniforms)] = row.uniforms
        self.uniforms[at] = torch.from_numpy(streams).to(self.device)

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

    # ----------------------------------------------------------------------------------- steps, as the device sees them
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

    @contextmanager
    def _untouched(self, live: int, b: int) -> Iterator[None]:
        """Slots `live` to `b` only fill the batch up: they come out as they went in."""
        held = (self.state, self.length, self.drawn, self.token) if live < b else ()
        kept = [t[live:b].clone() for t in held]
        yield
        for t, old in zip(held, kept, strict=True):
            t[live:b] = old

    def _sizes(self, live: list[Row], steps: int) -> tuple[int, int]:
        """(rows, columns) of the next steps, both rounded up."""
        span = rounded(max(row.length for row in live) + steps, self.column_step)
        self._reserve(self.cache, span)
        return min(rounded(len(live), self.row_step), len(self.owner)), span

    def _draw(self, b: int) -> None:
        logits = self.engine.logits(self.state[:b])
        token, logprob = draw(logits, self.uniforms[:b].gather(1, self.drawn[:b, None]).squeeze(1),
                              self.heat[:b] if self.temperature is None else self.temperature)
        self.token[:b], self.logprob[:b, 0] = token, logprob
        self.drawn[:b] += 1

    def _run(self, b: int, span: int) -> None:
        self.state[:b] = self.engine.step(self.token[:b], self.cache, self.length[:b], span, self.start[:b],
                                          self.prompts, self.shared)
        self.length[:b] += 1

    def _advance(self, b: int, span: int) -> None:
        """Run, then draw: what a CUDA graph holds. Shapes met for the first time run without one."""
        shape = b, span, self.shared and (self.shared.prompts, self.shared.members, self.shared.columns)
        if self.graphs is None or shape not in self.graphs:
            self._run(b, span)
            self._draw(b)
            if self.graphs is not None:
                if len(self.graphs) >= MAX_GRAPHS:
                    self._forget_graphs()
                self.graphs[shape] = None
            return
        if self.graphs[shape] is None:
            graph = torch.cuda.CUDAGraph()
            # another sampler's thread may go on beside the capture, but not begin one
            with CAPTURING, torch.cuda.graph(graph, pool=self.graph_memory, capture_error_mode="thread_local"):
                self._run(b, span)
                self._draw(b)
            self.graphs[shape] = graph
        self.graphs[shape].replay()

    def _reserve(self, cache: Cache, columns: int) -> None:
        slots = len(self.owner)
        if cache is self.prompts:  # the last in use, and an empty one behind it
            slots = rounded(2 + max((prompt.slot for prompt in self.groups if prompt), default=0), self._group_step)
        if cache.reserve(slots, rounded(columns + self.look_every, WIDTH_STEP), rounded(self.max_len + 64, WIDTH_STEP)):
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Memory has moved. A pool whose graphs are all gone cannot be captured into again, so it goes with them."""
        if self.graphs is not None:
            self.graphs, self.graph_memory = {}, torch.cuda.graph_pool_handle()

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

    def _to_front(self, rows: list[Row]) -> list[Row]:
        """Swap the rows into the first slots, their prompts into the first prompt slots -> the rows in slot order."""
        source, target = _moves(self.owner, rows)
        if source:
            s, t = self._ints(source), self._ints(target)
            longest = max(row.length for row in map(self.owner.__getitem__, source) if row is not None)
            self.cache.copy(s, t, longest)
            for x in (self.state, self.length, self.start, self.drawn, self.token, self.uniforms, self.heat):
                x[t] = x[s]
            _swap(self.owner, source, target)
        live = self.owner[:len(rows)]
        self._share(live)
        return live

    def _share(self, live: list[Row]) -> None:
        """Write down which rows read which prompt."""
        prompts = list({row.prompt: None for row in live if row.prompt is not None})
        if not prompts:
            self.shared = None
            return
        source, target = _moves(self.groups, prompts)
        if source:
            longest = max(p.length for p in map(self.groups.__getitem__, source) if p is not None)
            self.prompts.copy(self._ints(source), self._ints(target), longest)
            _swap(self.groups, source, target)
        lengths = [p.length for p in self.groups[:len(prompts)]]
        members: list[list[int]] = [[] for _ in prompts]
        for i, row in enumerate(live):
            if row.prompt is None and len(members) == len(prompts):  # a row that shares nothing reads an empty prompt
                lengths, members = [*lengths, 0], [*members, []]
            members[row.prompt.slot if row.prompt else -1].append(i)
        members += [[]] * (rounded(len(members), self._group_step) - len(members))
        lengths += [0] * (len(members) - len(lengths))
        most = rounded(max(map(len, members)), self._group_step)
        grid, back = np.zeros((len(members), most), np.int64), np.zeros(len(self.owner), np.int64)
        for p, rows in enumerate(members):
            grid[p, :len(rows)], back[rows] = rows, np.arange(len(rows)) + p * most
        self.shared_length[:len(lengths)] = self._ints(lengths)
        self.grid[:grid.size] = torch.from_numpy(grid.ravel()).to(self.device)
        self.back.copy_(torch.from_numpy(back))
        columns = min(rounded(max(lengths), self.column_step), self.prompts.kv.shape[4])
        self.shared = Shared(len(members), most, columns, self.shared_length[:len(lengths)], self.grid[:grid.size],
                             self.back)

    def _check_room(self, row: Row, more: int) -> None:
        if _start(row) + row.length + more > self.max_len:
            raise ValueError(f"the KV cache holds {self.max_len} tokens a row, {_start(row) + row.length + more} are "
                             f"needed")

    def _batch(self, ids: list[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ragged ids -> int64 [n, width], right-padded, and their lengths [n]."""
        batch = np.zeros((len(ids), rounded(max(map(len, ids)), WIDTH_STEP)), np.int64)
        for i, row in enumerate(ids):
            batch[i, :len(row)] = row
        return torch.from_numpy(batch).to(self.device), self._ints(map(len, ids))

    def _ints(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.long, device=self.device)


def rounded(size: int, step: int) -> int:
    return -(-size // step) * step


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


def _moves(owner: Sequence, wanted: Sequence) -> tuple[list[int], list[int]]:
    """(source, target) slots of the exchanges that bring the wanted items into the first slots."""
    keep = set(map(id, wanted))
    holes = [s for s in range(len(wanted)) if id(owner[s]) not in keep]
    far = [item.slot for item in wanted if item.slot >= len(wanted)]
    return far + holes, holes + far


def _swap(owner: list, source: list[int], target: list[int]) -> None:
    for s, item in zip(target, [owner[s] for s in source], strict=True):
        owner[s] = item
        if item is not None:
            item.slot = s


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
