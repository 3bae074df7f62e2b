"""SGLS: every kind of bad call gets an error observation that says what is wrong, nothing raises whatever the call or
the schema, and a valid call's answer is exact, within its schema or holds its facts, and depends on the call and the
seed alone (not on the order of arguments, of calls, or on the process). Real tool schemas from Toucan's MCP servers.
"""
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slca.data.families import FAMILIES, UNITS, draw
from slca.simulator import MAX_DEPTH, Simulator, check_call, error_text, instance, is_error, phi_check, violation

ROOT = Path(__file__).parent.parent
REAL = [json.loads(line) for line in (Path(__file__).parent / "data" / "toucan_tools.jsonl").read_text().splitlines()]


def tool(parameters, name="t", **more) -> list[dict]:
    return [{"type": "function", "function": {"name": name, "parameters": parameters, **more}}]


def obj(properties, *required, **more) -> dict:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def call(arguments, name="t") -> dict:
    return {"name": name, "arguments": arguments}


def nested(value, levels: int):
    for _ in range(levels):
        value = {"a": value}
    return value


def world(key: str, synonym: int = 0) -> tuple[str, list[str], list[dict]]:
    """A family's tool under one choice of names -> (name, argument names, tools)."""
    family = FAMILIES[key]
    arguments = [s[synonym % len(s)] for s, _ in family.args]
    return family.names[synonym], arguments, [family.schema(family.names[synonym], tuple(arguments))]


def example(key: str, synonym: int = 0, seed: int = 0) -> tuple[dict, list[dict]]:
    """A valid call of a family with drawn values -> (call, tools)."""
    name, arguments, tools = world(key, synonym)
    rng = random.Random(seed)
    return call({a: draw(rng, kind) for a, (_, kind) in zip(arguments, FAMILIES[key].args, strict=True)}, name), tools


def facts_of(text: str, family) -> list[str]:
    """The results that an observation carries: JSON values, or what fills the sentence of an open tool."""
    if family.mode != "open":
        return [str(v) for v in json.loads(text).values()]
    pattern = re.escape(family.text)
    for key, _ in family.results:
        pattern = pattern.replace(re.escape(f"{{{key}}}"), f"(?P<{key}>.+)", 1)
    pattern = re.sub(r"\\\{\w+\\\}", ".+", pattern)
    return list(re.fullmatch(pattern, text).groupdict().values())


CLOSED = obj({"x": {"type": "string"}}, "x", additionalProperties=False)
TWO = obj({"x": {"type": "string"}, "y": {"type": "integer"}}, "x", "y")
DEEP = obj({"p": obj({"q": {"type": "array", "items": obj({"n": {"type": "integer"}}, "n")}}, "q")}, "p")
UNION = obj({"x": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}})
ONE = obj({"x": {"oneOf": [{"type": "integer"}, {"type": "null"}]}})
HUGE = 10 ** 5000


def typed(kind) -> dict:
    return obj({"x": {"type": kind}})


