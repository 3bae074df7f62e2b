"""A policy that answers chats: one worker thread decodes the turns of all callers together, continuously batched.

`Agent.reply` is plain blocking code for one turn, so a benchmark's task or a server's request is a thread of its own,
and what they ask at the same time shares the sampler's steps. The KV cache of an ended turn is kept while its slot is
not needed: a dialogue that goes on pays for its new tokens only, and one that begins as another (same system text, same
tools) begins from a copy. Left out: several devices, and prefill in pieces (a long prompt holds the others up).
"""
from __future__ import annotations

import atexit
import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from slca import chat
from slca.model import Policy
from slca.rewards import parse_blocks, valid_calls
from slca.sampler import Sampler, row_stream
from slca.slots import Row

OPEN, CLOSE = "<tool_call>", "</tool_call>"
WORTH_COPYING = 32  # tokens: a shorter common beginning is run again, and one shorter than what comes behind it
ALONE = 2**19  # new tokens x all tokens: a turn with more is fed in pieces of that size, for the mask they need
COLDEST = 1e-4  # a lower temperature is greedy: the logits over it would not be finite


class PromptTooLong(ValueError):
    """The prompt leaves no room for a token."""


@dataclass
class Reply:
    """One assistant turn. ids and logprobs are of the sampled tokens, the stop included.

    text: the raw turn without its stop; content: what stands outside of calls and thoughts, stripped. calls: the valid
    ones, {"name", "arguments"}. malformed: a block that is no JSON or holds what is no call, or an unpaired tag.
    stopped: False where the length ran out. cached_tokens: those of the prompt that were not run again.
    """

    text: str
    content: str
    reasoning: str | None
    calls: list[dict]
    malformed: bool
    ids: list[int]
    logprobs: list[float]
    stopped: bool
    prompt_tokens: int
    cached_tokens: int


def read_reply(text: str, lenient: bool = False) -> tuple[str, str | None, list[dict], bool]:
    """The raw text of a turn -> content, reasoning, calls, malformed.

    Strict: calls stand in <tool_call> blocks, JSON objects or a list of them. lenient: where the turn has no such tag,
    every JSON object in it with a name and arguments (or parameters) is a call; nothing is malformed then.
    """
    thought, ended, spoken = text.partition("</think>")
    reasoning = thought.split("<think>", 1)[-1].strip() if ended else None
    if not ended:
        before, opened, thought = text.partition("<think>")
        spoken, reasoning = (before, thought.strip()) if opened else (text, None)
    if lenient and OPEN not in spoken and CLOSE not in spoken:
        calls, content = _loose_calls(spoken)
        return content.strip(), reasoning, calls, False
    parsed = parse_blocks(spoken)
    calls, malformed = [], max(parsed.n_open, parsed.n_close) > len(parsed.blocks)
    for block in parsed.blocks:
        for item in block if block is not None else [None]:
            valid = valid_calls([item])
            malformed |= valid is None
            calls += [{"name": c.name, "arguments": c.arguments} for c in valid or ()]
    content = parsed.text
    while (start := content.find(OPEN)) >= 0:
        end = content.find(CLOSE, start)
        content = content[:start] + (content[end + len(CLOSE):] if end >= 0 else "")
    return content.replace(CLOSE, "").strip(), reasoning, calls, malformed


