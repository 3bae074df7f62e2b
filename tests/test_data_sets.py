"""Seal-Tools, API-Bank, Glaive and raw Toucan rows: real samples become the right tasks, by hand; a row that cannot be
used is refused with its file, row and field. `data/SOURCES.md` says where the samples are from."""
from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from test_data import edit

from slca import chat
from slca.data import DataError, iter_tasks, load_tasks, sets
from slca.data.toucan import detect
from slca.judge import Reply, rating_step
from slca.simulator import Simulator, check_call, find_tool, names

DATA = Path(__file__).parent / "data"
SEAL = [json.loads(line) for line in (DATA / "seal_tools/rows.jsonl").read_text().splitlines()]
BANK = [json.loads(line) for line in (DATA / "api_bank/dialogues.jsonl").read_text().splitlines()]
GLAIVE = json.loads((DATA / "glaive/rows.json").read_text())
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def called(arguments, name="add", **more):
    return {"role": "assistant", "content": "", "function_call": {"name": name, "arguments": arguments}} | more


def result(content):
    return {"role": "function", "name": "add", "content": content}


def raw(messages, **more):
    """A raw Toucan row: nine columns of text."""
    row = {"uuid": "u", "subset_name": "single-turn-original", "question": "q", "target_tools": "add",
           "question_quality_assessment": "", "response_quality_assessment": "", "metadata": "{}",
           "available_tools": json.dumps([TOOL]), "messages": messages} | more
    return row | {"messages": json.dumps(row["messages"])} if isinstance(row["messages"], list) else row


USER, REPLY = {"role": "user", "content": "1 + 2, and 3 + 4?"}, {"role": "assistant", "content": "3 and 7."}
RAW = [USER, called('{"a": 1, "b": 2}'), called('{"a": 3, "b": 4}'), result("3"), result("7"),
       called('{"a": 3, "b": 7}', content="Now both.", reasoning_content="sum them"), result("10"), REPLY]


def write(tmp_path, *rows, catalogue=None, name="rows.jsonl"):
    if catalogue:
        (tmp_path / catalogue.name).write_text(catalogue.read_text())
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


# --- Seal-Tools ------------------------------------------------------------------------------------------------------

def seal():
    return {number: found for number, found in iter_tasks(DATA / "seal_tools/rows.jsonl")}


def test_seal_tools_single_call_by_hand():
    task = seal()[2]
    call = {"name": "calculateNetIncome", "arguments": {"revenue": 0.2907590418481535, "expenses": 40.7}}
    assert SEAL[1]["calling"][0]["parameters"]["expenses"] == "40.7"  # a text in the row, a number by the schema
    assert task.gold_calls == [[call]] and task.id == "test_in_domain-easy-1" and task.subset == "single"
    observation = Simulator(seed=0).respond(call, task.tools)
    income = str(json.loads(observation)["net_income"])
    assert task.facts == [income] and income in task.answer and "net income" in task.answer
    assert task.demonstration == [{"role": "assistant", "content": "", "tool_calls": [call]},
                                  {"role": "tool", "content": observation},
                                  {"role": "assistant", "content": task.answer}]
    schema = find_tool("calculateNetIncome", task.tools)
    assert {k: v["type"] for k, v in schema["parameters"]["properties"].items()} == {
        "revenue": "number", "expenses": "number", "tax_rate": "number"}
    assert schema["parameters"]["required"] == ["revenue", "expenses"]
    assert schema["output_schema"]["required"] == ["net_income"]
    assert schema["output_schema"]["properties"]["net_income"]["type"] == "number"


def test_seal_tools_chain_goes_to_a_later_step():
    task, row = seal()[11], SEAL[10]
    assert [c["api"] for c in row["calling"]] == ["getScenicPainting", "getArtworkDetails", "getFurnitureDetails"]
    assert row["calling"][1]["parameters"] == {"artwork_id": "API_call_0"}  # the first result of the first call
    assert [[c["name"] for c in step] for step in task.gold_calls] == [
        ["getScenicPainting", "getFurnitureDetails"], ["getArtworkDetails"]]
    first = json.loads(task.demonstration[1]["content"])
    assert task.gold_calls[1][0]["arguments"] == {"artwork_id": first["painting_description"]}
    assert task.subset == "dependent"
    assert [m["role"] for m in task.demonstration] == ["assistant", "tool", "tool", "assistant", "tool", "assistant"]


