"""HTTP/1.1 of the server: bodies and answers, whole or as a stream of events, each within bytes and seconds.

Who sends slowly, too much, or half a request gets an answer and loses the connection; other connections go on.
What the requests mean says `serve.py`.
"""
from __future__ import annotations

import io
import json
import re
import socket
import time
import traceback
from http.server import BaseHTTPRequestHandler

from slca.completions import ApiError

MAX_BODY = 8 * 2**20  # bytes of a request
READ_S, IDLE_S, WRITE_S = 30.0, 120.0, 30.0  # seconds: a whole request, between two of a connection, one write
LINGER_S, LINGER_BYTES = 2.0, 64 * 2**20  # what is still read of a request that was refused unread


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


class Wire(BaseHTTPRequestHandler):
    """A connection. A subclass has `route(path, body)`, which answers by `send`, or by `start_stream`, `event`s and
    `write`, or raises ApiError. The server has `count`, and `draining`: no more requests are taken."""

    protocol_version, server_version, sys_version = "HTTP/1.1", "slca", ""
    disable_nagle_algorithm = True

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
            self.route(self.path.split("?")[0], self._body())
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

    def hung_up(self) -> bool:
        """Has the client closed its side? What it may have sent ahead stays unread."""
        self.connection.settimeout(0)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

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

    def send(self, status: int, answer: dict, **headers: str) -> None:
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
                self.event(error.body)
                return self.write(b"")
            more = {"Retry_After": "1"} if error.status == 503 else {}
            self.send(error.status, error.body, **more)
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

    def start_stream(self) -> None:
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

    def event(self, data: dict) -> None:
        self.write(f"data: {json.dumps(data)}\n\n".encode())

    def write(self, data: bytes) -> None:
        """A chunk of a stream; the empty one ends it."""
        self.connection.settimeout(WRITE_S)
        if self.chunked:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        elif data:
            self.wfile.write(data)
