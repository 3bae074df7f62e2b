"""A checkpoint behind an OpenAI-compatible endpoint: python -m slca.serve --checkpoint DIR [--port N]

GET /v1/models, POST /v1/chat/completions, GET /health; standard library only. All requests are decoded together
(`agent.Agent`). No key is asked for, so it listens on loopback unless --host says otherwise.

What is done of the API and what is not says `completions.py`. Left out: TLS.
"""
from __future__ import annotations

import argparse
import json
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.parse import unquote

import torch

from slca.agent import Agent, PromptTooLong, Reply
from slca.completions import (
    ApiError,
    Ask,
    TokenBytes,
    Visible,
    called,
    finish_reason,
    message_of,
    read_request,
    same_model,
    usage_of,
)
from slca.config import FOREIGN, checkpoint_config
from slca.learner import use_threads
from slca.tokenizer import load_tokenizer
from slca.weights import load_policy
from slca.wire import Wire

POLL_S, GRACE_S = 0.2, 5.0  # looks after a client that waits; time for running requests at shutdown
SPARE_CONNECTIONS = 64  # beyond one a request: idle ones, and those that ask for /health


class Server(ThreadingHTTPServer):
    """Serves `agent` as `model`. At most `places` choices at a time are decoded or wait; more get a 503.

    `serve_forever` runs in a thread of the caller's, `close` ends it. port 0 takes any free one (`server_port`).
    """

    daemon_threads, block_on_close, request_queue_size, allow_reuse_address = True, False, 128, True

    def __init__(self, agent: Agent, tokenizer, model: str, host: str = "127.0.0.1", port: int = 0, places: int = 160,
                 lenient: bool = False):
        super().__init__((host, port), Handler)
        self.agent, self.tokenizer, self.model, self.lenient = agent, tokenizer, model, lenient
        self.places, self.used, self.answering, self.open = places, 0, 0, set()
        self.token_bytes, self.started = TokenBytes(tokenizer), int(time.time())
        self.lock, self.draining, self.stopping = threading.Lock(), threading.Event(), threading.Event()
        self.workers = ThreadPoolExecutor(places, "choice")

    def count(self, name: str, by: int, most: float = float("inf")) -> bool:
        """Add to a counter unless that passes `most`."""
        with self.lock:
            new = getattr(self, name) + by
            if new <= most:
                setattr(self, name, new)
            return new <= most

    def process_request(self, request, client_address):
        with self.lock:
            room = len(self.open) < self.places + SPARE_CONNECTIONS
            if room:
                self.open.add(request)
        if room:
            return super().process_request(request, client_address)
        request.settimeout(0)  # whoever reads nothing gets nothing: others wait to be accepted
        try:
            request.send(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
                         b"Connection: close\r\n\r\n")
        except OSError:
            pass
        self.shutdown_request(request)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.lock:
                self.open.discard(request)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):  # a client that is gone is no news
            super().handle_error(request, client_address)

    def start(self, ask: Ask, events: SimpleQueue, cancelled: threading.Event) -> None:
        """Decode all choices of a request: events gets (k, (piece, ids, logprobs)), then (k, Reply or Exception)."""
        if self.draining.is_set() or not self.count("used", ask.n, self.places):
            raise ApiError(503, "shutting down" if self.draining.is_set() else
                           f"{self.used} requests run or wait, no more than {self.places} may: try again later")
        for k in range(ask.n):
            try:
                self.workers.submit(self._choice, k, ask, events, cancelled)
            except RuntimeError:  # closed in between
                self.count("used", -1)
                events.put((k, ApiError(503, "shutting down")))

    def _choice(self, k: int, ask: Ask, events: SimpleQueue, cancelled: threading.Event) -> None:
        try:
            found = self.agent.reply(
                ask.messages, ask.tools, temperature=ask.temperature, max_tokens=ask.max_tokens,
                seed=(ask.seed + k * 0x9E3779B97F4A7C15) % 2**63, stop=ask.stop, one_call=ask.one_call, prefix=ask.lead,
                on_text=(lambda *new: events.put((k, new))) if ask.stream else None, cancelled=cancelled)
        except Exception as error:  # handed to the thread that answers
            found = error
        self.count("used", -1)
        events.put((k, found))

    def close(self, grace: float = GRACE_S) -> None:
        """Accept nothing more, let what runs end within `grace` seconds, cancel the rest."""
        self.draining.set()
        self.shutdown()
        self.server_close()
        _wait(lambda: not self.answering, grace)
        self.stopping.set()
        _wait(lambda: not self.answering, 2.0)
        with self.lock:
            for idle in self.open:
                try:
                    idle.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it ended by itself
        _wait(lambda: not self.open, 2.0)
        self.workers.shutdown(wait=False, cancel_futures=True)