BAD = [  # (schema of tool t, call, what the observation has to say)
    # the call itself
    ({}, None, "must be a JSON object"), ({}, [call({})], "must be a JSON object"), ({}, 7, "must be a JSON object"),
    ({}, "t", "must be a JSON object"), ({}, {}, "needs a name"), ({}, {"name": None}, "needs a name"),
    ({}, {"name": ""}, "needs a name"), ({}, {"name": ["t"]}, "needs a name"), ({}, {"name": HUGE}, "needs a name"),
    ({}, call({}, "T"), "tool 'T' not found; the tools are: t"), ({}, call({}, "{0.x} %s {"), "tool '{0.x} %s {' not"),
    ({}, call({}, "\ud800"), "not found"), ({}, call({}, "u" * 99999), "not found; the tools are: t"),
    # the arguments as a whole
    (TWO, call("{x: 1"), "arguments of t are not valid JSON"), (TWO, call("[" * 100000), "are not valid JSON"),
    (TWO, call('{"x": "a", "y": ' + "9" * 5000 + "}"), "are not valid JSON"), (TWO, call({1: 2}), "not valid JSON"),
    (TWO, call([1]), "arguments of t must be a JSON object"), (TWO, call("[1, 2]"), "must be a JSON object"),
    (TWO, call('"x"'), "must be a JSON object"), (TWO, call(3), "must be a JSON object"),
    (TWO, {"name": "t"}, "missing required arguments: x, y"), (TWO, call(None), "arguments: x, y"),
    (TWO, call(""), "arguments: x, y"), (TWO, call([]), "arguments: x, y"), (TWO, call("{}"), "arguments: x, y"),
    (TWO, call({"x": "a"}), "t: missing required argument: y"), (TWO, call('{"y": 1}'), "required argument: x"),
    (TWO, {"name": "t", "parameters": {"y": 1}}, "missing required argument: x"),
    ({}, call({"x": nested(1, 100)}), "nested too deep"), ({}, call({"x": nested(1, 100000)}), "nested too deep"),
    ({}, call({"x": HUGE}), "number out of range"), ({}, call('{"x": NaN}'), "number out of range"),
    ({}, call({"x": [-1e400]}), "number out of range"),
    # types
    (typed("string"), call({"x": 1}), "argument 'x' must be of type string, not integer"),
    (typed("string"), call({"x": None}), "type string, not null"),
    (typed("integer"), call({"x": True}), "type integer, not boolean"),
    (typed("integer"), call({"x": 1.5}), "type integer, not number"),
    (typed("integer"), call({"x": "1"}), "type integer, not string"),
    (typed("number"), call({"x": False}), "type number, not boolean"),
    (typed("number"), call({"x": "1.5"}), "type number, not string"),
    (typed("boolean"), call({"x": 0}), "type boolean, not integer"),
    (typed("array"), call({"x": {}}), "type array, not object"), (typed("array"), call({"x": "a"}), "not string"),
    (typed("object"), call({"x": []}), "type object, not array"), (typed("null"), call({"x": 0}), "type null, not int"),
    (typed(["string", "null"]), call({"x": 1}), "type string or null, not integer"),
    # enums and constants
    (obj({"x": {"enum": ["a", "b"]}}), call({"x": "c"}), "argument 'x' must be one of [\"a\", \"b\"]"),
    (obj({"x": {"enum": ["a"]}}), call({"x": "A"}), 'must be one of ["a"]'),
    (obj({"x": {"enum": [1, 0]}}), call({"x": True}), "must be one of [1, 0]"),
    (obj({"x": {"enum": [True]}}), call({"x": 1}), "must be one of [true]"),
    (obj({"x": {"enum": ["é"]}}), call({"x": {}}), 'one of ["é"]'),
    (obj({"x": {"const": "a"}}), call({"x": "b"}), 'one of ["a"]'),
    # inside objects and arrays
    (DEEP, call({"p": {}}), "missing required argument: p.q"), (DEEP, call({"p": {"q": 1}}), "'p.q' must be of type"),
    (DEEP, call({"p": {"q": [{"n": 1}, {"n": "2"}]}}), "argument 'p.q[1].n' must be of type integer, not string"),
    (DEEP, call({"p": {"q": [{"n": 1}, {}]}}), "missing required argument: p.q[1].n"),
    (UNION, call({"x": "a"}), "argument 'x' must be of type integer, not string"), (ONE, call({"x": "a"}), "'x' must"),
    (UNION, call({"x": ["a"]}), "argument 'x' must be of type integer, not array"),
    (CLOSED, call({"x": "a", "{y}": 1}), "unknown argument '{y}'"),
    (obj({"p": CLOSED}), call({"p": {"x": "a", "z": 1}}), "unknown argument 'p.z'"),
    # odd schemas still check what they say
    (obj({"x": {"type": ["string", 5, {"a": 1}]}}), call({"x": 1}), "type string, not integer"),
    (obj({"x": {"type": "string", "anyOf": "no", "enum": "no", "properties": 3}}), call({"x": 1}), "type string"),
    ({"required": ["x", 5, ["y"]]}, call({}), "missing required argument: x"),
]


@pytest.mark.parametrize("schema, bad, phrase", BAD, ids=range(len(BAD)))
def test_bad_call(schema, bad, phrase):
    seen = Simulator().respond(bad, tool(schema))
    assert is_error(seen) and phrase in json.loads(seen)["error"]
    assert phi_check(bad, tool(schema), seen) and not phi_check(bad, tool(schema), '{"sum": 3}')


@pytest.mark.parametrize("schema", [
    None, [], "x", 5, {}, {"properties": None}, {"properties": ["x"]}, {"required": "x"}, {"required": 5},
    {"required": [["x"]]}, obj({"x": None}), obj({"x": "string"}), typed("any"), typed(None), typed(5), typed({"a": 1}),
    typed([]), obj({"x": {"anyOf": []}}), obj({"x": {"anyOf": [None, {"type": "integer"}]}}),
    obj({"x": {"items": 3, "enum": None}}), {"additionalProperties": True, "type": "object"}])
