"""Throughput of the server: many requests at once against one after the other, over HTTP, in tokens a second.

    python tests/benchmarks/serve.py [--model a b c] [--pairs 5] [--threads 1]

Both sides take turns in one process, which holds server and clients. Every request has words of its own, so that no
kept cache helps; replies are greedy and of equal length, from random weights. Left out: streaming, GPUs, long prompts.
"""
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from itertools import count

from common import SHAPES, about, alternate, arguments, finish, mid, own_policy, ratio, table

from slca.agent import Agent
from slca.data.vocabulary import world_tokenizer
from slca.serve import Server

AT_ONCE, ALONE, NEW, WORDS = 32, 4, 64, 60  # requests of each side, tokens of a reply, words of a prompt
NUMBERS = count()


def main() -> None:
    args = arguments(__doc__)
    tokenizer = world_tokenizer(examples=150)
    found = [one_model(name, tokenizer, args) for name in args.model]
    table(f"{AT_ONCE} requests at once against one at a time", found)
    finish(about(args) | {"at_once": AT_ONCE, "throughput": found})


def one_model(name: str, tokenizer, args) -> dict:
    new = 8 if args.quick else NEW
    policy = own_policy(name, vocab_size=max(SHAPES[name]["vocab_size"], tokenizer.size)).requires_grad_(False)
    tokenizer.stop_ids = ()  # every reply runs to its full length
    agent = Agent(policy, tokenizer, AT_ONCE)
    server = Server(agent, tokenizer, name)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(_) -> int:
        draw = random.Random(next(NUMBERS))
        words = " ".join(str(draw.randint(0, 99)) for _ in range(WORDS))
        connection = HTTPConnection("127.0.0.1", server.server_port)
        connection.request("POST", "/v1/chat/completions", json.dumps({
            "model": name, "messages": [{"role": "user", "content": words}], "temperature": 0, "max_tokens": new}))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["usage"]["completion_tokens"] == new
        return new

    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = alternate({"alone": lambda: [ask(k) for k in range(ALONE)] and None,
                          "at once": lambda: list(pool.map(ask, range(AT_ONCE))) and None}, args.pairs)
    server.close(1)
    agent.close()
    for side, requests in (("alone", ALONE), ("at once", AT_ONCE)):
        for run in runs[side]:
            run["token"] = run["total"] / (requests * new)
    return {"model": name, "new tokens": new, "alone, tokens/s": 1 / mid(runs, "alone", "token"),
            "at once, tokens/s": 1 / mid(runs, "at once", "token"), "ratio": ratio(runs, "alone", "at once", "token")}


if __name__ == "__main__":
    main()