def _wait(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)


class Handler(Wire):
    server: Server

    def route(self, path: str, body: bytes) -> None:
        server, known = self.server, {"/health": "GET", "/v1/models": "GET", "/v1/chat/completions": "POST"}
        one = path.startswith("/v1/models/")
        method = "GET" if one else known.get(path)
        if method is None:
            raise ApiError(404, f"there is no {path[:100]}, only {', '.join(known)}")
        if self.command != method:
            raise ApiError(405, f"{path[:100]} takes {method}, not {self.command}")
        if path == "/health":
            gone = server.draining.is_set()
            return self.send(503 if gone else 200, {"status": "shutting down" if gone else "ok",
                                                    "running_or_waiting": server.used, "places": server.places})
        if method == "GET":
            card = {"id": server.model, "object": "model", "created": server.started, "owned_by": "slca"}
            if one:
                same_model(unquote(path.removeprefix("/v1/models/")), server.model)
            return self.send(200, card if one else {"object": "list", "data": [card]})
        try:
            ask = read_request(json.loads(body, parse_constant=_no_number), server.model, server.tokenizer)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not valid JSON ({str(error)[:200]})") from error
        self._chat(ask)

    # ------------------------------------------------------------------------------------------------------ completions
    def _chat(self, ask: Ask) -> None:
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.server.model}
        events, cancelled = SimpleQueue(), threading.Event()
        try:
            self.server.start(ask, events, cancelled)
            news = self._news(ask.n, events)
            self._stream(ask, head, news) if ask.stream else self._whole(ask, head, news)
        finally:
            cancelled.set()  # of those that are not at their end

    def _news(self, n: int, events: SimpleQueue) -> Iterator[tuple[int, object]]:
        """(k, (piece, ids, logprobs) or Reply) until all n have ended. Raises ApiError, or ConnectionError."""
        while n:
            try:
                k, new = events.get(timeout=POLL_S)
            except Empty:
                k, new = 0, None
            if self.server.stopping.is_set():
                raise ApiError(503, "shutting down")
            if self.hung_up():
                raise ConnectionAbortedError
            if isinstance(new, PromptTooLong):
                raise ApiError(400, str(new), "messages", "context_length_exceeded") from new
            if isinstance(new, Exception):
                raise new
            n -= isinstance(new, Reply)
            if new is not None:
                yield k, new

    def _whole(self, ask: Ask, head: dict, news: Iterator) -> None:
        replies = dict(news)
        choices = []
        for k in range(ask.n):
            reply = replies[k]
            content, reasoning, calls = message_of(reply.text, ask, self.server.lenient)
            message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
            message |= {"reasoning_content": reasoning} if reasoning else {}
            message |= {"tool_calls": called(calls)} if calls else {}
            choices.append({"index": k, "message": message, "finish_reason": finish_reason(reply, calls),
                            "logprobs": self._logprobs(ask, reply.ids, reply.logprobs)})
        self.send(200, head | {"object": "chat.completion", "choices": choices,
                                "usage": usage_of([replies[k] for k in range(ask.n)])})

    def _stream(self, ask: Ask, head: dict, news: Iterator) -> None:
        """Server-sent events. The answer begins with the first token, so that a refusal has its own status."""
        head |= {"object": "chat.completion.chunk"}
        head |= {"usage": None} if ask.with_usage else {}
        seen, sent, replies = [Visible(ask, self.server.lenient) for _ in range(ask.n)], [0] * ask.n, {}
        held: list[tuple[list, list]] = [([], []) for _ in range(ask.n)]  # tokens that no chunk has told of

        def tell(k: int, delta: dict, reason: str | None = None) -> None:
            logprobs, held[k] = self._logprobs(ask, *held[k]), ([], [])
            self.event(head | {"choices": [{"index": k, "delta": delta, "logprobs": logprobs,
                                             "finish_reason": reason}]})

        for k, new in news:
            if not self.streaming:
                self.start_stream()
                for j in range(ask.n):
                    tell(j, {"role": "assistant", "content": ""})
            if isinstance(new, Reply):
                replies[k] = new
                held[k] = held[k][0] + new.ids[sent[k]:], held[k][1] + new.logprobs[sent[k]:]
                whole = message_of(new.text, ask, self.server.lenient)
                for delta in seen[k].rest(*whole):
                    tell(k, delta)
                tell(k, {}, finish_reason(new, whole[2]))
            else:
                piece, ids, logprobs = new
                held[k], sent[k] = (held[k][0] + list(ids), held[k][1] + list(logprobs)), sent[k] + len(ids)
                for delta in seen[k].add(piece):
                    tell(k, delta)
        if ask.with_usage:
            self.event(head | {"choices": [], "usage": usage_of([replies[k] for k in range(ask.n)])})
        self.write(b"data: [DONE]\n\n")
        self.write(b"")

    def _logprobs(self, ask: Ask, ids: Sequence[int], logprobs: Sequence[float]) -> dict | None:
        return {"content": self.server.token_bytes.entries(ids, logprobs), "refusal": None} if ask.logprobs else None