def test_odd_schema_forbids_nothing(schema):
    tools = [{"function": None}, {"name": 5}, {}, None, "t", *tool(schema)]
    assert not is_error(Simulator().respond(call({"x": 1}), tools))


@pytest.mark.parametrize("tools", [None, [], [None, "t", 5], [{"function": "t"}], [{"function": {}}]])
def test_odd_tools(tools):
    assert "tool 't' not found" in Simulator().respond(call({}), tools)


def test_deep_schemas_end():
    """Schemas that hold themselves, in the arguments and in the result: bounded in depth and size."""
    same, array = {"type": "object"}, {"type": "array"}
    same["properties"], array["items"], array["anyOf"] = {"a": same}, array, [array]
    value = nested({}, MAX_DEPTH - 1)
    assert not is_error(Simulator().respond(call(value), tool(same)))
    assert "too deep" in violation(nested({}, MAX_DEPTH + 1), same, "")
    arrays = {"type": "integer"}
    for _ in range(MAX_DEPTH):
        arrays = {"type": "array", "items": arrays}
    for output in (same, array, arrays):
        seen = Simulator().respond(call({}), tool({}, output_schema=output))
        assert isinstance(json.loads(seen), dict | list) and len(seen) < 100000  # 3 ** 32 items otherwise


JUNK = [None, True, 0, -1, 1.5, 2.0, 1e300, float("nan"), HUGE, "", "x", "string", "object", "array", "integer",
        "number", "a.b", "{0}", "%s", "\ud800", "\0", "<tool_call>", [], {}, "[1]", '{"x": 1}']
WORDS = ["type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "additionalProperties", "name",
         "minimum", "maximum", "arguments", "parameters", "function", "x", "y", "output_schema", "outputSchema"]


def junk(rng: random.Random, depth: int = 0, leaves=JUNK):
    """Random JSON, biased towards the words of schemas and calls."""
    kind = rng.random() + 0.12 * depth
    if kind > 0.75:
        return rng.choice(leaves)
    if kind > 0.6:
        return [junk(rng, depth + 1, leaves) for _ in range(rng.randint(0, 3))]
    return {rng.choice(WORDS): junk(rng, depth + 1, leaves) for _ in range(rng.randint(0, 5))}


def test_fuzz_never_raises():
    rng, errors, answers = random.Random(0), 0, 0
    odd = [j for j in JUNK if j is not HUGE]  # what a schema read from a file can hold
    names = ["t", *(name for f in FAMILIES.values() for name in f.names)]
    for i in range(4000):
        name = rng.choice(names)
        schema = junk(rng, 0, odd) if i % 3 else obj({k: junk(rng, 2, odd) for k in "xy"}, "x")
        tools = tool(schema, name, output_schema=junk(rng, 0, odd)) if i % 4 else [junk(rng, 0, odd)] * 2
        made = call(junk(rng, 1), name) if i % 2 else junk(rng)
        for use_schema in (True, False):
            seen = Simulator(use_schema=use_schema).respond(made, tools)
            assert isinstance(seen, str) and seen
            errors, answers = errors + is_error(seen), answers + (use_schema and not is_error(seen))
        phi_check(made, tools, seen)
    assert errors > 800 and answers > 400  # both paths were walked


@pytest.mark.parametrize("key", FAMILIES)
def test_family_fuzz_never_raises(key):
    """Calls near a valid one: each argument replaced by junk, the other synonyms added, arguments left out."""
    rng, own = random.Random(key), Simulator()
    for synonym in range(3):
        good, tools = example(key, synonym)
        for _ in range(60):
            made = dict(good["arguments"])
            for synonyms, _kind in FAMILIES[key].args:
                made[rng.choice(synonyms)] = rng.choice(JUNK)
            assert own.respond(call(made, good["name"]), tools)
            made |= good["arguments"]  # junk only in names that the schema does not know: ignored or refused
            seen = own.respond(call(made, good["name"]), tools)
            assert seen == own.respond(good, tools) or is_error(seen)


# ---- valid calls

@pytest.mark.parametrize("first, second, total", [(7, 35, 42), (99, 1, 100), (-5, 5, 0), (2.0, 3, 5)])
def test_total_by_hand(first, second, total):
    name, (a, b), tools = world("total")
    assert Simulator(seed=9).respond(call({b: second, a: first}, name), tools) == f'{{"sum": {total}}}'