def test_seal_tools_results_are_coerced_to_the_parameter(tmp_path):
    task = seal()[13]
    score = json.loads(task.demonstration[1]["content"])["test_score"]
    assert isinstance(score, int) and task.gold_calls[1][0]["arguments"] == {"patient_id": str(score)}


def test_seal_tools_every_task_is_answerable_by_the_rules():
    found = seal()
    good = [task for task in found.values() if not isinstance(task, DataError)]
    assert len(good) == 15 and {t.subset for t in good} == {"single", "parallel", "dependent"}
    simulator = Simulator(seed=sets.SEED)
    for task in good:
        calls = [call for step in task.gold_calls for call in step]
        assert all(check_call(call, task.tools) == (call, "") for call in calls)
        results = [simulator.respond(call, task.tools) for call in calls]
        assert [m["content"] for m in task.demonstration if m["role"] == "tool"] == results
        leaves = [value for text in results for _, value in sets.leaves(json.loads(text))]
        assert set(task.facts) == set(leaves) and all(names(task.answer, fact) for fact in task.facts)
        assert rating_step(Reply(task.question, results, task.answer, task.facts)) == 4  # the judge finds no flaw
        assert len(task.tools) == 5 and len(set(task.allowed_tools)) == 5
        assert {c["name"] for c in calls} <= set(task.allowed_tools)
    assert len({t.answer.split()[0] for t in good}) > 2  # the wording varies
    assert len({t.allowed_tools.index(t.gold_calls[0][0]["name"]) for t in good}) > 2  # so does the order


def test_seal_tools_a_declared_type_gives_way_to_the_gold_value():
    found = {n: {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in task.tools}
             for n, task in seal().items()}
    assert "type" not in found[9]["getConservationProjectDetails"]["project_id"]  # integer, but a name is chained
    assert all("type" not in found[10][name]["project_id"] for name in ("addTask", "removeProjectMember"))
    assert [k for k, v in found[14]["calculateCollision"].items() if "type" not in v] == ["position1", "position2"]
    assert "description" in found[14]["calculateCollision"]["position1"]
    untyped = [k for n, tools in found.items() for name in tools for k, v in tools[name].items() if "type" not in v]
    assert untyped == ["project_id"] * 3 + ["position1", "position2"]  # and nowhere else


def test_seal_tools_results_in_other_words_and_from_later_calls(tmp_path):
    task = seal()[15]  # "API_call_0 response"
    result = json.loads(task.demonstration[1]["content"])["evolution"]
    assert [c["arguments"].get("text", c["arguments"].get("restaurant_id")) for c in task.gold_calls[1]] == [result] * 2
    row = SEAL[14] | {"calling": [SEAL[14]["calling"][1], SEAL[14]["calling"][0]]}  # the caller stands first
    row["calling"][0]["parameters"]["text"] = "about API_call_0, please"
    task, = load_tasks(write(tmp_path, row, catalogue=DATA / "seal_tools/tool.jsonl"))
    assert [[c["name"] for c in step] for step in task.gold_calls] == [["getLanguageEvolution"], ["formatText"]]
    assert task.gold_calls[1][0]["arguments"]["text"] == f"about {result}, please"


def test_offered_tools_depend_on_the_id_alone():
    tools = sets.catalogue(DATA / "seal_tools/tool.jsonl", "seal_tools")
    wanted = list(tools)[:7]
    pick = [[t["function"]["name"] for t in sets.offered(name, wanted[:2], tools)] for name in ("a", "a", "b")]
    assert pick[0] == pick[1] != pick[2] and set(wanted[:2]) <= set(pick[0])
    assert sorted(t["function"]["name"] for t in sets.offered("a", wanted, tools)) == sorted(wanted)  # more than five
    few = {n: tools[n] for n in wanted[:3]}
    assert len(sets.offered("a", wanted[:1] * 2, few)) == 3  # a call made twice needs one tool


