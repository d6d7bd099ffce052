"""What a request asks, before and after a tokenizer has seen it.

Owns the kinds of prompt and their way to token ids, to plain text and to chat messages, of an exact
number of tokens where the prompt fixes one. Knows no arrival and no server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perflab.errors import WorkloadError
from perflab.load.text import TEXT

WORDS = tuple(" " + word for word in TEXT.split())
FILLERS = (" a", ",", " of", "e", ".", " x", ";", "1")
"""What makes a text a little longer: for every tokenizer seen, one of them is one more token."""


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A prompt of exactly `tokens` tokens, cut from plain prose with any tokenizer.

    Its first `shared_tokens` are those of document number `document`, the same in every prompt
    that names it; the rest depends on `seed`.
    """

    tokens: int
    seed: int = 0
    document: int = 0
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shared_tokens <= self.tokens or self.tokens < 1:
            raise WorkloadError(f"a prompt of {self.tokens} tokens cannot share {self.shared_tokens} of them")

    @property
    def parts(self) -> tuple[tuple[str, int, int], ...]:
        """(kind, number, tokens) of each stretch; the same kind and number mean the same words."""
        own = self.tokens - self.shared_tokens
        both = ("document", self.document, self.shared_tokens), ("own", self.seed, own)
        return tuple(part for part in both if part[2])


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt made of numbered blocks, each (number, tokens): prompts that begin with the same blocks
    share exactly these, which is what a prefix cache sees of sessions and of traces with block ids."""

    blocks: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.blocks or any(tokens < 1 for _, tokens in self.blocks):
            raise WorkloadError(f"blocks={self.blocks}: one or more are needed, of 1 token or more")

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return sum(tokens for _, tokens in self.blocks)

    @property
    def parts(self) -> tuple[tuple[str, int, int], ...]:
        """As `Synthetic.parts`."""
        return tuple(("block", number, tokens) for number, tokens in self.blocks)


@dataclass(frozen=True, slots=True)
class Chat:
    """A user message with an optional system message and earlier (user, assistant) exchanges, sent
    through the model's chat template."""

    user: str
    system: str | None = None
    history: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation in OpenAI's form."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, assistant in self.history:
            found += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return [*found, {"role": "user", "content": self.user}]


Prompt = str | tuple[int, ...] | Synthetic | Blocks | Chat