def test_convert_by_hand():
    by_hand = {"km": (3000, "m"), "hours": (180, "minutes"), "kg": (3000, "grams"), "days": (72, "hours"),
               "feet": (36, "inches"), "weeks": (21, "days")}
    name, (amount, unit), tools = world("convert")
    known = [u for u in UNITS if u in by_hand]
    assert len(known) >= 3
    for u in known:
        seen = json.loads(Simulator().respond(call({amount: 3, unit: u}, name), tools))
        assert (seen["result"], seen["unit"]) == by_hand[u]
    assert "must be one of" in Simulator().respond(call({amount: 3, unit: "parsec"}, name), tools)


def many(key: str, count: int = 40) -> list[dict]:
    """Different valid calls of a family under one choice of names."""
    calls = {json.dumps(example(key, 1, seed)[0], sort_keys=True): None for seed in range(4 * count)}
    return [json.loads(c) for c in list(calls)[:count]]


@pytest.mark.parametrize("key", [f.key for f in FAMILIES.values() if f.mode == "query"])
def test_query(key):
    tools, calls, family = example(key, 1)[1], many(key), FAMILIES[key]
    seen = [Simulator(seed=3).respond(c, tools) for c in calls]
    for text in seen:
        values = json.loads(text)
        assert list(values) == [k for k, _ in family.results]
        assert not violation(values, family.output_schema(), "")
    kinds = len(set(seen))
    assert kinds > len(calls) / 4  # other arguments, other answers (but an answer can come up twice)
    other = [Simulator(seed=4).respond(c, tools) for c in calls]
    assert sum(a != b for a, b in zip(seen, other, strict=True)) > len(calls) / 2


@pytest.mark.parametrize("key", FAMILIES)
def test_same_call_same_answer(key):
    """In any order of arguments, of calls, by any instance; as object or JSON text; under `parameters`."""
    tools, calls, shared = example(key, 1)[1], many(key, 12), Simulator(seed=1)
    want = [Simulator(seed=1).respond(c, tools) for c in calls]
    assert [shared.respond(c, tools) for c in reversed(calls)][::-1] == want
    for c, text in zip(calls, want, strict=True):
        turned = dict(reversed(c["arguments"].items()))
        assert shared.respond(call(turned, c["name"]), tools) == text
        assert shared.respond(call(json.dumps(turned), c["name"]), tools) == text
        assert shared.respond({"parameters": turned, "name": c["name"]}, tools + example("timer")[1]) == text
        floats = {k: float(v) if isinstance(v, int) else v for k, v in turned.items()}
        assert shared.respond(call(floats, c["name"]), tools) == text  # JSON has one kind of number


GENERIC = ((None, DEEP), ({}, None), (UNION, UNION))


def test_same_answer_in_another_process():
    code = ("import sys; sys.path.insert(0, 'tests')\nfrom test_simulator import *\n"
            "print(json.dumps([Simulator(seed=5).respond(*example(k, 2)) for k in FAMILIES]"
            " + [Simulator(seed=5).respond(call({'b': [1, None], 'a': 'é'}), tool(s, outputSchema=o)) "
            "for s, o in GENERIC]))")
    hash_seed = "77" if os.environ.get("PYTHONHASHSEED") != "77" else "78"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                         env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."})
    generic = [Simulator(seed=5).respond(call({"a": "é", "b": [1, None]}), tool(s, outputSchema=o)) for s, o in GENERIC]
    assert json.loads(run.stdout) == [Simulator(seed=5).respond(*example(k, 2)) for k in FAMILIES] + generic


OPEN = [f.key for f in FAMILIES.values() if f.mode == "open"]


@pytest.mark.parametrize("key", OPEN)
def test_open_text_holds_its_facts(key):
    tools, family = example(key, 1)[1], FAMILIES[key]
    for c in many(key, 10):
        text = Simulator(seed=2).respond(c, tools)
        facts = facts_of(text, family)
        assert len(facts) == len(family.results) and not is_error(text)
        kinds = zip(facts, (kind for _, kind in family.results), strict=True)
        assert all(f.isdigit() == (kind == "number") for f, kind in kinds)
        assert all(str(v) in text for v in c["arguments"].values())
        assert phi_check(c, tools, text, 2)
        assert phi_check(c, tools, "So: " + " and ".join(reversed(facts)) + ", they say.", 2)  # other phrasing
        for i, fact in enumerate(facts):
            for changed in (fact + "7", "x" + fact, ""):  # a longer word or number is another one
                assert not phi_check(c, tools, " and ".join([*facts[:i], changed, *facts[i + 1:]]), 2)
    braces = call({next(iter(c["arguments"])): "{0.__class__} {founder} {"}, c["name"])
    assert "{0.__class__} {founder} {" in Simulator().respond(braces, tools)


