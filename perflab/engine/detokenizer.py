"""Text out of tokens, piece by piece, and where a stop string cuts it.

Owns the state of one stream of text: bytes of an unfinished character, and text held back because
it may be the beginning of a stop string. All pieces together equal decoding every token at once.
Knows nothing of requests, end tokens or steps: the engine says when a stop string counts.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"  # what decoders put where bytes are not (or not yet) a character
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class _Decoder(Protocol):
    """Tokens to text; what may still change waits for more tokens or for the end."""

    def push(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Detokenizer:
    """What one tokenizer's streams share. It needs `decode(ids, skip_special_tokens=...)` and no more.

    Byte-level BPE vocabularies (GPT-2, Llama 3, Qwen, SmolLM, …) are read token by token through a
    table that fills as tokens are seen; any other tokenizer is asked to decode a short window again.
    None gives streams without text, for a model that has no tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cleans = _cleans_up(tokenizer)
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # of Hugging Face fast tokenizers
        steps = _decoding_steps(backend)
        self._special = _special_ids(backend)
        self._table = _ByteTable(backend.id_to_token) if steps == ["ByteLevel"] else None
        self._byte_tokens = _byte_token_ids(backend) if "ByteFallback" in steps else frozenset()

    def stream(self, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> TextStream:
        """A new stream. Raises ValueError for stop strings without a tokenizer to find them by."""
        skipped = self._special if skip_special_tokens else frozenset()
        decoder: _Decoder
        if self._tokenizer is None:
            if stop:
                raise ValueError(f"stop={tuple(stop)!r}: the model has no tokenizer; use stop_token_ids")
            decoder = _NoText()
        elif self._table is not None:
            decoder = _ByteLevelDecoder(self._table, skipped)
        else:
            options = {"skip_special_tokens": skip_special_tokens}
            if self._cleans:
                options["clean_up_tokenization_spaces"] = False
            decode = partial(self._tokenizer.decode, **options)
            decoder = _WindowDecoder(decode, self._byte_tokens, skipped)
        if self._cleans:
            decoder = _CleaningDecoder(decoder, self._tokenizer.clean_up_tokenization)
        return TextStream(decoder, tuple(stop))

    def token_bytes(self, token_id: int) -> bytes:
        """One token by itself, a special one too; where only text can be had of it, that text."""
        if self._tokenizer is None:
            return b""
        if self._table is not None:
            return self._table[token_id]
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class TextStream:
    """The text of one request, cut just before the earliest stop string.

    The earliest is the one that begins first. Only the longest suffix that a stop string could
    still begin with is held back. While such a suffix began before a stop string that is already
    complete ("abc" with the stops "bc" and "abcd"), the stream waits for it to be decided, so that
    the text does not depend on how tokens were grouped into pushes.
    """

    def __init__(self, decoder: _Decoder, stop: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        self._stop = stop
        self._prefixes = frozenset(s[:k] for s in stop for k in range(1, len(s)))
        self._prefix_ends = frozenset(prefix[-1] for prefix in self._prefixes)
        self._longest_prefix = max((len(s) for s in stop), default=1) - 1
        self._held = ""
        self._exempt = 0  # leading characters of `_held` at which no match may end
        self.stopped = False  # a stop string matched; everything later is ignored
        self.num_tokens = 0  # pushed so far; once stopped, up to the one that decided it

    def push(self, token_ids: Sequence[int], match: bool = True) -> str:
        """Take tokens and return the text that may be released now.

        With `match=False` (before `min_tokens`) a stop string that ends in this push is ordinary
        text. One that only begins in it still counts.
        """
        if not self._stop:
            self.num_tokens += len(token_ids)
            return self._decoder.push(token_ids)
        released = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            text = self._decoder.push((token_id,))
            if text:
                released += self._release(text, match)
        return released

    def finish(self) -> str:
        """End the stream: the held text, cut if a stop string is in it (then `stopped` is set)."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.finish()
        cut = self._first_match(text)
        self._held = ""
        self.stopped = cut is not None
        return text[:cut]

    def _release(self, text: str, match: bool) -> str:
        text = self._held + text
        if not match:
            self._exempt = len(text)
        live = self._live_from(text)
        cut = self._first_match(text)
        if cut is not None and cut <= live:
            self.stopped = True
            self._held = ""
            return text[:cut]
        self._held = text[live:]
        self._exempt = max(0, self._exempt - live)
        return text[:live]

    def _first_match(self, text: str) -> int | None:
        """Where the stop string that begins first begins, among those that end after the exempt part."""
        first: int | None = None
        for stop in self._stop:
            at = text.find(stop, max(0, self._exempt - len(stop) + 1))
            if at >= 0 and (first is None or at < first):
                first = at
        return first

    def _live_from(self, text: str) -> int:
        """Where the longest suffix begins that some stop string could continue; len(text): nowhere."""
        if text[-1] in self._prefix_ends:
            for k in range(min(self._longest_prefix, len(text)), 0, -1):
                if text[-k:] in self._prefixes:
                    return len(text) - k
        return len(text)


class _NoText:
    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _ByteTable(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, filled on first use."""

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._token_of = token_of
        # GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and following.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(0x100 + i): byte for i, byte in enumerate(others)}

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        try:
            self[token_id] = bytes([self._byte_of[character] for character in token])
        except KeyError:  # an added token is text as it stands
            self[token_id] = token.encode()
        return self[token_id]


class _ByteLevelDecoder:
    def __init__(self, table: _ByteTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table, skipped = self._table, self._skipped
        return self._utf8.decode(b"".join([table[i] for i in token_ids if i not in skipped]))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowDecoder:
    """Any tokenizer: decodes the tokens last released with the new ones, and takes the difference.

    The tokens last released are there because a tokenizer may treat the first token differently
    (sentencepiece drops its leading space); they always include one with visible text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], byte_tokens: frozenset[int], skipped: frozenset[int]
    ) -> None:
        self._decode = decode
        self._byte_tokens = byte_tokens
        self._skipped = skipped
        self._in_bytes = False  # the last token that was not skipped is a byte token
        self._window: list[int] = []
        self._num_released = 0  # leading tokens of the window whose text is out
        self._released_text = ""  # that text, as the window decodes it

    def push(self, token_ids: Sequence[int]) -> str:
        self._window += token_ids
        if self._byte_tokens:
            for token_id in token_ids:
                if token_id not in self._skipped:
                    self._in_bytes = token_id in self._byte_tokens
            if self._in_bytes:
                return ""  # a run of bytes is read as a whole: one bad byte would spoil good neighbours
        text = self._decode(self._window)
        if len(text) <= len(self._released_text) or text.endswith(_REPLACEMENT):
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._decode(self._window)) if self._window else ""

    def _take(self, text: str) -> str:
        new = text[len(self._released_text) :]
        del self._window[: self._num_released]
        self._num_released = len(self._window)
        self._released_text = self._decode(self._window)
        return new


class _CleaningDecoder:
    """Applies a tokenizer's `clean_up_tokenization`, which removes spaces before some punctuation.

    Each of its patterns is a space and at most three characters, and removes only spaces. So text
    may be cut after three characters that are not spaces, and both sides cleaned by themselves.
    """

    def __init__(self, decoder: _Decoder, clean: Callable[[str], str]) -> None:
        self._decoder = decoder
        self._clean = clean
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        text = self._held + self._decoder.push(token_ids)
        cut = len(text)
        while cut > 0 and (cut < 3 or " " in text[cut - 3 : cut]):
            cut -= 1
        self._held = text[cut:]
        return self._clean(text[:cut])

    def finish(self) -> str:
        text, self._held = self._held + self._decoder.finish(), ""
        return self._clean(text)


def _cleans_up(tokenizer: Any) -> bool:
    """Whether `decode` removes spaces before punctuation; transformers 5 leaves BPE text alone."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return backend is None or type(backend.model).__name__ != "BPE" or getattr(tokenizer, forced, False)


def _decoding_steps(backend: Any) -> list[str]:
    """Names of what a `tokenizers` decoder does, in order; empty without one."""
    if backend is None or backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


def _special_ids(backend: Any) -> frozenset[int]:
    """Tokens that `skip_special_tokens` skips."""
    if backend is None:
        return frozenset()
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def _byte_token_ids(backend: Any) -> frozenset[int]:
    """Tokens like <0x0A>, by which sentencepiece vocabularies spell what they have no token for."""
    return frozenset(i for token, i in backend.get_vocab().items() if _BYTE_TOKEN.fullmatch(token))