def _no_number(name: str):
    raise ValueError(f"{name} is no JSON number")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m slca.serve", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path, help="folder with config.json, weights, tokenizer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one and says which (default 8000)")
    parser.add_argument("--rows", type=int, default=32, help="replies decoded at a time (default 32)")
    parser.add_argument("--max-len", type=int, default=16384, metavar="N",
                        help="tokens of prompt and answer; the KV cache grows to --rows times that (default 16384)")
    parser.add_argument("--queue", type=int, default=128, help="replies that may wait; more get a 503 (default 128)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all cores (default)")
    parser.add_argument("--lenient", action="store_true", help="read calls from bare JSON too, without <tool_call>")
    args = parser.parse_args()
    for name, lo in (("rows", 1), ("max_len", 2), ("queue", 0), ("port", 0), ("threads", 0)):
        if getattr(args, name) < lo:
            parser.error(f"--{name.replace('_', '-')}: expected {lo} or more, found {getattr(args, name)}")
    return args


def serve(args: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM."""
    stop = threading.Event()
    use_threads(args.threads)
    tokenizer, gpu = load_tokenizer(args.checkpoint), torch.cuda.is_available()
    # float32 on a CPU, as `evaluate.py`: a greedy reply then hardly hangs on who shares its batch
    policy = load_policy(args.checkpoint, torch.bfloat16 if gpu else torch.float32, "cuda" if gpu else "cpu")
    form = checkpoint_config(args.checkpoint, foreign=FOREIGN).chat.parallel
    longest = min(args.max_len, policy.config.max_position_embeddings)
    agent = Agent(policy.requires_grad_(False), tokenizer, args.rows, longest, form)
    try:
        server = Server(agent, tokenizer, args.checkpoint.resolve().name, args.host, args.port,
                        args.rows + args.queue, args.lenient)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        print(f"{server.model} at http://{args.host}:{server.server_port}/v1", flush=True)
        stop.wait()
        print("shutting down", flush=True)
        server.close()
    finally:
        agent.close()


def main() -> None:
    try:
        serve(arguments())
    except (ValueError, OSError, OverflowError) as error:  # a checkpoint that is none, a port that is taken
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
