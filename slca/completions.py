"""Chat completions in the OpenAI form: a request checked and in the agent's terms, a turn as a message or as deltas.

What a turn becomes: calls are read from its <tool_call> blocks (with --lenient from bare JSON too), `content` is what
stands outside of them, `reasoning_content` what stands in <think>. A turn with no valid call comes as it was written,
its malformed blocks included, and so does every turn of a request without tools. The names and arguments of calls are
the model's: they are not checked against the tools, and `strict` is not enforced. `logprobs` has every sampled token,
those of calls, thoughts and the stop included. `finish_reason` is "length" wherever the length ran out.

tool_choice: "none" hides the tools; "required" and a named function begin the turn with a call (of that name), so that
nothing else can come first, but its JSON is still the model's and may be malformed. A named function, and
parallel_tool_calls false, end the turn with the first block; one call at most is then returned. `stop` is looked for
in the whole text, calls included.

Left out: constrained decoding (response_format, strict), top_p and penalties (the sampler has none), top_logprobs,
images, the older `functions`, completions and embeddings, TLS. A field that would change the result and is not done
here is an error 400, never ignored.
"""
from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from slca import chat
from slca.agent import Reply, read_reply
from slca.rewards import strip_reasoning

MAX_CHOICES, MAX_STOPS, LONGEST_STOP = 8, 4, 200
MAX_TOKENS = 8192  # where a request names none
CALL_OPEN = "<tool_call>"
CALL_TAGS, THINK_TAGS = (CALL_OPEN, "</tool_call>"), ("<think>", "</think>", "<thinking>", "</thinking>")
THINK_END = re.compile("</think(?:ing)?>")

READ = {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stop", "seed", "temperature", "n",
        "max_tokens", "max_completion_tokens", "logprobs", "stream", "stream_options"}
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
           "prompt_cache_retention", "prediction"}
ONLY = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
        "repetition_penalty": (1,), "logit_bias": ({},), "top_logprobs": (0,), "response_format": ({"type": "text"},),
        "modalities": (["text"],), "functions": ([],)}  # values that change nothing


class ApiError(Exception):
    """A refusal: HTTP status, what is wrong, the field, and OpenAI's code for it where there is one."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}



# ---- requests

@dataclass
class Ask:
    """A request in the agent's terms. tools: None where the model is to see none; lead: what its turn begins with."""

    messages: list[dict]
    tools: list[dict] | None
    lead: str
    one_call: bool
    stop: tuple[str, ...]
    n: int
    seed: int
    temperature: float
    max_tokens: int
    logprobs: bool
    stream: bool
    with_usage: bool