class PromptEncoder:
    """Turns prompts into token ids, text or messages with one model's tokenizer.

    `encode` and `chat` are those of `LoadedModel`. A `salt` (a few characters, new in every run) is put
    before the first word of the prompt, inside its exact length, so that no prefix cache knows it
    from an earlier run. Prompts that are token ids already take none. Keeps what it made of documents
    and blocks.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], chat: Callable[[Any], list[int]] | None = None
    ) -> None:
        self._encode, self._chat = encode, chat
        self._pool: list[int] | None = None
        self._start: list[int] = []
        self._per_word = 0.0  # tokens, on average
        self._made: dict[tuple[str, int, int, str], str] = {}

    def count(self, prompt: Prompt) -> int:
        """How many tokens a prompt is, as the model's own server would count it."""
        return len(self.ids(prompt))

    def ids(self, prompt: Prompt, salt: str = "") -> list[int]:
        """Token ids of a prompt; exactly as many as asked where the length is fixed."""
        if isinstance(prompt, str):
            return self._encode(salted(prompt, salt))
        if isinstance(prompt, Chat):
            return self._chat_ids(self.chat(prompt, salt))
        if isinstance(prompt, Synthetic | Blocks):
            return self._cut_parts(prompt, salt)
        return list(prompt)

    def text(self, prompt: Prompt, salt: str = "") -> str | tuple[int, ...]:
        """A prompt for a completion API: text that encodes to exactly as many tokens as asked where the
        length is fixed; token ids stay what they are.

        Raises WorkloadError where the tokenizer has no text of that many tokens.
        """
        if isinstance(prompt, Synthetic | Blocks):
            return self._written(prompt, salt, lambda text: len(self._encode(text)))
        if isinstance(prompt, Chat):
            return salted("\n".join(m["content"] for m in prompt.messages), salt)
        return salted(prompt, salt) if isinstance(prompt, str) else prompt

    def chat(self, prompt: Prompt, salt: str = "") -> Chat:
        """A prompt for a chat API. Where the length is fixed, the conversation has exactly that many
        tokens once it went through the chat template.

        Raises WorkloadError for token ids, and for a length that the template alone exceeds.
        """
        if isinstance(prompt, Chat):
            if prompt.system is not None:
                return Chat(prompt.user, salted(prompt.system, salt), prompt.history)
            if prompt.history:
                (user, assistant), *rest = prompt.history
                return Chat(prompt.user, None, ((salted(user, salt), assistant), *rest))
            return Chat(salted(prompt.user, salt))
        if isinstance(prompt, str):
            return Chat(salted(prompt, salt))
        if isinstance(prompt, tuple):
            raise WorkloadError(
                "a prompt of token ids cannot be a chat message: use the completions endpoint"
            )
        return Chat(self._written(prompt, salt, lambda text: len(self._chat_ids(Chat(text)))))

    def _chat_ids(self, chat: Chat) -> list[int]:
        if self._chat is None:
            return self._encode("\n".join(m["content"] for m in chat.messages))
        return self._chat(chat.messages)

    def _cut_parts(self, prompt: Synthetic | Blocks, salt: str) -> list[int]:
        if self._pool is None:
            self._start = self._encode("")  # a BOS, where the tokenizer adds one
            self._pool = self._encode(TEXT)[len(self._start) :]
        pool, size = self._pool, len(self._pool)
        ids = self._start + (self._bare(salt + " ") if salt else [])
        for kind, number, tokens in prompt.parts:
            offset = number * 613 + 331 if kind == "own" else number * 977
            name = self._bare(f"{number} ")[:tokens] if kind == "block" else []
            ids += name + [pool[(offset + i) % size] for i in range(tokens - len(name))]
        return ids[: prompt.tokens]

    def _bare(self, text: str) -> list[int]:
        return self._encode(text)[len(self._start) :]

    def _written(self, prompt: Synthetic | Blocks, salt: str, count: Callable[[str], int]) -> str:
        """Text of the parts in order; the last one makes the whole exact."""
        bare = len(self._encode(""))
        *before, (kind, number, _) = prompt.parts
        text, lead = "", f"{salt} " if salt else ""
        for part in before:
            key = (*part, lead)
            if key not in self._made:
                self._made[key] = self._exact(lead, *part, lambda text: len(self._encode(text)) - bare)
            text, lead = text + self._made[key], " "
        return self._exact(text + lead, kind, number, prompt.tokens, count)

    def _exact(self, lead: str, kind: str, number: int, tokens: int, count: Callable[[str], int]) -> str:
        """`lead`, the part's name and words after it: `tokens` in all."""
        if not self._per_word:
            self._per_word = len(self._bare("".join(WORDS))) / len(WORDS)
        at = number * (613 if kind == "own" else 977)
        text, ends = f"{lead}{kind[0]}{number}:", []
        while (missing := tokens - count(text)) > 0:
            for _ in range(max(1, int(0.95 * missing / self._per_word))):
                ends.append(len(text))
                text += WORDS[at % len(WORDS)]
                at += 1
        while ends and count(text) > tokens:
            text = text[: ends.pop()]
        return _mended(text, tokens, count)


def salted(text: str, salt: str) -> str:
    """A text that differs from its first word on."""
    return f"{salt} {text}" if salt else text


def _mended(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """`text` with small pieces added, or its end cut off, to exactly `tokens`.

    What a piece adds depends on what stands before it (two may merge into one token), so each is
    tried, beginning with another one every time.
    """
    for attempt in range(4 * tokens + 64):
        have = count(text)
        if have == tokens:
            return text
        pieces = FILLERS[attempt % len(FILLERS) :] + FILLERS[: attempt % len(FILLERS)]
        fit = (text + piece for piece in pieces if have < count(text + piece) <= tokens)
        text = text[:-1] if have > tokens else next(fit, text[:-1])
    raise WorkloadError(f"no text of exactly {tokens} tokens can be made with this tokenizer: ask for more")
