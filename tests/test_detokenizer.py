"""Streamed text equals text decoded at once, for every way of cutting the tokens into pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from perflab.engine.detokenizer import Detokenizer, TextStream
from perflab.models.loaded import LoadedModel
from perflab.models.tiny import ByteTokenizer

WORDS = [
    "the",
    " the",
    " quick",
    "fox",
    " 's",
    " n't",
    "n't",
    " '",
    " ",
    "  ",
    ".",
    " .",
    "'",
    "s",
    "é",
    "你",
    "\n",
]


def byte_level(**options: Any) -> PreTrainedTokenizerFast:
    """All 256 bytes, some merged words, and added tokens both special and plain."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = sorted(level.alphabet())
    merges = []
    for word in WORDS:
        spelled = level.pre_tokenize_str(word)[0][0]
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                merges.append((spelled[: end - 1], spelled[end - 1]))
                tokens.append(spelled[:end])
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>", AddedToken("<|sp ace|>", special=True)])
    tokenizer.add_tokens(["<plain>", "two words", "ünïcödé 你", "caf\u00e9"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def sentencepiece(strip: bool = True) -> PreTrainedTokenizerFast:
    """Llama 2's kind: pieces with a leading mark for the space, and bytes for what has no piece."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "the", "▁fox", "f", "o", "x", "é", "你", ".", "▁."]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "</s>", "▁", "▁▁", "▁the", "the", "▁fox", "f", "o", "x", "é", "你"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def wordpiece(**options: Any) -> PreTrainedTokenizerFast:
    pieces = [
        "[UNK]",
        "[SEP]",
        "the",
        "fox",
        "##es",
        "##'",
        "'",
        "s",
        "n't",
        "ve",
        ".",
        "?",
        ",",
        "don",
        "##n't",
        "'s",
    ]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def no_decoder() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


FORCED = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
TOKENIZERS: dict[str, Any] = {
    "byte level": byte_level(),
    "byte level, clean-up that transformers ignores": byte_level(clean_up_tokenization_spaces=True),
    "byte level, clean-up forced": byte_level(clean_up_tokenization_spaces=True, **FORCED),
    "sentencepiece": sentencepiece(),
    "sentencepiece without strip": sentencepiece(strip=False),
    "metaspace": metaspace(),
    "wordpiece": wordpiece(),
    "wordpiece with clean-up": wordpiece(clean_up_tokenization_spaces=True),
    "words": no_decoder(),
    "bytes": ByteTokenizer(),
}


def chunks(rng: random.Random, ids: Sequence[int]) -> list[list[int]]:
    """ids in pieces of random sizes, some empty."""
    pieces, rest = [], list(ids)
    while rest:
        size = rng.choice([0, 1, 1, 1, 2, 3, 8])
        pieces.append(rest[:size])
        rest = rest[size:]
    return pieces


def run(stream: TextStream, pieces: Sequence[Sequence[int]]) -> list[str]:
    return [*(stream.push(piece) for piece in pieces), stream.finish()]


def random_ids(tokenizer: Any, rng: random.Random, length: int) -> list[int]:
    """Mostly tokens from a few, so that characters do get completed, and now and then any id at all."""
    few = rng.sample(range(len(tokenizer)), min(len(tokenizer), 12))
    return [
        rng.choice(few) if rng.random() < 0.8 else rng.randrange(len(tokenizer) + 3) for _ in range(length)
    ]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_tokens_in_any_pieces_equal_decoding_at_once(name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(name)
    for _ in range(400):
        ids = random_ids(tokenizer, rng, rng.randrange(30))
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(run(detokenizer.stream((), skip), chunks(rng, ids))) == whole, ids


@pytest.mark.parametrize("name", [name for name, tokenizer in TOKENIZERS.items() if len(tokenizer) > 200])
def test_text_never_splits_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = "the fox é 你好 👩‍👩‍👧 naïve 🇩🇪 fox. don't"
    if "sentencepiece" in name:
        byte = tokenizer.convert_tokens_to_ids
        ids = [byte(f"<0x{b:02X}>") for b in text.encode()]
        ids.insert(5, byte("▁the"))
    else:
        ids = tokenizer.encode(text)
    pieces = run(Detokenizer(tokenizer).stream(), [[i] for i in ids])
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_are_no_characters_are_replaced_as_soon_as_they_are_known_to_be_none() -> None:
    stream = Detokenizer(ByteTokenizer()).stream()
    assert run(stream, [[0xE4], [0xBD], [0x41], [0xF0, 0x9F], [0xC3], [0xA9]]) == [
        *("", "", "\ufffdA", "", "", "\ufffdé"),
        "",
    ]
    assert run(Detokenizer(byte_level()).stream(), [[]]) == ["", ""]


@pytest.mark.parametrize("tokenizer", [byte_level(), ByteTokenizer()])
def test_an_unfinished_character_is_released_at_the_end(tokenizer: Any) -> None:
    ids = tokenizer.encode("a👩", add_special_tokens=False)[:-1]
    stream = Detokenizer(tokenizer).stream()
    assert [stream.push([i]) for i in ids] == ["a", "", "", ""]
    assert stream.finish() == "\ufffd"
    assert tokenizer.decode(ids) == "a\ufffd"


def test_the_embedded_tokenizer_streams_what_it_decodes(embedded: LoadedModel) -> None:
    tokenizer = embedded.tokenizer
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(4)
    for skip in (True, False):
        for _ in range(300):
            ids = random_ids(tokenizer, rng, 25)
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            assert "".join(run(detokenizer.stream((), skip), chunks(rng, ids))) == whole
    text = "Les élèves étudient: 你好, мир! 👩‍👩‍👧  12345\n\n\tdef f(x): return x**2  # naïve"
    pieces = run(detokenizer.stream(), [[i] for i in tokenizer.encode(text)])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_model_without_a_tokenizer_has_no_text_and_no_stop_strings() -> None:
    stream = Detokenizer(None).stream()
    assert run(stream, [[1, 2], [3]]) == ["", "", ""]
    assert stream.num_tokens == 3
    with pytest.raises(ValueError, match="no tokenizer; use stop_token_ids"):
        Detokenizer(None).stream(("x",))


# Stop strings


def stream_of(*stop: str) -> TextStream:
    return Detokenizer(ByteTokenizer()).stream(stop)


def push(stream: TextStream, text: str, match: bool = True) -> str:
    return stream.push(list(text.encode()), match)


def first_cut(text: str, stop: Sequence[str]) -> int | None:
    """Where the earliest stop string begins in a whole text."""
    return min((at for at in (text.find(s) for s in stop) if at >= 0), default=None)


def test_a_stop_string_over_several_pushes_is_cut_before_it() -> None:
    stream = stream_of("\nUser:")
    assert [push(stream, piece) for piece in ("Hello", ".\nUs", "er", ": hi")] == ["Hello", ".", "", ""]
    assert stream.stopped
    assert stream.num_tokens == len("Hello.\nUser:")
    assert push(stream, "more") == ""
    assert stream.finish() == ""


def test_text_that_only_begins_like_a_stop_string_is_held_no_longer_than_it_could_be_one() -> None:
    stream = stream_of("own fox")
    assert [push(stream, c) for c in "brown owl"] == ["b", "r", "", "", "", "", "own ", "", "owl"]
    assert not stream.stopped
    stream = stream_of("own fox")
    assert [push(stream, "br"), push(stream, "own fo"), stream.finish()] == ["br", "", "own fo"]
    assert not stream.stopped


@pytest.mark.parametrize("stop", [("ab", "abcd"), ("abcd", "ab"), ("abcd", "b", "ab")])
def test_of_two_stop_strings_the_shorter_does_not_wait_for_the_longer(stop: tuple[str, ...]) -> None:
    stream = stream_of(*stop)
    assert [push(stream, c) for c in "xab"] == ["x", "", ""]
    assert stream.stopped


def test_the_stop_string_that_begins_first_wins_even_if_another_ends_first() -> None:
    for text, want in (("xabcd", "x"), ("xabce", "xa"), ("xabc", "xa")):
        stream = stream_of("bc", "abcd")
        assert "".join([push(stream, c) for c in text] + [stream.finish()]) == want
        assert stream.stopped


def test_a_stop_string_in_the_held_end_is_found_by_finish() -> None:
    stream = stream_of("é", "bcx")
    assert [push(stream, "abc"), stream.stopped, stream.finish(), stream.stopped] == ["a", False, "bc", False]
    stream = stream_of("\ufffd")
    assert [stream.push([0x41, 0xC3]), stream.finish(), stream.stopped] == ["A", "", True]


def test_before_min_tokens_a_stop_string_is_text() -> None:
    stream = stream_of("END", "a longer one")
    assert push(stream, "a END", match=False) == "a END"  # complete, so there is nothing to wait for
    assert push(stream, " b", match=False) == " b"
    assert push(stream, "c END") == "c "
    assert stream.stopped


def test_a_stop_string_that_ends_after_min_tokens_counts_wherever_it_began() -> None:
    stream = stream_of("END")
    assert [push(stream, "a EN", match=False), push(stream, "D")] == ["a ", ""]
    assert stream.stopped
    # "ow" ended too early to count, although it is still held for "own"; the next "ow" counts
    stream = stream_of("ow", "own!")
    assert [push(stream, "ow", match=False), push(stream, "n?"), push(stream, "ow")] == ["", "own?", ""]
    assert stream.stopped


def test_the_stop_string_of_a_special_token_needs_it_in_the_text() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("fox"), tokenizer.convert_tokens_to_ids("<|im_end|>"), *tokenizer.encode("the")]
    shown = Detokenizer(tokenizer).stream(("<|im_end|>",), skip_special_tokens=False)
    assert [shown.push(ids), shown.stopped, shown.num_tokens] == ["fox", True, len(ids) - 1]
    hidden = Detokenizer(tokenizer).stream(("<|im_end|>",))
    assert [hidden.push(ids), hidden.stopped] == ["foxthe", False]


ALPHABET = "ab你"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(text=st.text(ALPHABET, max_size=40), stop=STOPS, seed=st.integers(0, 2**32))
def test_streamed_text_is_the_whole_text_cut_at_the_earliest_stop(
    text: str, stop: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    ids = list(text.encode())
    stream = stream_of(*stop)
    cut = first_cut(text, stop)
    released = ""
    for piece in chunks(rng, ids):
        released += stream.push(piece)
        if not stream.stopped:
            seen = bytes(ids[: stream.num_tokens]).decode(errors="ignore")
            held = max((k for s in stop for k in range(len(s)) if seen.endswith(s[:k])), default=0)
            assert released == seen[: len(seen) - held]  # not one character more is held
    assert released + stream.finish() == text[:cut]
    assert stream.stopped == (cut is not None)


@settings(max_examples=200, deadline=None)
@given(text=st.text(ALPHABET, max_size=30), stop=STOPS, seed=st.integers(0, 2**32))
def test_where_a_stream_stops_does_not_depend_on_the_pieces(text: str, stop: list[str], seed: int) -> None:
    ids = list(text.encode())
    single, grouped = stream_of(*stop), stream_of(*stop)
    assert "".join(run(single, [[i] for i in ids])) == "".join(run(grouped, chunks(random.Random(seed), ids)))
    assert (single.num_tokens, single.stopped) == (grouped.num_tokens, grouped.stopped)


@settings(max_examples=200, deadline=None)
@given(
    early=st.text("ab", max_size=12), late=st.text("ab", max_size=12), stop=STOPS, seed=st.integers(0, 2**32)
)
def test_min_tokens_exempts_exactly_the_stop_strings_that_end_before(
    early: str, late: str, stop: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    stream, text = stream_of(*stop), early + late
    released = "".join(stream.push(piece, match=False) for piece in chunks(rng, list(early.encode())))
    released += "".join(run(stream, chunks(rng, list(late.encode()))))
    starts = [
        at for s in stop for at in range(len(text)) if text.startswith(s, at) and at + len(s) > len(early)
    ]
    assert released == text[: min(starts, default=len(text))]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_taken_from_the_text_itself(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(name)
    for _ in range(200):
        ids = random_ids(tokenizer, rng, rng.randrange(1, 25))
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        if not whole:
            continue
        stop = []
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(whole))
            stop.append(whole[at : at + rng.randrange(1, 8)])
        stream = detokenizer.stream(stop)
        assert "".join(run(stream, chunks(rng, ids))) == whole[: first_cut(whole, stop)], (ids, stop)
        assert stream.stopped