def test_phi_check_deterministic():
    for key in (f.key for f in FAMILIES.values() if f.mode == "deterministic"):
        made, tools = example(key)
        own = json.loads(Simulator().respond(made, tools))
        assert phi_check(made, tools, json.dumps(own)) and phi_check(made, tools, json.dumps(own, indent=3))
        for name, value in own.items():
            wrong = value + 1 if isinstance(value, int) else value + "s"
            assert not phi_check(made, tools, json.dumps(own | {name: wrong}))
            assert not phi_check(made, tools, json.dumps({k: v for k, v in own.items() if k != name}))
        assert not any(phi_check(made, tools, bad) for bad in ("", "sum 3", "{", "[" * 99999, "null"))


def test_phi_check_query():
    for key in (f.key for f in FAMILIES.values() if f.mode == "query"):
        made, tools = example(key)
        own = json.loads(Simulator().respond(made, tools))
        assert phi_check(made, tools, json.dumps(own))
        for name, kind in FAMILIES[key].results:
            value = own[name]
            if isinstance(kind, tuple):
                assert not phi_check(made, tools, json.dumps(own | {name: "none of them"}))
                plausible = next(k for k in kind if k != value)
            else:
                plausible = value + 1 if isinstance(value, int) else "Zzz"
            assert phi_check(made, tools, json.dumps(own | {name: plausible}))
            for wrong in (None, [value], str(value) if isinstance(value, int) else 3):
                assert not phi_check(made, tools, json.dumps(own | {name: wrong}))
            assert not phi_check(made, tools, json.dumps({k: v for k, v in own.items() if k != name}))
        assert not phi_check(made, tools, error_text("no")) and not phi_check(made, tools, "sunny")


OUTPUT = {"type": "object", "properties": {
    "id": {"type": "integer", "minimum": 5, "maximum": 7}, "share": {"type": "number", "maximum": 1},
    "state": {"enum": ["on", "off"]}, "kind": {"const": "row"}, "ok": {"type": "boolean"}, "none": {"type": "null"},
    "rows": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": ["integer", "null"]}},
                                        "required": ["n", "extra"]}},
    "either": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "text": {}}, "required": ["id", "state", "rows", "either"]}


@pytest.mark.parametrize("field", ["output_schema", "outputSchema"])
def test_generic_tool_with_output_schema(field):
    tools, states, ids = tool(TWO, **{field: OUTPUT}), set(), set()
    for i in range(30):
        made = call({"x": "a", "y": i})
        text = Simulator().respond(made, tools)
        values = json.loads(text)
        assert not violation(values, OUTPUT, "") and phi_check(made, tools, text) and values.keys() == OUTPUT[
            "properties"].keys()
        assert 5 <= values["id"] <= 7 and values["share"] <= 1 and 1 <= len(values["rows"]) <= 3
        assert values["kind"] == "row" and isinstance(values["either"], str) and isinstance(values["text"], str)
        assert all(isinstance(r["n"], int) and "extra" in r for r in values["rows"])
        states.add(values["state"])
        ids.add(values["id"])
        assert text == Simulator().respond(call({"y": i, "x": "a"}), tools)
        for wrong in ({"id": "5"}, {"state": "of"}, {"rows": [{}]}, {"either": 3}, {"kind": "column"}):
            assert not phi_check(made, tools, json.dumps(values | wrong))
        assert not phi_check(made, tools, json.dumps({k: v for k, v in values.items() if k != "rows"}))
    assert states == {"on", "off"} and ids == {5, 6, 7}


def test_tool_without_output_schema():
    tools = tool(TWO)
    texts = [Simulator().respond(call({"x": "a", "y": i}), tools) for i in range(30)]
    assert len(set(texts)) > 20 and len({Simulator(seed=s).respond(call({"x": "a", "y": 1}), tools)
                                         for s in range(30)}) > 20
    for i, text in enumerate(texts):
        made = call({"y": i, "x": "a"})
        assert phi_check(made, tools, text) and Simulator().respond(made, tools) == text
        name, number = text.split()[2], text.rstrip(".").split()[-1]  # the two facts
        assert phi_check(made, tools, f"value {number}, that is {name}")
        assert not phi_check(made, tools, text.replace(number, number + "0"))
        assert not phi_check(made, tools, text.replace(name, "Nobody"))


