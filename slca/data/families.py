"""The tools of the embedded world: 20 families, each with synonyms, parameter and output schemas, and true answers.

A family is one ability (weather, unit conversion, ...). Its tool and argument names change from task to task, so a
policy has to read the schema and copy the values; it cannot know a call by heart. The modes are those of the
simulator: `deterministic` is computed exactly, `query` draws its values from a hash of the call within the output
schema, `open` is a sentence that carries facts fixed by the same hash.
"""
from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

ONSETS = "b c d f g h k l m n p r s t v z br dr kr st tr".split()
SYLLABLES = [onset + vowel for onset in ONSETS for vowel in "aeiou"]
UNITS = {"km": ("m", 1000), "hours": ("minutes", 60), "kg": ("grams", 1000), "days": ("hours", 24),
         "feet": ("inches", 12), "weeks": ("days", 7)}
SKY, STATE, ROLE = ("rain", "sun", "snow", "fog"), ("sent", "lost", "packed"), ("admin", "guest", "owner")
SUFFIXES = ("api", "tool", "now", "get", "call", "pro")
COMMON = {"word": ("name", "key", "text", "item", "query", "label"),
          "number": ("number", "count", "size", "index", "units", "value"), "choice": ("option", "mode", "kind")}
LANGUAGES = ("French", "German", "Spanish", "Polish")


def draw(rng: random.Random, kind: str | tuple[str, ...]) -> str | int:
    """A value: "word" is a made-up capitalised name of two syllables, "number" 10..99, a tuple one of its members."""
    if kind == "word":
        return (rng.choice(SYLLABLES) + rng.choice(SYLLABLES)).capitalize()
    return rng.randint(10, 99) if kind == "number" else rng.choice(kind)


@dataclass(frozen=True)
class Family:
    """One ability. In `asks`, `more` and `reply`, {0}, {1} are arguments and {name} are results."""

    key: str
    mode: str  # deterministic | query | open
    stems: tuple[str, str]  # a tool's name is one of these and one of SUFFIXES
    about: str  # the tool's description
    args: tuple[tuple[tuple[str, ...], str | tuple[str, ...]], ...]  # (own synonyms, kind) an argument
    asks: tuple[str, ...]  # ways to ask for it
    more: str  # how a later turn asks for the same with other arguments
    results: tuple[tuple[str, str | tuple[str, ...]], ...]  # (key, kind) a result: the output schema
    reply: str
    compute: Callable[..., dict] | None = None  # deterministic: arguments in order -> results
    text: str = ""  # open: the sentence returned
    source: str = ""  # a look-up that can give the first argument: key of that family
    chained: str = ""  # how to ask when the first argument has to be looked up; {0} is the look-up's argument

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{stem}_{suffix}" for stem in self.stems for suffix in SUFFIXES)

    def argument_names(self, position: int) -> tuple[str, ...]:
        """What an argument may be called: its own synonyms, and names that any argument of its kind may have."""
        own, kind = self.args[position]
        return own + (COMMON[kind] if isinstance(kind, str) else COMMON["choice"])

    def schema(self, name: str, argument_names: tuple[str, ...]) -> dict:
        """The OpenAI function schema under the given names. The order of its properties is that of `args`."""
        properties = {n: _type(kind) for n, (_, kind) in zip(argument_names, self.args, strict=True)}
        return {"type": "function", "function": {"name": name, "description": self.about, "parameters": {
            "type": "object", "properties": properties, "required": list(argument_names)}}}

    def output_schema(self) -> dict:
        """JSON Schema of a result (an `open` tool returns its sentence instead)."""
        if self.mode == "open":
            return {"type": "string"}
        return {"type": "object", "properties": {key: _type(kind) for key, kind in self.results},
                "required": [key for key, _ in self.results]}

    def fits(self, function: dict) -> bool:
        """Whether the parameters of a function schema are of this family's making: its values' order relies on it."""
        parameters = function.get("parameters")
        names = parameters.get("properties") if isinstance(parameters, dict) else None
        return isinstance(names, dict) and len(names) == len(self.args) and parameters == self.schema(
            "", tuple(names))["function"]["parameters"]

    def answer(self, call: dict, values: list, seed: int) -> dict:
        """The true results of a call {"name", "arguments"} with its values in the order of `args`.

        The same call and seed give the same results.
        """
        if self.compute:
            return self.compute(*values)
        rng = call_rng(call, seed)
        return {key: draw(rng, kind) for key, kind in self.results}

    def observation(self, call: dict, values: list, seed: int) -> str:
        """What the tool returns: JSON of the results, or the sentence of an open tool."""
        results = self.answer(call, values, seed)
        if self.mode == "open":
            return self.text.format(*values, **results)
        return json.dumps(results, ensure_ascii=False)


