"""The rows being decoded as the device sees them: who sits in which slot, their state and caches, one step for all.

Live rows stand in the first slots (`_to_front` swaps them there), so that a step runs over a slice and no index. On a
GPU the steps are captured as graphs, and shapes come in few sizes. Left out: when a row stops and what it then does
(`sampler.py`), and the passes through the model (`engine.py`).
"""
from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slca.engine import Cache, Engine, Shared
from slca.model import Policy

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


def rounded(size: int, step: int) -> int:
    return -(-size // step) * step


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


class Slots:
    """`slots` places for rows of up to `max_len` tokens: tensors of what each holds, and the steps over the first few.

    temperature: of all rows, or None, where each row has its own in `heat`. Ids from `vocabulary` on are never drawn.
    """

    def __init__(self, policy: Policy, slots: int, max_len: int, temperature: float | None, vocabulary: int,
                 dtype: torch.dtype | None):
        self.max_len, self.temperature = max_len, temperature
        gpu = policy.device.type == "cuda"
        # a GPU is not waited for at every token: the host looks once in so many steps, and the batch, the columns and
        # so the captured graphs come in few sizes
        self.look_every, self.row_step, self.column_step = (16, 8, 256) if gpu else (1, 1, 32)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph | None] | None = {} if gpu else None
        self.graph_memory = torch.cuda.graph_pool_handle() if gpu else None  # one for all: they never run at once
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

    def _store_streams(self, rows: list[Row], at: Tensor) -> None:
        width = max(len(row.uniforms) for row in rows) + self.look_every  # a row that ended may run on unread
        if width > self.uniforms.shape[1]:
            self.uniforms = F.pad(self.uniforms, (0, width - self.uniforms.shape[1]))
            self._forget_graphs()
        streams = np.zeros((len(rows), self.uniforms.shape[1]), np.float32)
        for i, row in enumerate(rows):
            streams[i, :len(row.uniforms)] = row.uniforms
        self.uniforms[at] = torch.from_numpy(streams).to(self.device)

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

    def _batch(self, ids: list[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ragged ids -> int64 [n, width], right-padded, and their lengths [n]."""
        batch = np.zeros((len(ids), rounded(max(map(len, ids)), WIDTH_STEP)), np.int64)
        for i, row in enumerate(ids):
            batch[i, :len(row)] = row
        return torch.from_numpy(batch).to(self.device), self._ints(map(len, ids))

    def _ints(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.long, device=self.device)


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
