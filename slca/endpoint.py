"""A client of an OpenAI-compatible server (vLLM, llama.cpp, SGLang ...): chat completions, standard library only.

Connections are kept alive, one a worker thread. What may pass (no connection, a timeout, 408, 409, 425, 429, 5xx) is
tried again after a pause that doubles, or that the server asks for. An exchange has a deadline over all of it (the
connection before it one of its own), and an answer a largest size, so that a server that drips or floods costs no more
than that. Left out: streaming, proxies, redirects.
"""
from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

MAX_ANSWER = 16 * 2**20  # bytes of one response
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before the second try, and at most


class EndpointError(OSError):
    """No usable answer; `again`: whether another try may help, `pause`: seconds the server asked for."""

    def __init__(self, message: str, again: bool = False, pause: float | None = None):
        super().__init__(message)
        self.again, self.pause = again, pause


class Endpoint:
    """POSTs to {url}/chat/completions, at most `concurrency` requests at a time.

    url: base, as "http://127.0.0.1:8000/v1". model: None asks the server for the first it lists. key_env: environment
    variable with the API key. timeout_s: of one try; retries: tries after the first. ValueError: url or variable.
    """

    def __init__(self, url: str, model: str | None = None, key_env: str | None = None, timeout_s: float = 540.0,
                 retries: int = 2, concurrency: int = 16):
        try:
            parts = urlsplit(url)
            self.secure, self.host, self.port = parts.scheme == "https", parts.hostname, parts.port
            good = parts.scheme in ("http", "https") and bool(self.host and self.host.encode("idna"))
        except ValueError:  # a port that is no number or too large, a name that cannot be one
            good = False
        if not good:
            raise ValueError(f"endpoint {url!r}: expected http://HOST[:PORT]/v1 or https://...")
        self.base, self.url, self.model = parts.path.rstrip("/"), url, model
        self.timeout_s, self.retries = timeout_s, retries
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key_env:
            key = os.environ.get(key_env, "").strip()
            if not key or not key.isascii() or not key.isprintable():  # never quoted: messages are printed
                raise ValueError(f"environment variable {key_env} (the key of {url}) is not set, or holds what no "
                                 "header can")
            self.headers["Authorization"] = f"Bearer {key}"
        self.workers = ThreadPoolExecutor(concurrency, "endpoint")
        self.own = threading.local()

    def chat_all(self, chats: Sequence[list[dict]], temperature: float, max_tokens: int,
                 seeds: Sequence[int]) -> list[str | None]:
        """The assistant's text for each list of messages; None where there was none after all tries (one warning)."""
        try:
            self._again(self._name)  # once, and not in every worker
        except EndpointError as error:
            warnings.warn(f"{self.url}: all {len(chats)} requests failed: {error}", stacklevel=2)
            return [None] * len(chats)
        waiting = [self.workers.submit(self.chat, chat, temperature, max_tokens, seed)
                   for chat, seed in zip(chats, seeds, strict=True)]
        texts, errors = [], []
        for future in waiting:
            try:
                texts.append(future.result())
            except EndpointError as error:
                texts.append(None)
                errors.append(error)
        if errors:
            warnings.warn(f"{self.url}: {len(errors)} of {len(texts)} requests failed, the first: {errors[0]}",
                          stacklevel=2)
        return texts

    def chat(self, messages: list[dict], temperature: float, max_tokens: int, seed: int | None = None) -> str:
        """The text of one assistant message. Raises EndpointError once no further try may help."""
        def once() -> str:
            body = {"model": self._name(), "messages": messages, "temperature": temperature,
                    "max_tokens": max_tokens} | ({} if seed is None else {"seed": seed})
            return _text(self._ask("POST", "/chat/completions", body))

        return self._again(once)

    def _again(self, work: Callable[[], str]) -> str:
        """work(), and after what may pass up to `retries` times more."""
        for attempt in range(self.retries + 1):
            try:
                return work()
            except EndpointError as error:
                if not error.again or attempt == self.retries:
                    raise
                wanted = PAUSE * 2**attempt if error.pause is None else error.pause
                time.sleep(min(wanted, LONGEST_PAUSE))
        raise AssertionError  # not reached: retries is 0 or more

    def _name(self) -> str:
        if self.model is None:
            found = self._ask("GET", "/models", None)
            try:
                self.model = str(found["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise EndpointError("/models lists none; give its name") from error
        return self.model

    def _ask(self, method: str, path: str, body: dict | None) -> object:
        """The JSON of one exchange, tried once. Raises EndpointError."""
        fresh = getattr(self.own, "connection", None) is None
        try:
            return self._exchange(method, path, body)
        except (ConnectionError, http.client.HTTPException) as error:
            if fresh:
                raise EndpointError(f"{type(error).__name__}: {error}", again=True) from error
        try:  # a kept connection that the server has closed in between: once more on a new one, at no cost of a try
            return self._exchange(method, path, body)
        except (ConnectionError, http.client.HTTPException) as error:
            raise EndpointError(f"{type(error).__name__}: {error}", again=True) from error

    def _exchange(self, method: str, path: str, body: dict | None) -> object:
        connection = getattr(self.own, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
            connection = self.own.connection = kind(self.host, self.port, timeout=self.timeout_s)
        late, keep, timer = threading.Event(), False, None
        try:
            if connection.sock is None:
                connection.connect()
            timer = threading.Timer(self.timeout_s, _hang_up, (connection.sock, late))
            timer.daemon = True
            timer.start()
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self.base + path, data, self.headers)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER + 1)
            keep = len(answer) <= MAX_ANSWER and not response.will_close and not late.is_set()
            return _read(response, answer)
        except (TimeoutError, OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise EndpointError(f"no answer within {self.timeout_s:g} s", again=True) from error
            if isinstance(error, EndpointError | ConnectionError | http.client.HTTPException):
                raise
            raise EndpointError(f"{type(error).__name__}: {error}", again=True) from error  # unknown host, TLS
        except ValueError as error:  # what http.client cannot send or read
            raise EndpointError(type(error).__name__) from error
        finally:
            if timer is not None:
                timer.cancel()
            if not keep:
                connection.close()
                self.own.connection = None


def _hang_up(sock: socket.socket, late: threading.Event) -> None:
    """End an exchange from another thread: its socket's reads and writes then fail at once."""
    late.set()
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it ended by itself


def _read(response: http.client.HTTPResponse, answer: bytes) -> object:
    if len(answer) > MAX_ANSWER:
        raise EndpointError(f"an answer of more than {MAX_ANSWER} bytes")
    if response.status != 200:
        pause = response.headers.get("Retry-After", "")
        raise EndpointError(f"status {response.status}: {answer[:200].decode('utf-8', 'replace')}",
                            response.status in AGAIN, float(pause) if pause.isascii() and pause.isdigit() else None)
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"no JSON: {answer[:200].decode('utf-8', 'replace')!r}", again=True) from error


def _text(answer: object) -> str:
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"no choices[0].message.content in {str(answer)[:200]}") from error
    if not isinstance(text, str):
        raise EndpointError(f"choices[0].message.content is {type(text).__name__}, not text")
    return text