def test_namesake_of_a_world_tool_is_answered_by_its_own_schema():
    """A real tool may have a world tool's name; only the world's own schema gets the world's answer."""
    made, own = example("weather")
    assert json.loads(Simulator().respond(made, own)).keys() == {k for k, _ in FAMILIES["weather"].results}
    namesakes = [r for r in REAL if r["name"] in ("get_weather", "add_numbers")]
    assert len(namesakes) == 2
    for row in namesakes:
        arguments = instance(row["parameters"], random.Random(1))
        seen = Simulator().respond(call(arguments, made["name"]), [{"function": row | {"name": made["name"]}}])
        assert seen.startswith(f"{made['name']} found ")
    name, (a, b), _ = world("total")  # unchecked arguments never reach the world's arithmetic
    assert Simulator().respond(call({a: "1", b: None}, name), tool({}, name)).startswith(f"{name} found ")


def test_without_schema():
    """The ablation: no checks, no schema in the answer, still repeatable and different for other calls and seeds."""
    own = Simulator(use_schema=False)
    for _schema, bad, _phrase in BAD:
        assert not is_error(own.respond(bad, [])) and own.respond(bad, []) == own.respond(bad, tool(TWO))
    for key in FAMILIES:
        made, tools = example(key)
        text = own.respond(made, tools)
        assert not is_error(text) and not text.startswith("{") and text == Simulator(use_schema=False).respond(made, [])
    texts = {own.respond(call({"y": i}), []) for i in range(30)} | {
        Simulator(seed=s, use_schema=False).respond(call({"y": 1}), []) for s in range(30)}
    assert len(texts) > 40
    assert own.respond(call({"a": 1, "b": 2}), []) == own.respond(call({"b": 2, "a": 1}), [])


@pytest.mark.parametrize("responder", ["oracle", None, 3, ["rules"]])
def test_refuses_unknown_responder(responder):
    with pytest.raises(ValueError, match=re.escape(repr(responder))):
        Simulator(responder)


def test_callable_responder():
    """It gets the call as checked, and only calls that pass the check; what it says is the observation."""
    asked, tools = [], tool(TWO)
    own = Simulator(lambda made, offered: asked.append((made, offered)) or f"got {made['arguments']['y']}")
    assert own.respond(call('{"x": "a", "y": 2.0}'), tools) == "got 2" and asked == [(call({"x": "a", "y": 2}), tools)]
    for schema, bad, phrase in BAD:
        assert phrase in json.loads(own.respond(bad, tool(schema)))["error"]
    assert len(asked) == 1
    loose = Simulator(lambda made, _: json.dumps(made), use_schema=False)
    assert json.loads(loose.respond({"name": 3, "arguments": "x"}, [])) == {"name": "tool", "arguments": {}}


@pytest.mark.parametrize("row", REAL, ids=lambda r: r["name"])
def test_real_schemas(row):
    """An instance of each schema passes its own check; without a required argument, or with a wrong one, it fails."""
    tools, schema = [{"type": "function", "function": row}], row["parameters"]
    for seed in range(5):
        arguments = instance(schema, random.Random(seed))
        assert check_call(call(arguments, row["name"]), tools) == (call(arguments, row["name"]), "")
        for name in schema.get("required", []):
            less = {k: v for k, v in arguments.items() if k != name}
            assert f"missing required argument: {name}" in check_call(call(less, row["name"]), tools)[1]
        for name, part in schema.get("properties", {}).items():
            if isinstance(part.get("type"), str):  # a tuple of no JSON type but array, a number of none but number
                wrong = [] if part["type"] != "array" else 1.5
                assert f"'{name}' must be of type {part['type']}" in check_call(
                    call(arguments | {name: wrong}, row["name"]), tools)[1]
        if schema.get("additionalProperties") is False:
            assert "unknown argument 'zzz'" in check_call(call(arguments | {"zzz": 1}, row["name"]), tools)[1]


def test_real_schemas_are_varied():
    text = json.dumps([r["parameters"] for r in REAL])
    assert len(REAL) >= 30
    assert all(f'"{k}"' in text for k in ("anyOf", "enum", "const", "array", "$ref", "additionalProperties"))