@pytest.mark.parametrize(("value", "kind", "expected"), [
    ("40.7", "number", 40.7), ("85", "integer", 85), ("85.0", "integer", 85.0), ("1e3", "number", 1000.0),
    ("007", "integer", "007"), ("1,000", "number", "1,000"), ("nan", "number", "nan"), ("NaN", "number", "NaN"),
    ("1e999", "number", "1e999"), ("0.12345678901234567890", "number", "0.12345678901234567890"),
    ("true", "integer", "true"), ("True", "boolean", True), ("yes", "boolean", "yes"), (1.5, "string", "1.5"),
    (True, "string", True), ("['a', 'b']", "array", ["a", "b"]), ("a, b", "array", "a, b"), ([1], "number", [1]),
    ("5", None, "5")])
def test_values_are_coerced_only_where_nothing_is_lost(value, kind, expected):
    found = sets.coerced(value, kind)
    assert found == expected and type(found) is type(expected)


def test_leaves_of_nested_results():
    value = {"a": {"b": [1, {"c": True}]}, "d": "x", "e": None}
    assert sets.leaves(value) == [("b", "1"), ("c", "true"), ("d", "x"), ("e", "null")]


# --- API-Bank and Glaive ---------------------------------------------------------------------------------------------

def test_api_bank_last_turn():
    found = dict(iter_tasks(DATA / "api_bank/dialogues.jsonl"))
    task = found[2]
    user = {"username": "JohnDoe", "password": "pass123"}
    assert [[c["name"] for c in step] for step in task.gold_calls] == [["GetUserToken"], ["AddAgenda"]]
    before = "Sure, to confirm, you want to add a schedule item for tomorrow, October 26th, at 9am"
    first, token, second, done, reply = task.demonstration
    assert first["content"].startswith(before) and first["tool_calls"] == [{"name": "GetUserToken", "arguments": user}]
    assert token == {"role": "tool", "content": '{"token": "a9s8d7f6g5h4j3k2l1"}'}
    assert second["content"] == "" and done["content"] == '"success"'
    assert reply["content"] == task.answer == "Done. The schedule item has been added."
    assert task.id == "level-1-given-desc/AddAgenda-AddMeeting-GetUserToken-level-2-2"
    assert task.subset == "level-1-given-desc" and {"GetUserToken", "AddAgenda"} <= set(task.allowed_tools)
    assert len(task.tools) == 5 and find_tool("AddAgenda", task.tools)["parameters"]["required"] == []
    errors = {n: e for n, e in found.items() if isinstance(e, DataError)}
    assert "last message" in errors[6].expected and errors[10].expected == "a user turn"


def test_api_bank_decomposed():
    found = {}
    for number, task in iter_tasks(DATA / "api_bank/dialogues.jsonl", decompose=True):
        found.setdefault(number, []).append(task)
    # row 4: users 1 to 4 get text, the fifth two calls; every one is a sample with the turns before it as its history
    assert [t.id.rsplit("-", 1)[1] for t in found[4]] == [f"turn{k}" for k in range(1, 6)]
    assert [len(t.messages) for t in found[4]] == [1, 3, 5, 7, 9]
    assert [len(t.gold_calls) for t in found[4]] == [0, 0, 0, 0, 2]
    assert {json.dumps(t.tools) for t in found[4]} == {json.dumps(found[4][0].tools)}  # one list for a dialogue
    # row 6 ends with a call's result and a user turn: only its first turn is answered
    assert [t.id.rsplit("-", 1)[1] for t in found[6]] == ["turn1"]
    assert [t.id for t in found[2]] == ["level-1-given-desc/AddAgenda-AddMeeting-GetUserToken-level-2-2"]
    # row 8: its second user turn gets no reply and is history, not a sample
    assert [t.id.rsplit("-", 1)[1] for t in found[8]] == ["turn1", "turn3", "turn4", "turn5", "turn6", "turn7"]


