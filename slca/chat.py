"""Messages and tools -> text and ids: the chat and tool formats of Qwen2.5 and Qwen3 (Hermes style), by hand.

Which of the two is the tokenizer's matter (`Tokenizer.template`). Qwen3 has no default system line, keeps the thoughts
of the turns after the last user query and drops older ones, and puts an empty think block before a last turn that has
no thought.

Every dialogue is a list of spans (text, trusted). Only what this file writes itself is trusted, so that content cannot
forge a turn: `<|im_end|>` in a tool result stays text. One exception, for past and demonstrated assistant turns: the
four tags `<think>`, `</think>`, `<tool_call>`, `</tool_call>` in an assistant's own content count. The arguments of
calls and the tools' schemas are data and never count.

Two forms for parallel calls: "list" (the paper's) writes one `<tool_call>` block with a JSON list where a turn makes
two calls or more, "blocks" (Qwen's own) one block a call. A single call looks the same in both.

Qwen2.5's own template leaves `reasoning_content` out, and so does the "blocks" form of a dialogue; the "list" form and
what the assistant is to write (`assistant_target`) have it as a think block. Names and text arguments of calls are
checked and written as JSON; Qwen3's template takes valid text arguments as they stand, and so does its form here.

Left out: templates of other model families (also Qwen3's later ones for models that only think or never do), Qwen3's
`enable_thinking=False`, images, and reading a sampled turn (`rewards.parse_blocks`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from .tokenizer import QWEN3, QWEN25, Span, Tokenizer

DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TOOLS_BEFORE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
START, END, CALL_END = "<|im_start|>", "<|im_end|>", "</tool_call>"
ASSISTANT_TAGS = re.compile(r"(</?(?:think|tool_call)>)")


def render(
    messages: Sequence[dict],
    tools: Sequence[dict] | None,
    tokenizer: Tokenizer,
    add_generation_prompt: bool = True,
    parallel: str = "list",
) -> list[int]:
    """Ids of a dialogue, ending where the assistant is to write (or after the last turn, without generation prompt).

    A message is {"role": system | user | assistant | tool, "content": str or None}; an assistant's may have
    "tool_calls", each {"name", "arguments"} or {"function": {"name", "arguments"}} with the arguments as an object or
    as JSON text, and "reasoning_content". ValueError names the message and the field that is wrong.
    """
    return tokenizer.encode_spans(_dialogue(messages, tools, add_generation_prompt, parallel, tokenizer.template))


def render_text(
    messages: Sequence[dict],
    tools: Sequence[dict] | None,
    tokenizer: Tokenizer | None = None,
    add_generation_prompt: bool = True,
    parallel: str = "list",
) -> str:
    """The text whose ids `render` gives; with parallel="blocks" it is that of the model's own template.

    The arguments are those of `render`; the tokenizer only names the template, without one it is Qwen2.5's.
    """
    template = QWEN25 if tokenizer is None else tokenizer.template
    return "".join(text for text, _ in _dialogue(messages, tools, add_generation_prompt, parallel, template))


def tool_turn(results: Sequence[str], tokenizer: Tokenizer, closed: bool) -> list[int]:
    """Ids to append after a sampled turn that made calls, up to where the assistant writes again.

    `closed`: the sampled turn ended with `<|im_end|>` itself. The ids are those `render` gives for the same dialogue,
    because `<|im_end|>` is a control token at which tokenisation starts anew.
    """
    if not results:
        raise ValueError("tool_turn: no results")
    spans = [("" if closed else END, True), ("\n", True)]
    for k, result in enumerate(results):
        if not isinstance(result, str):
            raise ValueError(f"tool_turn: result {k} is {type(result).__name__}, not str")
        spans += _tool(result, first=k == 0, last=k == len(results) - 1)
    return tokenizer.encode_spans([*spans, (f"{START}assistant\n", True)])


def assistant_target(message: dict, tokenizer: Tokenizer, parallel: str = "list") -> list[int]:
    """Ids of an assistant message as the model should write it after the generation prompt, its stop included.

    In "list" form a turn that calls stops at `</tool_call>`, as the sampler does; the `<|im_end|>` after it is glue
    that `tool_turn` adds. All other turns stop at `<|im_end|>`.

    With Qwen3 the ids are those of the full render too, taken once a call's results have followed: a turn that calls
    has a think block if it has a thought, one that does not has a think block in any case. (One limit of any template
    here: a full render may join the line end of `assistant\\n` and one that a message begins with into one token, which
    no policy can.)
    """
    _check_parallel(parallel)
    if _role(message, 0) != "assistant":
        raise ValueError(f"assistant_target: a message of role 'assistant' expected, found {message['role']!r}")
    calling = bool(message.get("tool_calls")) or _content(message, 0, required=False).rstrip().endswith(CALL_END)
    spans = list(_assistant(message, 0, parallel, tokenizer.template, current=True, last=not calling))
    stops_at_call = parallel == "list" and bool(spans) and spans[-1] == (CALL_END, True)
    return tokenizer.encode_spans(spans if stops_at_call else [*spans, (END, True)])


def _dialogue(messages, tools, add_generation_prompt, parallel, template) -> Iterator[Span]:
    _check_parallel(parallel)
    if not messages:
        raise ValueError("messages: empty")
    roles = [_role(message, i) for i, message in enumerate(messages)]
    yield from _system(_content(messages[0], 0) if roles[0] == "system" else None, tools, template)
    query = _last_query(messages, roles) if template == QWEN3 else -1
    for i, (message, role) in enumerate(zip(messages, roles, strict=True)):
        if role == "tool":
            first = i == 0 or roles[i - 1] != "tool"
            last = i + 1 == len(roles) or roles[i + 1] != "tool"
            yield from _tool(_content(message, i), first, last)
        elif role == "assistant":
            yield f"{START}assistant\n", True
            if template == QWEN25 and parallel == "blocks":  # Qwen2.5's template knows no thoughts of their own
                message = {k: v for k, v in message.items() if k != "reasoning_content"}
            yield from _assistant(message, i, parallel, template, i > query, i + 1 == len(roles))
            yield f"{END}\n", True
        elif role == "user" or i > 0:
            yield f"{START}{role}\n", True
            yield _content(message, i), False
            yield f"{END}\n", True
    if add_generation_prompt:
        yield f"{START}assistant\n", True


def _system(content: str | None, tools, template: str) -> Iterator[Span]:
    """The system turn; `content` None where the dialogue brings none."""
    if content is None and not tools and template == QWEN3:
        return
    before = TOOLS_BEFORE
    yield f"{START}system\n", True
    if content is not None:
        yield content, False
    elif template == QWEN25:
        yield DEFAULT_SYSTEM, True
    else:
        before = before.lstrip("\n")  # nothing stands before it
    if tools:
        yield before, True
        for k, tool in enumerate(tools):
            yield "\n", True
            yield _json(tool, f"tools[{k}]"), False
        yield TOOLS_AFTER, True
    yield f"{END}\n", True


def _last_query(messages, roles: list[str]) -> int:
    """Index of the last user message that is no tool result in a user's clothes; the last index if there is none."""
    for i in reversed(range(len(roles))):
        if roles[i] == "user":
            content = _content(messages[i], i)
            if not (content.startswith("<tool_response>") and content.endswith("</tool_response>")):
                return i
    return len(roles) - 1