def _type(kind: str | tuple[str, ...]) -> dict:
    if kind == "number":
        return {"type": "integer"}
    return {"type": "string"} if kind == "word" else {"type": "string", "enum": list(kind)}


def call_rng(call: dict, seed: int) -> random.Random:
    """A generator fixed by (tool, canonical arguments, seed)."""
    key = json.dumps([call["name"], call["arguments"], seed], sort_keys=True, ensure_ascii=False)
    return random.Random(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest())


def _convert(amount: int, unit: str) -> dict:
    other, factor = UNITS[unit]
    return {"result": amount * factor, "unit": other}


FAMILIES: dict[str, Family] = {f.key: f for f in (
    Family("weather", "query", ("weather", "forecast"), "weather in a city",
           ((("city", "place"), "word"),),
           ("What is the weather in {0}?", "Tell me the forecast for {0}."), "And the weather in {0}?",
           (("temp", "number"), ("sky", SKY)), "In {0} it is {temp} degrees with {sky}.",
           source="home", chained="What is the weather in the city where {0} lives?"),
    Family("clock", "query", ("time", "clock"), "local time of a city",
           ((("city", "zone"), "word"),),
           ("What time is it in {0}?", "Give me the local time of {0}."), "And the time in {0}?",
           (("time", "number"),), "It is {time} in {0}.",
           source="capital", chained="What time is it in the capital of {0}?"),
    Family("stock", "query", ("stock", "quote"), "share price of a company",
           ((("symbol", "company"), "word"),),
           ("What is the share price of {0}?", "How much is a share of {0}?"), "And a share of {0}?",
           (("price", "number"),), "A share of {0} costs {price}.",
           source="employer", chained="What is the share price of the company of {0}?"),
    Family("order", "query", ("order", "parcel"), "state of an order",
           ((("order", "code"), "number"),),
           ("Where is my order {0}?", "Track order {0} please."), "And order {0}?",
           (("state", STATE), ("days", "number")), "Order {0} is {state}, {days} days left.",
           source="purchase", chained="Where is the last order of {0}?"),
    Family("convert", "deterministic", ("conversion", "unit_change"), "convert an amount",
           ((("amount", "quantity"), "number"), (("unit", "measure"), tuple(UNITS))),
           ("Convert {0} {1} to the smaller unit.", "How much is {0} {1} in the smaller unit?"),
           "And {0} {1}?", (("result", "number"), ("unit", tuple(u for u, _ in UNITS.values()))),
           "{0} {1} are {result} {unit}.", compute=_convert),
    Family("total", "deterministic", ("sum", "addition"), "add two numbers",
           ((("first", "a"), "number"), (("second", "b"), "number")),
           ("What is {0} plus {1}?", "Add {0} and {1}."), "And {0} plus {1}?",
           (("sum", "number"),), "{0} plus {1} is {sum}.", compute=lambda a, b: {"sum": a + b}),
    Family("translate", "query", ("translation", "foreign_word"), "translate a word",
           ((("word", "term"), "word"), (("lang", "language"), LANGUAGES)),
           ("Translate {0} into {1}.", "How do you say {0} in {1}?"), "And {0} in {1}?",
           (("out", "word"),), "{0} in {1} is {out}."),
    Family("mail", "query", ("mail", "email"), "send a mail",
           ((("to", "recipient"), "word"), (("subject", "topic"), "word")),
           ("Send a mail to {0} about {1}.", "Write {0} an email on {1}."), "And one to {0} about {1}.",
           (("mail_id", "number"),), "Mail {mail_id} about {1} went to {0}.",
           source="lead", chained="Send a mail about {1} to the leader of team {0}."),
    Family("event", "query", ("meeting", "event"), "book a meeting",
           ((("guest", "with"), "word"), (("day", "date"), "number")),
           ("Book a meeting with {0} on day {1}.", "Meet {0} on day {1}, add it."), "And meet {0} on day {1}.",
           (("slot", "number"),), "Meeting with {0} booked in slot {slot}."),
    Family("distance", "query", ("distance", "route"), "distance of two places",
           ((("start", "from"), "word"), (("end", "target"), "word")),
           ("How far is it from {0} to {1}?", "What is the distance from {0} to {1}?"), "And from {0} to {1}?",
           (("km", "number"),), "From {0} to {1} it is {km} km."),
    Family("timer", "query", ("timer", "alarm"), "start a timer",
           ((("minutes", "length"), "number"),),
           ("Set a timer for {0} minutes.", "Start a timer of {0} minutes."), "And one for {0} minutes.",
           (("timer_id", "number"),), "Timer {timer_id} runs for {0} minutes."),
    Family("user", "query", ("user", "account"), "look up a user",
           ((("user", "login"), "word"),),
           ("Who is the user {0}?", "Look up the user {0}."), "And the user {0}?",
           (("role", ROLE), ("age", "number")), "{0} is {role}, age {age}."),
    Family("table", "query", ("table", "seats"), "reserve a table",
           ((("venue", "where"), "word"), (("seats", "people"), "number")),
           ("Book a table for {1} at {0}.", "Reserve {1} seats at {0}."), "And {1} seats at {0}.",
           (("code", "word"),), "Table for {1} at {0}, code {code}.",
           source="favourite", chained="Book a table for {1} at the favourite place of {0}."),
    Family("wiki", "open", ("history", "wiki"), "text on a topic",
           ((("topic", "title"), "word"),),
           ("Who founded {0} and when?", "When was {0} founded, and by whom?"), "And {0}?",
           (("founder", "word"), ("year", "number")), "{0} was founded by {founder} in {year}.",
           text="The history of {0} is well known. It was {founder} who founded {0} in the year {year}."),
    Family("home", "query", ("home", "address"), "city where a person lives",
           ((("person", "who"), "word"),),
           ("Where does {0} live?", "In which city does {0} live?"), "And {0}?",
           (("city", "word"),), "{0} lives in {city}."),
    Family("capital", "query", ("capital", "main_city"), "capital of a country",
           ((("country", "land"), "word"),),
           ("What is the capital of {0}?", "Name the capital of {0}."), "And of {0}?",
           (("capital", "word"),), "The capital of {0} is {capital}."),
    Family("employer", "query", ("employer", "workplace"), "company of a person",
           ((("employee", "person"), "word"),),
           ("Where does {0} work?", "Which company employs {0}?"), "And {0}?",
           (("company", "word"),), "{0} works at {company}."),
    Family("purchase", "query", ("purchase", "last_order"), "last order of a customer",
           ((("customer", "client"), "word"),),
           ("What is the last order of {0}?", "Find the last order of {0}."), "And of {0}?",
           (("order", "number"),), "The last order of {0} is {order}."),
    Family("lead", "query", ("leader", "team_head"), "leader of a team",
           ((("team", "group"), "word"),),
           ("Who leads team {0}?", "Name the leader of team {0}."), "And team {0}?",
           (("leader", "word"),), "Team {0} is led by {leader}."),
    Family("favourite", "query", ("favourite", "best_place"), "favourite place of a person",
           ((("friend", "person"), "word"),),
           ("What is the favourite place of {0}?", "Which place does {0} like best?"), "And of {0}?",
           (("venue", "word"),), "{0} likes {venue} best."),
)}
BY_NAME: dict[str, Family] = {name: family for family in FAMILIES.values() for name in family.names}
OMITTED = "I can not look that up now."  # the reply of a demonstration that leaves its calls out

# (what the user says, the reply, needs a made-up name): no tool is due
CHAT = (
    ("Hello, my name is {0}.", "Hello {0}, how can I help you?"),
    ("Thank you, that was {0} speaking.", "You are welcome, {0}."),
    ("Good night from {0}.", "Good night, {0}."),
    ("Please just greet {0} for me.", "Greetings to {0}, have a nice day."),
)