def test_api_bank_texts_in_a_row_are_one_message_and_a_failed_call_is_an_error(tmp_path):
    call = BANK[1]["turns"][2]
    failed = edit(edit(call, "no such user", "result", "exception"), None, "result", "output")
    turns = [{"role": "User", "text": "hi"}, {"role": "AI", "text": "One."}, {"role": "AI", "text": "Two."}, failed,
             {"role": "AI", "text": "Sorry."}, {"role": "AI", "text": "It failed."}]
    path = write(tmp_path, {"turns": turns}, catalogue=DATA / "api_bank/tools.json")
    task, = load_tasks(path)
    assert [m["content"] for m in task.demonstration] == ["One.\nTwo.", '{"error": "no such user"}',
                                                          "Sorry.\nIt failed."]
    assert task.id == "rows-1" and task.subset == ""


def test_glaive():
    found = {}
    for number, task in iter_tasks(DATA / "glaive/rows.json", decompose=True):
        found.setdefault(number, []).append(task)
    assert [len(t.gold_calls) for t in found[1]] == [0, 1, 0]
    task = found[1][1]
    assert task.gold_calls == [[{"name": "search_recipes",
                                 "arguments": {"ingredients": ["chicken", "bell peppers", "rice"]}}]]
    assert [m["role"] for m in task.messages] == ["user", "assistant", "user"]
    assert task.demonstration[1] == {"role": "tool", "content": GLAIVE[0]["conversations"][4]["value"]}
    assert task.allowed_tools == ["search_recipes"] and task.answer == GLAIVE[0]["conversations"][5]["value"]
    assert [len(t.tools) for t in found[3]] == [0, 0]  # no tools in the row
    last = load_tasks(DATA / "glaive/rows.json")
    assert len(last) == 11 and last[0].id == "rows-1" and last[0].messages == found[1][2].messages


def test_glaive_parallel_calls_are_one_step(tmp_path):
    row = {"tools": [], "conversations": [
        {"from": "system", "value": "Be brief."}, {"from": "human", "value": "q"},
        *({"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": x}})} for x in (1, 2)),
        {"from": "observation", "value": "a"}, {"from": "observation", "value": "b"}, {"from": "gpt", "value": "ab"}]}
    task, = load_tasks(write(tmp_path, row))
    assert task.gold_calls == [[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]]
    assert task.messages[0] == {"role": "system", "content": "Be brief."}


# --- raw Toucan ------------------------------------------------------------------------------------------------------