def _loose_calls(text: str) -> tuple[list[dict], str]:
    """Calls among the JSON objects of a text, and what is left of it without them."""
    decoder, calls, rest, at = json.JSONDecoder(), [], "", 0
    while (start := text.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, start
        named = isinstance(value, dict) and ("arguments" in value or "parameters" in value)
        valid = valid_calls([value]) if named else None
        end = end if valid else start + 1  # calls may stand inside of what is none
        rest += text[at:start if valid else end]
        calls += [{"name": c.name, "arguments": c.arguments} for c in valid or ()]
        at = end
    return calls, rest + text[at:]


@dataclass(eq=False)
class _Turn:
    """What a caller asked for and what has come of it."""

    prompt: list[int]
    budget: int
    temperature: float
    uniforms: np.ndarray
    stops: tuple[str, ...]
    one_call: bool
    prefix: str
    on_text: Callable[[str, list[int], list[float]], None] | None
    cancelled: threading.Event | None
    done: Future = field(default_factory=Future)
    row: Row | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    text: str = ""  # decoded so far, but for a character that is not whole yet
    told: int = 0  # characters and tokens that on_text has
    told_ids: int = 0
    mark: tuple[int, int] = (0, 0)  # ids from the first on are decoded; the text up to the second is in `text`

    def is_cancelled(self) -> bool:
        return self.cancelled is not None and self.cancelled.is_set()

    def finish(self, stopped: bool) -> None:
        text = self.prefix + self.text
        self.done.set_result(Reply(text, *read_reply(text), self.ids, self.logprobs, stopped, len(self.prompt),
                                   self.cached))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Agent:
    """rows: turns decoded together; others wait. max_len: tokens of prompt and answer, None: the model's positions.

    parallel: form of parallel calls in the dialogue that the policy is shown (`chat.render`). With "list" a turn ends
    with its first block, as in a rollout: such a policy was never trained to end it otherwise.
    """

    def __init__(self, policy: Policy, tokenizer, rows: int = 32, max_len: int | None = None,
                 parallel: str = "blocks"):
        self.tokenizer, self.parallel = tokenizer, parallel
        self.max_len = max_len or policy.config.max_position_embeddings
        self.sampler = Sampler(policy, rows, self.max_len, None, tokenizer.stop_ids, (), tokenizer)
        self.asked: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self.kept: dict[Row, np.ndarray] = {}  # ended rows whose cache still stands, the oldest first -> their ids
        self.lock, self.closed = threading.Lock(), False
        self.worker = threading.Thread(target=self._work, name="agent", daemon=True)
        self.worker.start()
        atexit.register(self.close)  # a thread that comes back from torch into an ended interpreter aborts the process

    def reply(self, messages: Sequence[dict], tools: Sequence[dict] | None, *, temperature: float = 0.0,
              max_tokens: int = 8192, seed: int | Sequence[int] = 0, stop: Sequence[str] = (), one_call: bool = False,
              prefix: str = "", on_text: Callable[[str, list[int], list[float]], None] | None = None,
              cancelled: threading.Event | None = None) -> Reply:
        """The policy's next turn; blocks, from any thread. messages, tools: as `chat.render` takes them.

        max_tokens is cut to the room there is. seed: with the tokens before it fixes the draw, whoever shares the
        batch. stop: strings that end the turn and are left out of its text. one_call: the turn ends with its first
        call block. prefix: text the turn begins with, as if sampled. on_text: given each new piece of the text and its
        tokens, from the worker thread. cancelled: once set, the turn ends as if its length had run out.

        Raises PromptTooLong, ValueError (a message or argument that is wrong), RuntimeError (closed).
        """
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature {temperature}: must be 0 (greedy) or more, and finite")
        if max_tokens < 1 or "" in stop:
            raise ValueError("max_tokens must be 1 or more" if max_tokens < 1 else "a stop string is empty")
        ids = chat.render(messages, tools, self.tokenizer, parallel=self.parallel)
        ids += self.tokenizer.encode_spans([(prefix, True)]) if prefix else []
        if len(ids) + 1 > self.max_len:
            raise PromptTooLong(f"a prompt of {len(ids)} tokens, and the model takes {self.max_len} with its answer")
        budget = min(max_tokens, self.max_len - len(ids))
        temperature = temperature if temperature >= COLDEST else 0.0
        key = (seed,) if isinstance(seed, int) else tuple(seed)
        uniforms = row_stream(*key).random(budget, np.float32) if temperature else np.zeros(budget, np.float32)
        turn = _Turn(ids, budget, temperature, uniforms, tuple(stop), one_call or self.parallel == "list",
                     prefix, on_text, cancelled)
        with self.lock:
            if self.closed:
                raise RuntimeError("the agent is closed")
            self.asked.put(turn)
        return turn.done.result()

    def close(self) -> None:
        """End the worker; turns that are not done yet raise RuntimeError in their callers."""
        with self.lock:
            self.closed = True
            self.asked.put(None)
        self.worker.join()
        atexit.unregister(self.close)

    # ------------------------------------------------------------------------------------------- in the worker's thread
    def _work(self) -> None:
        waiting: list[_Turn] = []
        live: list[_Turn] = []
        try:
            while True:
                while not self.asked.empty() or not (waiting or live):
                    turn = self.asked.get()
                    if turn is None:
                        return
                    waiting.append(turn)
                try:
                    self._start(waiting, live)
                    self._step(live)
                except Exception as error:  # the policy's or the machine's fault: all that run end
                    for turn in live:
                        turn.fail(error)
                    self.sampler.release([row for row in self.sampler.owner if row is not None])
                    self.kept.clear()
                live = [turn for turn in live if not turn.done.done()]
        finally:
            with self.lock:
                self.closed = True
                while not self.asked.empty():
                    waiting += [turn for turn in [self.asked.get()] if turn is not None]
            for turn in live + waiting:
                turn.fail(RuntimeError("the agent was closed"))

    def _start(self, waiting: list[_Turn], live: list[_Turn]) -> None:
        """Give waiting turns rows, as far as there are slots; those that run now go from one list to the other."""
        for turn in [t for t in waiting if t.is_cancelled()]:
            waiting.remove(turn)
            turn.finish(False)
        fresh: list[_Turn] = []
        forks: list[_Turn] = []
        while waiting and (self.sampler.free > len(fresh) or self.kept):
            turn = waiting[0]
            known = self.kept | {t.row: np.array([*t.prompt, *t.ids])[:t.row.length] for t in live if t.row is not None}
            source, keep = _longest_beginning(turn.prompt, known)
            if any(_common(turn.prompt, np.array(t.prompt)) > max(keep, WORTH_COPYING) for t in fresh):
                break  # once that one is run, this one begins with a copy
            live.append(waiting.pop(0))
            if keep < max(WORTH_COPYING, len(turn.prompt) - keep):
                self._make_room(len(fresh) + 1)
                fresh.append(turn)
                continue
            into = source if source in self.kept and source.length == keep else None  # a dialogue goes on: in place
            if into is None and self.sampler.free == len(fresh):
                into = next((row for row in self.kept if row is not source), source)
            self.kept.pop(into, None)
            turn.row = self.sampler.fork(source, keep, turn.uniforms, turn.temperature, into)
            turn.cached = keep
            forks.append(turn)
        self._feed(forks)
        if fresh:
            groups = self.sampler.admit([t.prompt for t in fresh], [[t.uniforms] for t in fresh],
                                        [t.temperature for t in fresh])
            for turn, (row,) in zip(fresh, groups, strict=True):
                turn.row = row

    def _feed(self, turns: list[_Turn]) -> None:
        """Run what stands behind the copied beginnings."""
        rests = []
        for turn in turns:
            rest, step = turn.prompt[turn.cached:], max(ALONE // len(turn.prompt), 1)
            while len(rest) > step:
                self.sampler.feed([turn.row], [rest[:step]])
                rest = rest[step:]
            rests.append(rest)
        if turns:
            self.sampler.feed([t.row for t in turns], rests)

    def _make_room(self, slots: int) -> None:
        while self.sampler.free < slots:
            oldest = next(iter(self.kept))
            del self.kept[oldest]
            self.sampler.release([oldest])

    def _step(self, live: list[_Turn]) -> None:
        """Sample a token each (a few on a GPU), tell it on, end what is to end."""
        ended = set(self.sampler.decode([t.row for t in live], [t.budget - len(t.ids) for t in live], None, 1))
        for turn in live:
            turn.ids, turn.logprobs = turn.row.fresh.ids, turn.row.fresh.logprobs
            try:
                stopped = self._read(turn, turn.row.fresh.stopped, turn.row in ended)
            except Exception as error:  # the caller's own `on_text`
                turn.fail(error)
            else:
                if stopped or turn.row in ended or turn.is_cancelled():
                    turn.finish(stopped)
            if turn.done.done():
                self.kept[turn.row] = np.array([*turn.prompt, *turn.row.fresh.ids])[:turn.row.length]

    def _read(self, turn: _Turn, stopped: bool, ended: bool) -> bool:
        """Decode what is new, look for stop strings, tell the caller -> whether the turn has stopped."""
        ids = turn.ids[:-1] if stopped else turn.ids
        before, tail = (self.tokenizer.decode(ids[a:b]) for a, b in (turn.mark, (turn.mark[0], len(ids))))
        if len(tail) > len(before) and (ended or not tail.endswith("\ufffd")):
            turn.text += tail[len(before):]
            turn.mark = (turn.mark[1], len(ids))
        ends = [(at, at + len(s)) for s in turn.stops if (at := turn.text.find(s)) >= 0]
        if turn.one_call and (at := (turn.prefix + turn.text).find(CLOSE)) >= 0:
            at += len(CLOSE) - len(turn.prefix)
            ends.append((at, at))
        if ends:
            end, seen = min(ends)
            turn.text, stopped, count = turn.text[:end], True, len(turn.ids)
            # a GPU draws a few tokens behind a stop that is text
            while count > 1 and len(self.tokenizer.decode(turn.ids[:count - 1])) >= seen:
                count -= 1
            turn.ids, turn.logprobs = turn.ids[:count], turn.logprobs[:count]
        if turn.on_text is not None:
            # what may be the beginning of a stop string is held back
            hold = 0 if stopped or ended else max((n for s in turn.stops for n in range(1, len(s))
                                                   if turn.text.endswith(s[:n])), default=0)
            piece = turn.text[turn.told:len(turn.text) - hold]
            if piece or stopped or ended:
                turn.on_text(piece, turn.ids[turn.told_ids:], turn.logprobs[turn.told_ids:])
                turn.told, turn.told_ids = turn.told + len(piece), len(turn.ids)
        return stopped


def _common(prompt: Sequence[int], known: np.ndarray) -> int:
    """Tokens that both begin with; the prompt's last one does not count, it is run in any case."""
    n = min(len(prompt) - 1, len(known))
    differ = np.flatnonzero(np.array(prompt[:n]) != known[:n])
    return int(differ[0]) if len(differ) else n


def _longest_beginning(prompt: list[int], known: dict[Row, np.ndarray]) -> tuple[Row | None, int]:
    """The row that has the most tokens in common with the prompt's beginning, and how many."""
    common = {row: _common(prompt, ids) for row, ids in known.items()}
    best = max(common, key=common.__getitem__, default=None)
    return best, common.get(best, 0)