def read_request(body: object, model: str, tokenizer) -> Ask:
    """Check the JSON of a request. Raises ApiError, which names the field and what was expected."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {_kind(body)}, not an object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name in ONLY and value not in ONLY[name]:
            raise ApiError(400, f"{name}: only {json.dumps(ONLY[name][0])} can be done here", name)
        if name not in READ | IGNORED | ONLY.keys():
            raise ApiError(400, f"{name[:100]}: this field is not known here", name[:100])
    same_model(_field(body, "model", str), model)
    messages, tools = _messages(_field(body, "messages", list)), _tools(_field(body, "tools", list, []))
    tools, lead, named = _tool_choice(body, tools, tokenizer)
    try:
        chat.render_text(messages, tools)
    except ValueError as error:  # names the message and its field
        raise ApiError(400, str(error), "messages") from error
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(
            isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stop):
        raise ApiError(400, f"stop: expected a text or up to {MAX_STOPS}, of 1 to {LONGEST_STOP} characters", "stop")
    longest = _number(body, "max_tokens", int, MAX_TOKENS, 1)
    options = _field(body, "stream_options", dict, {})
    return Ask(messages, tools, lead, named or not _field(body, "parallel_tool_calls", bool, True), tuple(stop),
               _number(body, "n", int, 1, 1, MAX_CHOICES),
               _number(body, "seed", int, secrets.randbits(62), -2**63, 2**63 - 1) % 2**63,
               float(_number(body, "temperature", float, 1.0, 0, 2)),
               _number(body, "max_completion_tokens", int, longest, 1), _field(body, "logprobs", bool, False),
               _field(body, "stream", bool, False), _field(options, "include_usage", bool, False))


def same_model(asked: str, model: str) -> None:
    if asked != model:
        raise ApiError(404, f"model {asked[:100]!r} is not here, only {model!r}", "model", "model_not_found")


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number")


def _field(body: dict, name: str, kind: type, default=None):
    value = body.get(name, default)
    if not isinstance(value, kind):
        raise ApiError(400, f"{name}: expected {_kind(kind())}, found {_kind(value)}", name)
    return value


def _number(body: dict, name: str, kind: type, default, lo, hi=10**9):
    value = body.get(name, default)
    kinds = (int, float) if kind is float else int
    if isinstance(value, bool) or not isinstance(value, kinds) or not lo <= value <= hi:
        raise ApiError(400, f"{name}: expected a {'whole ' * (kind is int)}number from {lo} to {hi}, "
                            f"found {json.dumps(value)[:50]}", name)
    return value


def _messages(given: list) -> list[dict]:
    """As `chat.render` takes them. The results of a turn are put in the order of its calls: the template has no ids."""
    if not given:
        raise ApiError(400, "messages: empty", "messages")
    out: list[dict] = []
    place: dict[str, int] = {}  # id of a call of the last assistant turn -> which of its calls
    results: dict[int, dict] = {}  # of that turn, by call
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise ApiError(400, f"{where}: expected an object, found {_kind(message)}", "messages")
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise ApiError(400, f"{where}.role: expected system, developer, user, assistant or tool, "
                                f"found {str(role)[:50]!r}", "messages")
        new = {"role": "system" if role == "developer" else role,
               "content": _text(message.get("content"), f"{where}.content", empty=role == "assistant")}
        if role == "tool":
            at = place.get(message["tool_call_id"]) if isinstance(message.get("tool_call_id"), str) else None
            if at is None or at in results:
                raise ApiError(400, f"{where}.tool_call_id: expected the id of a call of the assistant's turn before, "
                                    "that has no result yet, "
                                    f"found {str(message.get('tool_call_id'))[:50]!r}", "messages")
            results[at] = new
            continue
        out += [results[at] for at in sorted(results)]
        place, results = {}, {}
        if role == "assistant":
            if message.get("function_call"):
                raise ApiError(400, f"{where}.function_call: only tool_calls can be read here", "messages")
            calls = message.get("tool_calls") or []
            new |= {"tool_calls": calls} if calls else {}
            new |= {"reasoning_content": message["reasoning_content"]} if message.get("reasoning_content") else {}
            calls = calls if isinstance(calls, list) else []
            place = {call["id"]: k for k, call in enumerate(calls)
                     if isinstance(call, dict) and isinstance(call.get("id"), str)}
        out.append(new)
    return out + [results[at] for at in sorted(results)]


def _text(content: object, where: str, empty: bool) -> str:
    """The text of a content: a text, or parts of text (a line each)."""
    if content is None and empty:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: expected a text or a list of text parts, found {_kind(content)}", "messages")
    texts = []
    for k, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise ApiError(400, f'{where}[{k}]: expected {{"type": "text", "text": "..."}}', "messages")
        texts.append(text)
    return "\n".join(texts)


def _tools(given: list) -> list[dict]:
    tools = []
    for k, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(400, f'tools[{k}]: expected {{"type": "function", "function": {{"name": ...}}}}', "tools")
        if not isinstance(function.get("parameters", {}), dict):
            raise ApiError(400, f"tools[{k}].function.parameters: expected an object", "tools")
        tools.append(tool | {"function": {key: value for key, value in function.items() if key != "strict"}})
    return tools


def _tool_choice(body: dict, tools: list[dict], tokenizer) -> tuple[list[dict] | None, str, bool]:
    """(tools the model sees, what its turn begins with, whether one function is named)."""
    choice = body.get("tool_choice", "auto")
    if choice == "none" or choice == "auto":
        return tools if tools and choice == "auto" else None, "", False
    if not tools:
        raise ApiError(400, "tool_choice: there are no tools to choose from", "tool_choice")
    if choice == "required":
        return tools, CALL_OPEN, False
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, 'tool_choice: expected "auto", "none", "required" or {"type": "function", "function": '
                            '{"name": ...}}', "tool_choice")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise ApiError(400, f"tool_choice: {name[:100]!r} is none of the tools", "tool_choice")
    if any(token in name for token in tokenizer.control):  # the agent takes this text for its own
        raise ApiError(400, "tool_choice: this name holds a control token and cannot be asked for", "tool_choice")
    return tools, _begun_call(name, tokenizer), True


def _begun_call(name: str, tokenizer) -> str:
    """The beginning of a call, up to its name or as much further as the model itself would end a token."""
    least = f'{CALL_OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}'
    ids = tokenizer.encode(f'{least}, "arguments": {{"x": ')
    texts = (tokenizer.decode(ids[:k]) for k in range(1, len(ids) + 1))
    return next((text for text in texts if text.startswith(least)), least)


# ---- replies

def _thought(text: str) -> str | None:
    """What the first <think> holds, cut off or not."""
    _, opened, rest = text.partition("<think>")
    return THINK_END.split(rest, 1)[0].strip() if opened else None


def message_of(text: str, ask: Ask, lenient: bool) -> tuple[str, str | None, list[dict]]:
    """(content, reasoning, calls) of a whole turn, its lead included."""
    reasoning = _thought(text)
    spoken = strip_reasoning(text).partition("<think>")[0].replace("</think>", "")  # one that is cut off, one alone
    content, _, calls, _ = read_reply(spoken, lenient) if ask.tools else ("", None, [], False)
    return (content, reasoning, calls[:1] if ask.one_call else calls) if calls else (spoken.strip(), reasoning, [])


class Visible:
    """What a client may see of a turn while it is written: the beginning of the content that the whole turn will have.

    From the first tag of a call on, all is held back until the turn ends.
    """

    def __init__(self, ask: Ask, lenient: bool):
        self.text, self.sent, self.at, self.begun = ask.lead, "", 0, False
        self.thought: str | None = None
        self.held = bool(ask.lead) or lenient and ask.tools is not None  # any text may then be part of a call
        self.marks = (*THINK_TAGS, *(CALL_TAGS if ask.tools else ()))
        self.mark = re.compile("|".join(map(re.escape, self.marks)))

    def add(self, piece: str) -> list[dict]:
        """Deltas of a message."""
        self.text += piece
        if self.held:
            return []
        deltas = []
        if not self.begun:
            head = self.text.lstrip()
            if "<think>".startswith(head[:len("<think>")]):  # perhaps, or surely: a thought comes first
                end = THINK_END.search(self.text)
                if end is None:
                    return []
                self.at = end.end()
                self.thought = _thought(self.text)
                deltas += [{"reasoning_content": self.thought}] if self.thought else []
            self.begun = True
        found = self.mark.search(self.text, self.at)
        end, self.held = (found.start(), True) if found else (len(self.text) - self._open(), False)
        new = self.text[self.at:end].rstrip()
        self.at += len(new)
        new = new if self.sent else new.lstrip()
        self.sent += new
        return deltas + ([{"content": new}] if new else [])

    def _open(self) -> int:
        """Length of the text's end that may yet become a tag. (The agent holds back what may become a stop string.)"""
        rest = self.text[self.at:]
        return max((n for tag in self.marks for n in range(1, len(tag)) if rest.endswith(tag[:n])), default=0)

    def rest(self, content: str, reasoning: str | None, calls: list[dict]) -> list[dict]:
        """The deltas that are still missing of the whole message."""
        deltas = [{"reasoning_content": reasoning}] if reasoning and not self.thought else []
        if content.startswith(self.sent) and len(content) > len(self.sent):
            deltas.append({"content": content[len(self.sent):]})
        return deltas + [{"tool_calls": [{"index": k} | call]} for k, call in enumerate(called(calls))]


