"""A frozen language model that writes: our own policy code over a model's folder, or an OpenAI-compatible endpoint.

The simulator and the judge ask it through `Writer`, which remembers every answer, on disk too if given a folder: the
same chat is written once, and a run that is repeated reads the same words. With a folder of weights all chats of a call
are decoded together, each row from a random stream of its own (a hash of its chat), so an answer does not depend on who
shares the batch. Left out: several frozen models on different devices; every rank loads its own.
"""
from __future__ import annotations

import functools
import hashlib
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from slca import chat, ranks
from slca.endpoint import Endpoint
from slca.model import Policy
from slca.products import bf16_runs
from slca.sampler import Sampler, complete, row_stream
from slca.settings import LLMConfig
from slca.tokenizer import load_tokenizer
from slca.weights import load_policy

REACH = 32768  # tokens of prompt and answer together at most, as the paper serves its simulator


class Writer:
    """Texts for chats. kind: "model" (cfg.path) or "http" (cfg.url); stop_strings end an answer early (model only).

    tokens, seconds: sampled by a model so far, and the time of it; asked, cached: chats that were written, and that
    were remembered. ValueError or OSError: no such model, a bad address.
    """

    def __init__(self, kind: str, cfg: LLMConfig, seed: int = 0, stop_strings: Sequence[str] = ()):
        self.cfg = cfg
        self.tokens, self.seconds, self.asked, self.cached = 0, 0.0, 0, 0
        if kind == "model":
            self.write = _Local(cfg, stop_strings, self)
            source = [cfg.path, *sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns)
                                        for f in Path(cfg.path).glob("*.safetensors"))]
        else:
            endpoint = Endpoint(cfg.url, cfg.name, cfg.key_env, cfg.timeout_s, cfg.retries, cfg.concurrency)
            self.write = lambda chats, keys, temperature: endpoint.chat_all(
                chats, temperature, cfg.max_new_tokens, [int(key[:8], 16) >> 1 for key in keys])
            source = [cfg.url, cfg.name]
        self.identity = [kind, source, cfg.max_new_tokens, seed]
        self.known = _read_cache(cfg.cache) if cfg.cache else {}

    def texts(self, chats: Sequence[list[dict]], temperature: float | None = None, salt: str = "") -> list[str | None]:
        """The assistant's text for each list of messages, reasoning left out; None where there is none.

        temperature: None is the configured one. salt: another one gives another answer (several votes).
        """
        temperature = self.cfg.temperature if temperature is None else temperature
        keys = [hashlib.sha256(json.dumps([self.identity, temperature, salt, c]).encode()).hexdigest() for c in chats]
        new = {key: c for key, c in zip(keys, chats, strict=True) if key not in self.known}
        self.asked, self.cached = self.asked + len(new), self.cached + len(chats) - len(new)
        if new:
            found = self.write(list(new.values()), list(new), temperature)
            fresh = {key: text for key, text in zip(new, found, strict=True) if text is not None}
            self.known |= fresh
            if self.cfg.cache:
                _append_cache(self.cfg.cache, fresh)
        return [None if (text := self.known.get(key)) is None else _spoken(text) for key in keys]

    def take_counts(self) -> dict[str, float]:
        """Counts since the last call: chats asked and remembered, tokens and seconds of a model."""
        found = {"asked": self.asked, "cached": self.cached, "tokens": self.tokens, "seconds": self.seconds}
        self.tokens, self.seconds, self.asked, self.cached = 0, 0.0, 0, 0
        return found


class _Local:
    """Writes with a policy of our own, up to cfg.concurrency rows at a time."""

    def __init__(self, cfg: LLMConfig, stop_strings: Sequence[str], counts: Writer):
        self.cfg, self.counts = cfg, counts
        self.policy, self.tokenizer = frozen_policy(str(Path(cfg.path).resolve()))
        self.reach = min(REACH, self.policy.config.max_position_embeddings)
        self.sampler = Sampler(self.policy, cfg.concurrency, self.reach, cfg.temperature, self.tokenizer.stop_ids,
                               stop_strings, self.tokenizer)

    def __call__(self, chats: list[list[dict]], keys: list[str], temperature: float) -> list[str | None]:
        start, new = time.time(), self.cfg.max_new_tokens
        self.sampler.set_temperature(temperature)
        prompts = [chat.render(c, None, self.tokenizer) for c in chats]
        fits = [i for i, ids in enumerate(prompts) if len(ids) + new <= self.reach]
        if len(fits) < len(chats):
            warnings.warn(f"{len(chats) - len(fits)} chats are over {self.reach - new} tokens and get no answer",
                          stacklevel=3)
        texts: list[str | None] = [None] * len(chats)
        found = complete(self.sampler, [prompts[i] for i in fits], 1, new,
                         lambda p, _: row_stream(int(keys[fits[p]][:16], 16)))
        for i, done in zip(fits, found, strict=True):
            ids = done.ids[:-1] if done.ids[-1] in self.tokenizer.stop_ids else done.ids
            texts[i] = self.tokenizer.decode(ids)
            self.counts.tokens += len(done.ids)
        self.counts.seconds += time.time() - start
        return texts


def _spoken(text: str) -> str | None:
    """The text without its reasoning; None where that was cut off before its end."""
    thought, ended, rest = text.rpartition("</think>")
    return None if not ended and text.lstrip().startswith("<think>") else rest


def counts(*askers: object) -> dict[str, float]:
    """Metrics of a step, over all ranks, for askers (simulator's responder, judge) that have a `writer`; else none."""
    found = [asker.writer.take_counts() for asker in askers if hasattr(asker, "writer")]
    if not found:
        return {}
    total = ranks.all_sum({k: sum(f[k] for f in found) for k in ("asked", "cached", "tokens")})
    seconds = ranks.all_max({"seconds": sum(f["seconds"] for f in found)})["seconds"]
    return {"frozen_asked": total["asked"], "frozen_cached": total["cached"],
            "frozen_tok_s": total["tokens"] / seconds if seconds else 0.0}


@functools.cache
def frozen_policy(folder: str) -> tuple[Policy, object]:
    """(policy, tokenizer) of a folder, in bfloat16 where the machine computes in it; once for simulator and judge."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if bf16_runs(device) else torch.float32
    return load_policy(folder, dtype, device).requires_grad_(False), load_tokenizer(folder)


def _read_cache(folder: str) -> dict[str, str]:
    """All remembered answers of a folder, those of this rank last: a repeated run finds its own words again."""
    known, broken, own = {}, 0, _cache_file(folder)
    for path in [*(p for p in sorted(Path(folder).glob("rank*.jsonl")) if p != own), *([own] if own.exists() else [])]:
        with path.open("rb") as lines:
            for line in filter(bytes.strip, lines):
                try:
                    row = json.loads(line)
                    known[row["key"]] = str(row["text"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    broken += 1  # cut off by a kill: it is asked again
    if broken:
        warnings.warn(f"{folder}: {broken} unreadable lines of remembered answers are passed over", stacklevel=3)
    return known


def _append_cache(folder: str, texts: dict[str, str]) -> None:
    """One line an answer. A disk that takes none costs the memory of them, not the run."""
    try:
        path = _cache_file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:  # newline first: a line that a kill cut off spoils no other
            file.write("".join("\n" + json.dumps({"key": k, "text": t}) for k, t in texts.items()))
    except OSError as error:
        warnings.warn(f"{folder}: answers could not be remembered ({error})", stacklevel=3)


def _cache_file(folder: str) -> Path:
    return Path(folder) / f"rank{ranks.rank()}.jsonl"