def _tool(content: str, first: bool, last: bool) -> Iterator[Span]:
    """One result; neighbouring results share a user turn."""
    yield (f"{START}user" if first else "") + "\n<tool_response>\n", True
    yield content, False
    yield "\n</tool_response>" + (f"{END}\n" if last else ""), True


def _assistant(message: dict, i: int, parallel: str, template: str, current: bool, last: bool) -> Iterator[Span]:
    """An assistant turn between `<|im_start|>assistant\\n` and `<|im_end|>`.

    current: no user query has followed it; last: it is the dialogue's last message. Only Qwen3's form asks for them.
    """
    calls = _calls(message, i, template)
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ValueError(f"message {i}: reasoning_content is {type(reasoning).__name__}, not str")
    content = _content(message, i, required="tool_calls" not in message and not reasoning)
    thought = [(reasoning, False)] if reasoning else []
    thinks, body = bool(reasoning), content
    if template == QWEN3:
        if reasoning is None and "</think>" in content:  # the thought stands in the content
            reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
            thought = list(_tagged(reasoning))
        else:
            thought = [((reasoning or "").strip("\n"), False)]
        thinks = current and (last or bool(reasoning))
        body = content.lstrip("\n") if thinks else content
    if thinks:
        yield "<think>", True
        yield "\n", False
        yield from thought
        yield "\n", False
        yield "</think>", True
        yield "\n\n", True
    yield from _tagged(body)
    blocks = [f"[{', '.join(calls)}]"] if parallel == "list" and len(calls) > 1 else calls
    for k, block in enumerate(blocks):
        yield ("\n" if content or k else "") + "<tool_call>\n", True
        yield block, False
        yield "\n", True
        yield CALL_END, True


def _tagged(text: str) -> Iterator[Span]:
    """An assistant's own text, in which its four tags count."""
    for k, part in enumerate(ASSISTANT_TAGS.split(text)):
        if part:
            yield part, k % 2 == 1


def _calls(message: dict, i: int, template: str) -> list[str]:
    """The calls of a message, each as JSON text. Qwen3's template writes arguments that are text as they stand."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise ValueError(f"message {i}: tool_calls is {type(calls).__name__}, not a list")
    texts = []
    for k, call in enumerate(calls):
        where = f"message {i}: tool_calls[{k}]"
        call = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError(f"{where}.name is missing or not a string")
        arguments = given = call.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(f"{where}.arguments is not valid JSON ({error})") from error
        if arguments is None or arguments == "":  # a call without arguments, as some recorders write it
            arguments = {}
        if not isinstance(arguments, dict):
            raise ValueError(f"{where}.arguments is {type(arguments).__name__}, not an object")
        text = _json({"name": call["name"], "arguments": arguments}, f"{where}.arguments")
        if template == QWEN3 and isinstance(given, str) and given.strip():
            text = f'{{"name": {_json(call["name"], where)}, "arguments": {given}}}'
        texts.append(text)
    return texts


def _role(message: dict, i: int) -> str:
    if not isinstance(message, dict):
        raise ValueError(f"message {i}: {type(message).__name__}, not a mapping")
    if "role" not in message:
        raise ValueError(f"message {i}: role is missing")
    if message["role"] not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"message {i}: role is {message['role']!r}, not system, user, assistant or tool")
    return message["role"]


def _content(message: dict, i: int, required: bool = True) -> str:
    """The content; None is the empty text, a missing one an error where it is required."""
    if required and "content" not in message:
        raise ValueError(f"message {i}: content is missing")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise ValueError(f"message {i}: content is {type(content).__name__}, not str")
    return content or ""


def _json(value, where: str) -> str:
    """JSON as the template's `tojson` writes it; no NaN, which is no JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON ({error})") from error


def _check_parallel(parallel: str) -> None:
    if parallel not in ("list", "blocks"):
        raise ValueError(f"parallel is {parallel!r}, not 'list' or 'blocks'")
