"""What answers a valid call besides the rules: a frozen language model (the paper's SGLS), or your own functions.

The model plays the API server (paper Section 3 and Table 7; prompt and unwrapping after the released code): it sees one
tool's definition and one request and writes the response alone; all calls of a round are asked together. Functions are
read from a Python file, their schemas from signatures and docstrings, so that a tool of one's own needs no more.
Left out: memory between the calls of a rollout (every call is answered alone, as in the paper).
"""
from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from slca.llm import Writer
from slca.settings import SimulatorConfig
from slca.simulator import Simulator, error_text

RESPONSE, CALL = "tool_response", "tool_call"
SERVER = f"""You are the server behind a set of tools. You are given the definition of one tool and one request to it.
Answer as the real tool would: realistic and specific, of the type the definition promises, and consistent with the \
arguments. If the arguments make no sense for the tool, answer with the error it would give.
Write the response alone, between <{RESPONSE}> and </{RESPONSE}>, without any explanation.

Examples:
calculator {{"expression": "12 * 3"}} -> <{RESPONSE}>{{"result": 36}}</{RESPONSE}>
get_weather {{"city": "Oslo"}} -> <{RESPONSE}>{{"city": "Oslo", "temperature_c": 4, "sky": "cloudy"}}</{RESPONSE}>
web_search {{"query": "tallest mountain"}} -> <{RESPONSE}>{{"results": [{{"title": "Mount Everest", \
"snippet": "The highest mountain above sea level, 8,849 m."}}]}}</{RESPONSE}>"""


def make_simulator(c: SimulatorConfig) -> Simulator:
    """The simulator of a configuration. ValueError or OSError where its model, address or file cannot be used."""
    responder: object = "rules"
    if c.responder in ("model", "http"):
        responder = LLMResponder(Writer(c.responder, c.llm, c.seed, (f"</{RESPONSE}>",)))
    elif c.responder == "python":
        responder = python_tools(c.python)
    return Simulator(responder, c.seed, c.use_schema, c.timeout_s)


# --- a frozen language model -----------------------------------------------------------------------------------------

class LLMResponder:
    """Observations by a frozen model; `writer` counts what it was asked."""

    def __init__(self, writer: Writer):
        self.writer = writer

    def answer_all(self, requests: Sequence[tuple[dict, dict | None]]) -> list[str | None]:
        """An observation for each (call {"name", "arguments"}, its function schema or None); None: no answer."""
        texts = self.writer.texts([server_chat(call, function) for call, function in requests])
        return [None if text is None else unwrap(text) for text in texts]


def server_chat(call: dict, function: dict | None) -> list[dict]:
    """What the frozen model is shown; without a function (the condition without SGLS) no definition."""
    request = {"name": call["name"], "parameters": call["arguments"], "dependency": []}
    parts = [] if function is None else [f"Tool definition:\n{json.dumps(function, indent=2, ensure_ascii=False)}"]
    parts.append(f"Request:\n<{CALL}>\n{json.dumps(request, ensure_ascii=False)}\n</{CALL}>")
    return [{"role": "system", "content": SERVER}, {"role": "user", "content": "\n\n".join(parts)}]


def unwrap(text: str) -> str:
    """The response without its tags, however often they are nested.

    Of several, the last complete response; else the last complete call; else what follows the last opener.
    """
    while (inner := _inside(text, RESPONSE)) is not None or (inner := _inside(text, CALL)) is not None:
        text = inner
    openers = [text.rfind(tag) + len(tag) for tag in (f"<{RESPONSE}>", f"<{CALL}>") if tag in text]
    return text[max(openers, default=0):].strip()


def _inside(text: str, tag: str) -> str | None:
    """Between the last closed opener and its end."""
    opener, closer = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opener, 0, max(0, text.rfind(closer)))
    return None if start < 0 else text[start + len(opener):text.index(closer, start)]


# --- your own functions ----------------------------------------------------------------------------------------------