def called(calls: list[dict]) -> list[dict]:
    """Calls in the API's form, with new ids."""
    return [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {
        "name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}} for call in calls]


def finish_reason(reply: Reply, calls: list[dict]) -> str:
    return "length" if not reply.stopped else "tool_calls" if calls else "stop"


def usage_of(replies: Sequence[Reply]) -> dict:
    """Tokens; the prompt counts once for all choices."""
    prompt, new = replies[0].prompt_tokens, sum(len(reply.ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens}}


class TokenBytes:
    """The bytes of a token, also where they are a part of a character only: token_bytes(id) -> bytes."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.control = {i: name for name, i in tokenizer.control.items()}
        # byte-level BPE writes printable bytes as themselves and the others, in order, as the letters from U+0100 on
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = {chr(b): b for b in plain} | {chr(256 + k): b for k, b in enumerate(
            b for b in range(256) if b not in plain)}
        byte_level = all(tokenizer.token_to_id(c) is not None for c in letters)
        self.letters = letters if byte_level else None

    def __call__(self, i: int) -> bytes:
        name = self.control.get(i) or self.tokenizer.id_to_token(i)
        if i in self.control:
            return name.encode()
        if self.letters is not None and all(c in self.letters for c in name):
            return bytes(self.letters[c] for c in name)
        if re.fullmatch("<0x[0-9A-F]{2}>", name):  # sentencepiece's single bytes
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()

    def entries(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[dict]:
        """`logprobs.content` of tokens."""
        raws = map(self, ids)
        return [{"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw), "top_logprobs": []}
                for raw, logprob in zip(raws, logprobs, strict=True)]
