"""A checkpoint behind an OpenAI-compatible endpoint: python -m slca.serve --checkpoint DIR [--port N]

GET /v1/models, POST /v1/chat/completions, GET /health; standard library only. All requests are decoded together
(`agent.Agent`). No key is asked for, so it listens on loopback unless --host says otherwise.

What is done of the API and what is not says `completions.py`. Left out: TLS.
"""
from __future__ import annotations

import argparse
import io
import json
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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

MAX_BODY = 8 * 2**20  # bytes of a request
READ_S, IDLE_S, WRITE_S = 30.0, 120.0, 30.0  # seconds: a whole request, between two of a connection, one write
LINGER_S, LINGER_BYTES = 2.0, 64 * 2**20  # what is still read of a request that was refused unread
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


class Timed(io.RawIOBase):
    """Reads a socket. What comes between two `rest()`s must be there READ_S after its first byte."""

    def __init__(self, sock: socket.socket):
        self.sock, self.until = sock, None

    def rest(self) -> None:
        self.until = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left = IDLE_S if self.until is None else self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.sock.settimeout(left)
        count = self.sock.recv_into(buffer)
        if self.until is None:
            self.until = time.monotonic() + READ_S
        return count


class Handler(BaseHTTPRequestHandler):
    protocol_version, server_version, sys_version = "HTTP/1.1", "slca", ""
    disable_nagle_algorithm = True
    server: Server

    def setup(self):
        super().setup()
        self.timed = Timed(self.connection)
        self.rfile = io.BufferedReader(self.timed)

    def handle_one_request(self):
        self.timed.rest()
        self.streaming = False
        super().handle_one_request()

    def respond(self):
        self.server.count("answering", 1)
        try:
            self._route(self.path.split("?")[0], self._body())
        except ApiError as error:
            self._fail(error)
        except TimeoutError:
            self.close_connection = True
            if not self.streaming:
                self._fail(ApiError(408, f"the request was not complete within {READ_S:g} s"))
        except ConnectionError:
            self.close_connection = True
        except Exception:
            traceback.print_exc()
            self._fail(ApiError(500, "internal error"))
        finally:
            self.server.count("answering", -1)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = respond

    def _route(self, path: str, body: bytes) -> None:
        server, known = self.server, {"/health": "GET", "/v1/models": "GET", "/v1/chat/completions": "POST"}
        one = path.startswith("/v1/models/")
        method = "GET" if one else known.get(path)
        if method is None:
            raise ApiError(404, f"there is no {path[:100]}, only {', '.join(known)}")
        if self.command != method:
            raise ApiError(405, f"{path[:100]} takes {method}, not {self.command}")
        if path == "/health":
            gone = server.draining.is_set()
            return self._send(503 if gone else 200, {"status": "shutting down" if gone else "ok",
                                                     "running_or_waiting": server.used, "places": server.places})
        if method == "GET":
            card = {"id": server.model, "object": "model", "created": server.started, "owned_by": "slca"}
            if one:
                same_model(unquote(path.removeprefix("/v1/models/")), server.model)
            return self._send(200, card if one else {"object": "list", "data": [card]})
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
            if self._hung_up():
                raise ConnectionAbortedError
            if isinstance(new, PromptTooLong):
                raise ApiError(400, str(new), "messages", "context_length_exceeded") from new
            if isinstance(new, Exception):
                raise new
            n -= isinstance(new, Reply)
            if new is not None:
                yield k, new

    def _hung_up(self) -> bool:
        """Has the client closed its side? What it may have sent ahead stays unread."""
        self.connection.settimeout(0)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

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
        self._send(200, head | {"object": "chat.completion", "choices": choices,
                                "usage": usage_of([replies[k] for k in range(ask.n)])})

    def _stream(self, ask: Ask, head: dict, news: Iterator) -> None:
        """Server-sent events. The answer begins with the first token, so that a refusal has its own status."""
        head |= {"object": "chat.completion.chunk"}
        head |= {"usage": None} if ask.with_usage else {}
        seen, sent, replies = [Visible(ask, self.server.lenient) for _ in range(ask.n)], [0] * ask.n, {}
        held: list[tuple[list, list]] = [([], []) for _ in range(ask.n)]  # tokens that no chunk has told of

        def tell(k: int, delta: dict, reason: str | None = None) -> None:
            logprobs, held[k] = self._logprobs(ask, *held[k]), ([], [])
            self._event(head | {"choices": [{"index": k, "delta": delta, "logprobs": logprobs,
                                             "finish_reason": reason}]})

        for k, new in news:
            if not self.streaming:
                self._start_stream()
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
            self._event(head | {"choices": [], "usage": usage_of([replies[k] for k in range(ask.n)])})
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _logprobs(self, ask: Ask, ids: Sequence[int], logprobs: Sequence[float]) -> dict | None:
        return {"content": self.server.token_bytes.entries(ids, logprobs), "refusal": None} if ask.logprobs else None

    # ------------------------------------------------------------------------------------------------------------- HTTP
    def _body(self) -> bytes:
        """The whole body. Raises ApiError; the connection then ends: nobody knows where the next request begins."""
        lengths = self.headers.get_all("Content-Length", [])
        coding = ", ".join(self.headers.get_all("Transfer-Encoding", [])).strip().lower()
        try:
            if coding and (coding != "chunked" or lengths):
                raise ApiError(400, "Transfer-Encoding: expected chunked alone, and then no Content-Length")
            if coding:
                return self._chunks()
            if not lengths:
                if self.command == "POST":
                    raise ApiError(411, "Content-Length: missing")
                return b""
            if len(set(lengths)) > 1 or not re.fullmatch("[0-9]{1,18}", lengths[0].strip(), re.ASCII):
                raise ApiError(400, f"Content-Length: expected a number of bytes, found {lengths[0][:50]!r}")
            return self._exactly(int(lengths[0]), 0)
        except ApiError:
            self.unread = self.close_connection = True
            raise

    def _exactly(self, count: int, before: int) -> bytes:
        if before + count > MAX_BODY:
            raise ApiError(413, f"the body has more than {MAX_BODY} bytes")
        data = self.rfile.read(count)
        if len(data) < count:
            raise ConnectionAbortedError("the client hung up within its request")
        return data

    def _chunks(self) -> bytes:
        body = bytearray()
        while True:
            size = self.rfile.readline(1000).split(b";")[0].strip()
            if not re.fullmatch(b"[0-9A-Fa-f]{1,8}", size):
                raise ApiError(400, f"a chunk's size in hexadecimal was expected, found {size[:50]!r}")
            if int(size, 16) == 0:
                break
            body += self._exactly(int(size, 16), len(body))
            if self.rfile.readline(3) not in (b"\r\n", b"\n"):
                raise ApiError(400, "a chunk does not end where it says")
        for _ in range(100):  # trailers
            if self.rfile.readline(65537) in (b"\r\n", b"\n", b""):
                return bytes(body)
        raise ApiError(400, "more than 100 trailers")

    def _send(self, status: int, answer: dict, **headers: str) -> None:
        data = json.dumps(answer).encode()
        self.close_connection = self.close_connection or self.server.draining.is_set()
        self.connection.settimeout(WRITE_S)
        self.send_response(status)
        headers |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        headers |= {"Connection": "close"} if self.close_connection else {}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data)

    def _fail(self, error: ApiError) -> None:
        try:
            if self.streaming:  # its status is out: the error comes as an event, and no [DONE]
                self.close_connection = True
                self._event(error.body)
                return self._write(b"")
            more = {"Retry_After": "1"} if error.status == 503 else {}
            self._send(error.status, error.body, **more)
            if getattr(self, "unread", False):
                self._linger()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _linger(self) -> None:
        """Read on for a while: closing on unread bytes resets the connection, perhaps before the answer is seen."""
        self.connection.shutdown(socket.SHUT_WR)
        end, left = time.monotonic() + LINGER_S, LINGER_BYTES
        while left > 0 and (wait := end - time.monotonic()) > 0:
            self.connection.settimeout(wait)
            count = len(self.connection.recv(2**16))
            left = left - count if count else 0

    def log_message(self, *args):
        pass  # clients see their errors; the server's own are printed with their traceback

    def send_error(self, code, message=None, explain=None):
        """What the base class refuses (no HTTP, an unknown method, too long a line), in our form."""
        self.close_connection = self.unread = True
        self.streaming, self.request_version = False, self.protocol_version
        self._fail(ApiError(405 if code == 501 else int(code), message or "not a request this server takes"))

    def _start_stream(self) -> None:
        self.streaming = True
        self.chunked = self.request_version == "HTTP/1.1"
        self.close_connection = self.close_connection or not self.chunked or self.server.draining.is_set()
        self.connection.settimeout(WRITE_S)
        self.send_response(200)
        for name, value in {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}.items():
            self.send_header(name, value)
        if self.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _event(self, data: dict) -> None:
        self._write(f"data: {json.dumps(data)}\n\n".encode())

    def _write(self, data: bytes) -> None:
        """A chunk of a stream; the empty one ends it."""
        self.connection.settimeout(WRITE_S)
        if self.chunked:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        elif data:
            self.wfile.write(data)


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