class PythonTools:
    """The public functions that a file defines, as tools: `schemas` (OpenAI form) and a responder that calls them.

    What a function raises is the tool's answer, an error observation with its message. A result that is no text
    becomes JSON. ValueError names the file, function and parameter that cannot be a tool's; OSError: no such file.
    """

    def __init__(self, path: str | Path):
        self.functions = _functions(Path(path))
        self.schemas = [function_schema(f, name, f"{path}: {name}") for name, f in self.functions.items()]

    def __call__(self, call: dict, tools: Sequence[dict]) -> str:
        function = self.functions.get(call["name"])
        if function is None:  # the task offers it, the file does not define it
            return error_text(f"tool {call['name'][:80]!r} has no function")
        try:
            result = function(**call["arguments"])
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, allow_nan=False,
                                                                     default=str)
        except Exception as error:
            return error_text(f"{type(error).__name__}: {error}"[:500])


@functools.cache
def python_tools(path: str) -> PythonTools:
    """The tools of a file, which runs once: its functions may keep a state."""
    return PythonTools(path)


def _functions(path: Path) -> dict[str, Callable]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of tool functions")
    name = f"slca_tools_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: expected a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are resolved through it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    found = {n: f for n, f in vars(module).items() if callable(f) and not inspect.isclass(f) and not n.startswith("_")
             and getattr(f, "__module__", None) == name}
    if not found:
        raise ValueError(f"{path}: defines no public function")
    return found


def function_schema(function: Callable, name: str, where: str) -> dict:
    """OpenAI tool schema: types from annotations, texts from the docstring (first paragraph; Args or :param lines)."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ValueError(f"{where}: expected a plain function, which returns its result")
    text = inspect.getdoc(function) or ""
    notes = _parameter_notes(text, inspect.signature(function).parameters)
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise ValueError(f"{where}: annotations cannot be read ({type(error).__name__}: {error})") from error
    properties, required = {}, []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{where}, parameter {key}: expected one that is given by its name")
        schema = _type_schema(hints[key], f"{where}, parameter {key}") if key in hints else {}
        if key in notes:
            schema["description"] = notes[key]
        if parameter.default is parameter.empty:
            required.append(key)
        elif parameter.default is not None:
            schema["default"] = parameter.default
        properties[key] = schema
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    description = re.split(r"\n\s*\n|\n(?=\s*(?:Args:|:param))", text, maxsplit=1)[0].replace("\n", " ").strip()
    found = {"name": name, "description": description, "parameters": parameters}
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: a default is no JSON ({error})") from error
    return {"type": "function", "function": found}


def _type_schema(hint: object, where: str) -> dict:
    """JSON Schema of an annotation: str, int, float, bool, None, list[X], dict, Literal, unions of these, Any."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    plain = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object",
             list: "array"}
    if hint is typing.Any:
        return {}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(a, where) for a in args]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin is list and args:
        return {"type": "array", "items": _type_schema(args[0], where)}
    bare = origin or hint
    kind = plain.get(bare) if isinstance(bare, type) else None
    if kind is None:
        raise ValueError(f"{where}: expected str, int, float, bool, None, list, dict, Literal or a union of them, "
                         f"found {hint}")
    return {"type": kind}


def _parameter_notes(text: str, names: Container[str]) -> dict[str, str]:
    """Sentences of the parameters in a docstring: lines `name (type): text` under Args:, or `:param name: text`."""
    notes, current, inside = {}, None, False
    for line in text.split("\n"):
        head = re.match(r":param (?:\w+ )?(\w+):\s*(.*)", line.strip())
        if head is None and inside:
            head = re.match(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line.strip())
        if line.strip().rstrip(":") in ("Args", "Arguments", "Parameters"):
            inside, current = True, None
        elif not line.strip() or (inside and not line.startswith(" ")):
            inside, current = inside and not line.strip(), None
        elif head and head[1] in names:
            current = head[1]
            notes[current] = head[2].strip()
        elif current and line.startswith(" "):
            notes[current] = f"{notes[current]} {line.strip()}"
    return notes