def test_raw_toucan_by_hand(tmp_path):
    declared = "<|im_system|>tool_declare<|im_middle|>[{}]<|im_end|>"
    task, = load_tasks(write(tmp_path, raw([{"role": "system", "content": declared}, *RAW])))
    assert task.gold_calls == [[{"name": "add", "arguments": {"a": 1, "b": 2}},
                                {"name": "add", "arguments": {"a": 3, "b": 4}}],
                               [{"name": "add", "arguments": {"a": 3, "b": 7}}]]
    assert task.messages == [USER] and task.tools == [TOOL] and (task.id, task.subset) == ("u", "single-turn-original")
    assert [m["role"] for m in task.demonstration] == ["assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [m["content"] for m in task.demonstration] == ["", "3", "7", "Now both.", "10", "3 and 7."]
    assert task.demonstration[3]["reasoning_content"] == "sum them" and task.answer == "3 and 7."


def test_a_call_joins_the_text_before_it(tmp_path):
    text = {"role": "assistant", "content": "I add.", "reasoning_content": "think"}
    task, = load_tasks(write(tmp_path, raw([USER, text, called("{}"), result("0"), REPLY])))
    assert task.demonstration[0] == {**text, "tool_calls": [{"name": "add", "arguments": {}}]}


def test_raw_toucan_is_decomposed_from_the_second_turn(tmp_path):
    longer = [*RAW, {"role": "user", "content": "and 5 + 6?"}, called('{"a": 5, "b": 6}'), result("11"), REPLY,
              {"role": "user", "content": "thanks"}, {"role": "assistant", "content": "Welcome."}]
    path = write(tmp_path, raw(longer), raw(RAW, uuid="v"))
    found = [task for _, task in iter_tasks(path, decompose=True)]
    assert [t.id for t in found] == ["u-turn2", "u-turn3", "v"]
    assert [t.question for t in found] == ["and 5 + 6?", "thanks", USER["content"]]
    assert found[0].gold_calls == [[{"name": "add", "arguments": {"a": 5, "b": 6}}]] and found[1].gold_calls == []
    assert found[0].messages[1]["tool_calls"] == found[2].gold_calls[0]  # the history keeps its calls
    assert [t.id for t in load_tasks(path)] == ["u", "v"]  # without: the last turn


# --- malformed rows --------------------------------------------------------------------------------------------------

S, B, G = SEAL[1], BANK[1], GLAIVE[0]
WRONG = [  # row, field, part of what was expected
    (edit(S, " ", "query"), "query", "text"), (edit(S, [], "calling"), "calling", "list of calls"),
    (edit(S, "x", "calling", 0), "calling[0]", "object"), (edit(S, 5, "calling", 0, "api"), "calling[0].api", "text"),
    (edit(S, "nope", "calling", 0, "api"), "calling[0].api", "tool of the catalogue"),
    (edit(S, [], "calling", 0, "parameters"), "calling[0].parameters", "mapping"),
    (edit(S, ..., "calling", 0, "parameters", "revenue"), "calling[0].parameters", "missing required argument"),
    (edit(S, "API_call_0", "calling", 0, "parameters", "revenue"), "calling[0].parameters", "results of other calls"),
    (edit(S, None, "calling", 0, "responses"), "calling[0].responses", "list of names"),
    (edit(S, [], "calling", 0, "responses"), "calling[0].responses", "names of 1 results"),
    (edit(S, [[]], "calling", 0, "responses"), "calling[0].responses", "names of 1 results"),
    (edit(B, "x", "turns"), "turns", "list of turns"), (edit(B, [], "turns"), "turns", "user turn"),
    (edit(B, {}, "turns", 0), "turns[0].role", "User, AI or API"),
    (edit(B, ["AI"], "turns", 0, "role"), "turns[0].role", "User, AI or API"),
    (edit(B, None, "turns", 1, "text"), "turns[1].text", "text"),
    (edit(B, "nope", "turns", 2, "api_name"), "turns[2].api_name", "tool of the catalogue"),
    (edit(B, {}, "turns", 2, "api_name"), "turns[2].api_name", "text"),
    (edit(B, "x", "turns", 2, "param_dict"), "turns[2].param_dict", "mapping"),
    (edit(B, {"username": []}, "turns", 2, "param_dict"), "turns[2].param_dict", "type string, not array"),
    (edit(B, {}, "turns", 2, "result"), "turns[2].result", "output"),
    (edit(B, B["turns"][:-1], "turns"), "turns", "last message"),
    (edit(G, {}, "conversations"), "conversations", "list of turns"),
    (edit(G, ["gpt"], "conversations", 1, "from"), "conversations[1].from", "human, gpt"),
    (edit(G, "bot", "conversations", 1, "from"), "conversations[1].from", "human, gpt"),
    (edit(G, None, "conversations", 0, "value"), "conversations[0].value", "text"),
    (edit(G, "{'name': ", "conversations", 3, "value"), "conversations[3].value", "Python literal"),
    (edit(G, ..., "conversations", 4), "conversations[4]", "results of 1 calls"),
    (edit(G, "[{", "tools"), "tools", "JSON"), (edit(G, "You are", "system"), "system", "no system text"),
    (raw("[{"), "messages", "JSON"), (raw([]), "messages", "user turn"), (raw([USER]), "messages", "reply"),
    (raw(RAW, available_tools="{}"), "available_tools", "list of tool schemas"),
    (raw([USER, called('{"a": 1'), result("3"), REPLY]), "messages[1].function_call.arguments", "JSON"),
    (raw([USER, called("{}", ""), result("3"), REPLY]), "messages[1].function_call", "with a name"),
    (raw([USER | {"function_call": {"name": "add"}}]), "messages[0].function_call", "assistant's message"),
    (raw([USER, called("{}"), called("{}"), result("3"), REPLY]), "messages[4]", "results of 1 calls"),
    (raw([USER, called("{}"), result("3"), result("4"), REPLY]), "messages[3]", "a call that this result answers"),
    (raw([USER, called("{}"), result(None), REPLY]), "messages[2].content", "text"),
]


@pytest.mark.parametrize(("row", "field", "part"), WRONG, ids=range(len(WRONG)))
def test_a_malformed_row_is_refused_with_its_place(tmp_path, row, field, part):
    good, catalogue = {"seal_tools": (S, DATA / "seal_tools/tool.jsonl"), "api_bank": (B, DATA / "api_bank/tools.json"),
                       "glaive": (G, None), "toucan_raw": (raw(RAW), None)}[detect(row)]
    path = write(tmp_path, good, row, catalogue=catalogue)
    with pytest.raises(DataError) as error:
        load_tasks(path)
    assert (error.value.row, error.value.field) == (2, field) and part in error.value.expected
    assert str(error.value).startswith(f"{path}, row 2, {field}: expected")
    first, second = iter_tasks(path)
    assert first[0] == 1 and not isinstance(first[1], DataError)
    assert second[0] == 2 and isinstance(second[1], DataError) and str(second[1]) == str(error.value)


@pytest.mark.parametrize(("row", "field", "part"), [
    ("{", "", "JSON"), ("3", "", "object"), ('{"api_name": ""}', "parameters", "mapping"),
    ('{"api_name": "f", "api_description": "d", "parameters": {"a": {"type": "date"}}}', "parameters.a", "float"),
    ('{"api_name": "f", "api_description": "d", "parameters": {"a": 1}}', "parameters.a", "a type"),
    ('{"api_name": "f", "api_description": "d", "parameters": {}, "required": [[]]}', "required", "names"),
    ('{"api_name": "f", "api_description": "d", "parameters": {}, "responses": 5}', "responses", "mapping"),
    ('{"api_name": 1, "api_description": "d", "parameters": {}, "responses": {}}', "api_name", "text")])
def test_a_malformed_catalogue_is_refused(tmp_path, row, field, part):
    (tmp_path / "tool.jsonl").write_text("\n" + row)
    with pytest.raises(DataError, match="tool.jsonl, row 2") as error:
        load_tasks(write(tmp_path, S), bad_rows="skip")
    assert error.value.field == field and part in error.value.expected


def test_a_missing_catalogue_and_another_place_for_it(tmp_path):
    path = write(tmp_path, S)
    with pytest.raises(DataError, match="tool.jsonl: expected the tool schemas of seal_tools rows.*--tools"):
        load_tasks(path)
    (_, task), = iter_tasks(path, tools=DATA / "seal_tools/tool.jsonl")
    assert task == seal()[2]
    assert len(load_tasks(DATA / "seal_tools")) == 15  # a folder: the catalogue is no file of rows


JUNK = (None, 5, True, "", "x", "[", [], [[]], {}, {"name": []}, [{"a": None}])


def spoiled(value, path=()):
    """Every (path, junk): each node of a JSON value replaced by each piece of junk."""
    if path:
        yield from ((path, junk) for junk in JUNK)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from spoiled(item, (*path, key))


@pytest.mark.parametrize("kind", ["toucan_rl", "toucan_sft", "toucan_raw", "seal_tools", "api_bank", "glaive", "task"])
def test_no_row_breaks_the_reader_and_every_task_can_be_shown(tmp_path, kind):
    """Each part of a row, spoiled in turn, gives a task or a DataError; a task can be rendered, written and read."""
    row = {"toucan_rl": json.loads((DATA / "toucan_rl_row.jsonl").read_text()), "seal_tools": SEAL[10],
           "toucan_sft": json.loads((DATA / "toucan_sft_row.jsonl").read_text()), "api_bank": B, "glaive": G,
           "toucan_raw": raw(RAW), "task": vars(load_tasks(write(tmp_path, raw(RAW)))[0])}[kind]
    row = copy.deepcopy(row)
    for key in ("messages", "available_tools"):  # the reader takes these as JSON text and as values
        if kind.startswith("toucan") and isinstance(row.get(key), str):
            row[key] = json.loads(row[key])
    if kind.startswith("toucan"):
        row["tools"] = [TOOL]
    if kind == "toucan_rl":
        row["reward_model"]["ground_truth"] |= {"allowed_tools": None, "gold_tool_calls": [[{
            "name": "add", "arguments": {"a": 1}}]]}
    rows = [edit(row, junk, *path) for path, junk in spoiled(row)]
    catalogue = {"seal_tools": DATA / "seal_tools/tool.jsonl", "api_bank": DATA / "api_bank/tools.json"}.get(kind)
    path = write(tmp_path, *rows, catalogue=catalogue)
    tasks, errors = [], 0
    for _, found in iter_tasks(path, kind=kind, decompose=True):
        if isinstance(found, DataError):
            errors += 1
            continue
        tasks.append(found)
        chat.render_text(found.messages, found.tools)
        if found.demonstration:
            chat.render_text(found.messages + found.demonstration, found.tools, add_generation_prompt=False)
    assert errors > len(rows) / 8 and tasks
    assert load_tasks(write(tmp_path, *map(vars, tasks), name="back.jsonl")) == tasks


# --- what a first review broke ---------------------------------------------------------------------------------------

PAIR = {"role": "assistant", "content": "", "tool_calls": [
    {"id": i, "function": {"name": n, "arguments": "{}"}} for i, n in (("c1", "f"), ("c2", "g"))]}
FG = [{"type": "function", "function": {"name": n}} for n in "fg"]


def dialogue_of(*results, call=PAIR):
    return {"messages": [USER, call, *results, REPLY], "tools": FG}


def tool(text, **more):
    return {"role": "tool", "content": text, **more}


def test_parallel_results_find_their_calls_by_id_or_name(tmp_path):
    for one, two in ((tool("2", tool_call_id="c2"), tool("1", tool_call_id="c1")), (tool("2", name="g"), tool("1")),
                     (tool("1"), tool("2")), (tool("1", name="unknown"), tool("2"))):
        task, = load_tasks(write(tmp_path, dialogue_of(one, two)))
        assert [m["content"] for m in task.demonstration if m["role"] == "tool"] == ["1", "2"]
    with pytest.raises(DataError, match=r"messages\[2\].tool_call_id: expected the id of a call that waits"):
        load_tasks(write(tmp_path, dialogue_of(tool("1", tool_call_id="c9"), tool("2"))))


@pytest.mark.parametrize("text", ["{'name': 'f', 'arguments': {'x': {1, 2}}}",
                                  "{'name': 'f', 'arguments': {'x': b'1'}}",
                                  "{'name': 'f', 'arguments': {'x': 1j}}", "{'name': 'f', 'arguments': {1: 2}}",
                                  '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": 1e999}}'])
def test_what_json_cannot_write_is_refused(tmp_path, text):
    row = {"uuid": "u", "messages": [USER, {"role": "tool_call", "content": text}, tool("1"), REPLY], "tools": FG}
    with pytest.raises(DataError, match=r"messages\[1\].content.*JSON"):
        load_tasks(write(tmp_path, row))


def test_nan_in_a_row_or_a_schema_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "q"}], "gold_calls": [[{"name": "f", "arguments": '
                    '{"x": NaN}}]]}')
    with pytest.raises(DataError, match="row 1.*NaN is no JSON"):
        load_tasks(path)
    path.write_text(json.dumps({"messages": [USER, REPLY], "tools": [{"name": "f", "default": 1e308}]}).replace(
        "1e+308", "1e999"))
    with pytest.raises(DataError, match=r"tools\[0\]: expected what JSON can write"):
        load_tasks(path)


def test_two_tools_of_one_name_are_refused(tmp_path):
    with pytest.raises(DataError, match="tools: expected tools of different names"):
        load_tasks(write(tmp_path, {"messages": [USER, REPLY], "tools": FG + FG[:1]}))


def test_thoughts_of_parallel_calls_are_kept(tmp_path):
    both = [{**called("{}"), "reasoning_content": t} for t in ("first", "second")]
    task, = load_tasks(write(tmp_path, raw([USER, *both, result("1"), result("2"), REPLY])))
    assert task.demonstration[0]["reasoning_content"] == "first\nsecond"
