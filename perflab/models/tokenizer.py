"""A tokenizer over the `tokenizers` library alone: text to ids and back, and chats.

Owns the special tokens by their roles and how a chat template is rendered. Does as transformers'
`PreTrainedTokenizerFast` does, without the second that importing that takes. Does not know where
vocabulary and template came from.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer


class FastTokenizer:
    """`backend_tokenizer` with names for its special tokens, such as `{"eos_token": "</s>"}`.

    Tokens so named become special where the backend does not have them among its added tokens yet.
    """

    clean_up_tokenization_spaces = False

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        model_max_length: int = 10**30,
    ) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special_tokens)
        self.chat_template = chat_template
        self.model_max_length = model_max_length
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        missing = [token for token in dict.fromkeys(special_tokens.values()) if token not in added]
        backend.add_tokens([AddedToken(token, special=True) for token in missing])
        ids = {role: backend.token_to_id(token) for role, token in special_tokens.items()}
        self.bos_token_id: int | None = ids.get("bos_token")
        self.eos_token_id: int | None = ids.get("eos_token")
        self.unk_token_id: int | None = ids.get("unk_token")
        self.pad_token_id: int | None = ids.get("pad_token")

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the named special tokens, without repeats."""
        tokens = dict.fromkeys(self.special_tokens_map.values())
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, token: str) -> Any:
        """The id of `token`, that of the unknown token (None without one) where it has none."""
        found = self.backend_tokenizer.token_to_id(token)
        return self.unk_token_id if found is None else found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; incomplete characters become U+FFFD, ids without a meaning vanish."""
        ids = [ids] if isinstance(ids, int) else list(ids)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """A conversation as text, as token ids, or as a dict of `input_ids` and `attention_mask`.

        `variables` go into the template (`tools`, `documents`, switches of its own).
        Raises ValueError without a template or messages, jinja2's TemplateError where the template
        refuses the conversation.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template: set chat_template, or encode plain text")
        if not conversation:
            raise ValueError("an empty conversation has no prompt: give at least one message")
        text = _compiled(self.chat_template).render(
            messages=[{k: v for k, v in message.items() if v is not None} for message in conversation],
            add_generation_prompt=add_generation_prompt,
            **{"tools": None, "documents": None, **self.special_tokens_map, **variables},
        )
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the files that transformers' `AutoTokenizer` reads."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(folder / "tokenizer.json"))
        facts = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.model_max_length,
            **self.special_tokens_map,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """The template in the sandbox that transformers gives it, with the same filters and globals.

    Templates are a stranger's text: mutation, attributes with a leading underscore, `dict`'s class
    and underscored entries of namespaces are out of their reach.
    """
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}` marks the assistant's words; it renders them."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's protocol)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args: Any, **kwargs: Any) -> None:
            for name in dict(*args[1:], **kwargs):
                _refuse_private(name)
            jinja2.utils.Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    class Dict:
        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def _refuse_private(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r} in a namespace")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment.from_string(template)
