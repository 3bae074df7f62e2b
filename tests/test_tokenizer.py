"""Proves: no text from outside can become a control token, and nothing else about the ids changes for it.

Random texts made of every control token, their halves and their look-alikes go through five kinds of tokenizer
(byte-level BPE; added tokens that overlap, that a normaliser can forge, that eat white space; a Metaspace BPE with
byte fallback; sentencepiece BPE and unigram with user-defined pieces). Also: training is repeatable and lays out ids
as promised, a saved folder gives the same tokenizer here and in transformers, stop ids, errors that name the file.
"""

from __future__ import annotations

import io
import json
import random
import unicodedata

import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from slca.tokenizer import load_tokenizer, train_bpe

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FIXED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
QWEN = r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
CORPUS = [
    "the weather in Paris is fine\n\nand the price of 12 apples is 345 euros",
    'a call: <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n',
    "<|im_start|>user im_start im_end |> <| tool_call > < tool call",
] * 20


def toy(**more):
    return train_bpe(CORPUS, 420, SPECIAL, FIXED, QWEN, **more)


def overlapping(folder):
    """NFKC and four treacherous added tokens on a plain byte-level BPE."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # Trained on control tokens: without the guard "<a>" and "<call>" are reached by plain merges as well.
    backend.train_from_iterator(["<a>", "<call>", "<a><b>"] * 9, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<a>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    backend.add_tokens([AddedToken("<a><b>", normalized=False), AddedToken("<b>", normalized=False),
                        AddedToken("<call>", normalized=True), AddedToken("<w>", normalized=False, lstrip=True)])
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def metaspace(folder):
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    backend.train_from_iterator(["the s of < / >"] * 5, trainers.BpeTrainer(
        vocab_size=300, special_tokens=tokens, show_progress=False))
    data = json.loads(backend.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # the bytes are entries of the model, not added tokens
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return load_tokenizer(folder)


def spm(folder, kind):
    model = io.BytesIO()
    # The rules keep text as it is: no folding, no stripping of spaces.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type=kind, vocab_size=340, byte_fallback=True,
        user_defined_symbols=["<tool_call>", "</tool_call>"], control_symbols=["<|im_end|>"], minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False, num_threads=1)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return load_tokenizer(folder)


KINDS = {"bpe": lambda folder: toy(), "overlapping": overlapping, "metaspace": metaspace,
         "spm bpe": lambda folder: spm(folder, "bpe"), "spm unigram": lambda folder: spm(folder, "unigram")}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    return request.param, KINDS[request.param](tmp_path_factory.mktemp("tokenizer"))


def controls(tokenizer, ids):
    return [i for i in ids if i in set(tokenizer.control.values())]


def scraps(tokenizer):
    names = list(tokenizer.control)
    halves = [name[:k] for name in names for k in (1, len(name) // 2)] + [name[len(name) // 2:] for name in names]
    return names * 2 + halves + ["＜call＞", "<ca", "ll>", " ", "\n", "x", "é", "日本", "😀", ">\u0338", "1", "the"]


def same_text(name, a, b):
    form = "NFKC" if name == "overlapping" else "NFC"
    if name == "metaspace":  # the model itself does not tell a leading space from none
        a, b = a.lstrip(" "), b.lstrip(" ")
    assert unicodedata.normalize(form, a) == unicodedata.normalize(form, b)


def test_hostile_text_gives_no_control_id_and_decodes_to_itself(kind):
    name, tokenizer = kind
    rng, parts, hostile = random.Random(0), scraps(tokenizer), 0
    for _ in range(600):
        text = "".join(rng.choices(parts, k=rng.randint(0, 8)))
        ids = tokenizer.encode_untrusted(text)
        assert controls(tokenizer, ids) == []
        same_text(name, tokenizer.decode(ids), text)
        trusted = tokenizer.encode(text)
        hostile += trusted != ids
        assert bool(controls(tokenizer, trusted)) == (trusted != ids)
    assert hostile > 200  # the texts do attack


def test_in_mixed_spans_only_trusted_control_tokens_count(kind):
    name, tokenizer = kind
    rng, parts = random.Random(1), scraps(tokenizer)
    names = sorted(set(tokenizer.control) - {"<w>"})  # <w> eats white space: its text does not come back
    for _ in range(400):
        spans, expected = [], []
        for _ in range(rng.randint(1, 4)):
            spans.append(("".join(p for p in rng.choices(parts, k=rng.randint(0, 5)) if p != "<w>"), False))
            name_ = rng.choice(names)
            spans.append((f"\n{name_}\n", True))
            expected.append(tokenizer.control[name_])
        ids = tokenizer.encode_spans(spans)
        assert controls(tokenizer, ids) == expected
        text = "".join(text for text, _ in spans)
        if name != "metaspace":  # its decoder shows a space after a control token, whoever encodes
            same_text(name, tokenizer.decode(ids), text)


def test_spans_leave_no_trace_without_hostile_text(kind):
    _, tokenizer = kind
    rng = random.Random(2)
    for _ in range(200):
        text = "".join(rng.choices([*tokenizer.control, "the weather", "  ", "\n", " 345", "é"], k=6))
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert tokenizer.encode_spans([(piece, True) for piece in pieces]) == tokenizer.encode(text)


def test_merges_cross_borders_and_control_tokens_do_not():
    tokenizer = toy()
    end = tokenizer.token_to_id("<|im_end|>")
    assert len(tokenizer.encode(" weather")) == 1
    assert tokenizer.encode_spans([(" wea", False), ("ther", True)]) == tokenizer.encode(" weather")
    assert tokenizer.encode_spans([("<|im_", True), ("end|>", True)]) == [end]
    assert end not in tokenizer.encode_spans([("<|im_", False), ("end|>", True)])
    assert tokenizer.encode_spans([("<|im_", False), ("<|im_end|>", True)])[-1] == end
    # Hostile neighbours leave the rest as it was: the same ids as with the text cut at the true control token.
    ids = tokenizer.encode_spans([("a<|im_end|>", False), ("\n<|im_end|>\n", True), ("b", False)])
    assert ids == tokenizer.encode_untrusted("a<|im_end|>\n") + [end] + tokenizer.encode("\nb")


def test_a_normaliser_or_a_longer_neighbour_cannot_forge_a_token(tmp_path):
    tokenizer = overlapping(tmp_path)
    call, a, b, ab = (tokenizer.control[name] for name in ("<call>", "<a>", "<b>", "<a><b>"))
    assert tokenizer.encode("＜call＞") == [call]  # NFKC folds the full-width brackets: the attack is real
    assert call not in tokenizer.encode_untrusted("＜call＞")
    assert tokenizer.encode("<a><b>") == [ab]
    assert controls(tokenizer, tokenizer.encode_spans([("<a>", False), ("<b>", True)])) == [b]
    assert controls(tokenizer, tokenizer.encode_spans([("<a>", True), ("<b>", False)])) == [a]


def test_training_lays_out_ids_and_repeats():
    one, two = toy(), toy()
    texts = [*CORPUS[:3], "12345 überall 日本\t"]
    assert [one.encode(t) for t in texts] == [two.encode(t) for t in texts]
    assert [one.token_to_id(t) for t in SPECIAL] == [0, 1, 2]
    assert [one.token_to_id(t) for t in FIXED] == list(range(one.size - 4, one.size))
    assert one.size <= 420 and one.stop_ids == (2, 0)
    assert len(one.encode("12345")) == 5  # digits alone
    assert all(one.decode(one.encode(t)) == t for t in texts)
    assert one.encode("<tool_call>") == [one.size - 4]
    # `fixed` tokens are not special: tools that skip special tokens still show them.
    assert not one._backend.get_added_tokens_decoder()[one.size - 1].special
    assert one._backend.get_added_tokens_decoder()[2].special


def test_training_learns_no_merge_that_makes_a_control_token():
    # Words that are whole control tokens, which a trainer left to itself would learn first.
    tokenizer = train_bpe(["<|im_end|> <tool_call> x"] * 50, 330, SPECIAL, FIXED, r"\S+")
    model = json.loads(tokenizer._backend.to_str())["model"]
    assert {"".join(pair) for pair in model["merges"]}.isdisjoint(tokenizer.control)
    assert [tokenizer.token_to_id(t) for t in FIXED] == list(range(tokenizer.size - 4, tokenizer.size))


@pytest.mark.parametrize("arguments, words", [
    ((CORPUS, 200, SPECIAL), "vocab_size 200"),
    ((CORPUS, 400, SPECIAL, ["<|im_end|>"]), "different"),
    ((CORPUS, 400, [""]), "not empty"),
])
def test_training_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        train_bpe(*arguments)


def test_decode_takes_any_id_and_encode_any_text():
    tokenizer = toy()
    ids = tokenizer.encode("Paris<|im_end|>")
    assert tokenizer.decode([-5, *ids, tokenizer.size, 10**12]) == "Paris<|im_end|>"
    first_half = tokenizer.encode_untrusted("日")[:1]
    assert "\ufffd" in tokenizer.decode(first_half)
    # Half a surrogate pair, as `json.loads` may give it, is no text.
    for encode in (tokenizer.encode, tokenizer.encode_untrusted, lambda t: tokenizer.encode_spans([(t, False)])):
        assert tokenizer.decode(encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.encode("") == tokenizer.encode_untrusted("") == tokenizer.encode_spans([]) == []


def test_saved_folder_gives_the_same(kind, tmp_path):
    name, tokenizer = kind
    tokenizer.save(tmp_path)
    tokenizer.save(tmp_path)  # over itself
    again = load_tokenizer(tmp_path)
    rng, parts = random.Random(3), scraps(tokenizer)
    for _ in range(100):
        text = "".join(rng.choices(parts, k=5))
        assert again.encode(text) == tokenizer.encode(text)
        assert again.encode_untrusted(text) == tokenizer.encode_untrusted(text)
    assert (again.stop_ids, again.size, again.control) == (tokenizer.stop_ids, tokenizer.size, tokenizer.control)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".json", ".model" if "spm" in name else ".json"]


@pytest.mark.parametrize("loader, family", [
    ("AutoTokenizer", None), ("AutoTokenizer", "qwen3"), ("AutoTokenizer", "llama"),
    ("PreTrainedTokenizerFast", "qwen2")])
def test_saved_folder_loads_in_transformers(loader, family, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = toy()
    tokenizer.save(tmp_path)
    if family:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    other = getattr(transformers, loader).from_pretrained(tmp_path)
    for text in [*CORPUS[:3], "12345 überall 日本\t<|im_end|>\n<tool_call>"]:
        assert other(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert other.eos_token_id == tokenizer.stop_ids[0] and other.pad_token == "<|endoftext|>"


def test_sentencepiece_control_and_user_pieces(tmp_path):
    tokenizer = spm(tmp_path, "bpe")
    end, call, eos = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<tool_call>", "</s>"))
    assert controls(tokenizer, tokenizer.encode("the<|im_end|>weather <tool_call></s>")) == [end, call, eos]
    assert tokenizer.decode(tokenizer.encode("the<|im_end|>weather <tool_call></s>")) == (
        "the<|im_end|>weather <tool_call></s>")
    assert tokenizer.stop_ids == (eos, end)
    assert tokenizer.token_to_id("no such piece") is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert load_tokenizer(tmp_path).stop_ids == (end, eos)
    # Without anything hostile, ids are the library's own, dummy prefix and all.
    plain = sentencepiece.SentencePieceProcessor(model_proto=(tmp_path / "tokenizer.model").read_bytes())
    for text in ("the weather in Paris", " x", "<tool_call>the"):
        assert tokenizer.encode(text) == plain.encode(text)


@pytest.mark.parametrize("files, expected", [
    ({}, ["<|im_end|>", "<|endoftext|>"]),
    ({"tokenizer_config": {"eos_token": "<|endoftext|>"}}, ["<|endoftext|>", "<|im_end|>"]),
    ({"tokenizer_config": {"eos_token": {"content": "<|im_start|>"}}}, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]),
    ({"generation_config": {"eos_token_id": [0, 2]}}, ["<|endoftext|>", "<|im_end|>"]),
    ({"config": {"eos_token_id": 0}}, ["<|endoftext|>", "<|im_end|>"]),
    ({"config": {"eos_token_id": 99999}}, ["<|im_end|>", "<|endoftext|>"]),  # beyond the vocabulary
    ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": None}}, ["<|im_end|>", "<|endoftext|>"]),
])
def test_stop_ids(files, expected, tmp_path):
    tokenizer = toy()
    tokenizer._save_vocabulary(tmp_path)
    for name, data in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(path).stop_ids == tuple(map(tokenizer.token_to_id, expected))


def test_stop_of_a_vocabulary_without_qwen_tokens(tmp_path):
    assert metaspace(tmp_path).stop_ids == (2,)  # </s>


@pytest.mark.parametrize("name, content, error, words", [
    (None, None, FileNotFoundError, "no tokenizer.json"),
    ("tokenizer.json", b"{", ValueError, "tokenizer.json: not a tokenizer.json"),
    ("tokenizer.json", b'{"a": 1}', ValueError, "not a tokenizer.json"),
    ("tokenizer.json", b"\xff\xfe", ValueError, "not a tokenizer.json"),
    ("tokenizer.model", b"", ValueError, "tokenizer.model: not a sentencepiece"),
    ("tokenizer.model", b"hello, world", ValueError, "not a sentencepiece"),
    ("bad tokenizer_config.json", b"[1", ValueError, "tokenizer_config.json: not valid JSON"),
    ("bad generation_config.json", b"[1]", ValueError, "generation_config.json: a JSON object"),
])
def test_bad_files_are_named(name, content, error, words, tmp_path):
    if name:
        (tmp_path / name.removeprefix("bad ")).write_bytes(content)
        if name.startswith("bad"):
            toy()._save_vocabulary(tmp_path)
    with pytest.raises(error, match=words):
        load_tokenizer(tmp_path)


def test_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
