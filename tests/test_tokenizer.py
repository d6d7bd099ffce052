"""The tokenizer of GGUF files equals transformers' own, built of the same parts, in every answer."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from perflab.engine.detokenizer import Detokenizer
from perflab.models.gguf_model import _byte_level
from perflab.models.loaded import LoadedModel
from perflab.models.tokenizer import FastTokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!  Two spaces,\ttab and\r\nlines\n\n\n",
    "In 2024, 3.14159 × 10**23 ≈ ٣٤٥ (Arabic digits) and ½",
    "naïve café e\u0301 ZWJ 👩‍👩‍👧 你好，世界 שלום नमस्ते",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # they'll, DON'T, it's\n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "< |im_start|> <|im_start|x <tool> </tool>tool",
    "\x00\x7f\ufeff\ufffd\u2028",
    "a" * 300,
]


def parts(**meta: Any) -> dict[str, Any]:
    """A small byte-level vocabulary as GGUF metadata: control, user-defined and ordinary tokens."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = ["t h", "th e", "Ġ the", "i n", "Ġ Ġ", "1 2", "Ã ©", "l l", "h e", "he ll", "hell o"]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<tool>", "</tool>", "<pad>"]
    kinds = [3] * 3 + [1] * (len(tokens) - 6) + [4, 4, 1]
    return {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": len(tokens) - 1,  # named, and not a control token
        **meta,
    }


def theirs(tokenizer: FastTokenizer) -> PreTrainedTokenizerFast:
    same = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=tokenizer.model_max_length,
        **tokenizer.special_tokens_map,
    )
    same.chat_template = tokenizer.chat_template
    return same


def small(digits_apart: bool = True, **meta: Any) -> tuple[FastTokenizer, PreTrainedTokenizerFast]:
    """Ours, and transformers' over a backend in which the named tokens were not made special yet."""
    ours = _byte_level(parts(**meta), digits_apart)
    untouched = _byte_level(
        {k: v for k, v in parts(**meta).items() if not k.endswith("padding_token_id")}, digits_apart
    )
    untouched.special_tokens_map = ours.special_tokens_map
    return ours, theirs(untouched)


PAIRS = {
    "digits apart": small(),
    "digits together": small(digits_apart=False),
    "adds a BOS": small(**{"tokenizer.ggml.add_bos_token": True}),
}


def same_on(ours: FastTokenizer, reference: PreTrainedTokenizerFast, text: str) -> None:
    for add in (True, False):
        assert ours.encode(text, add_special_tokens=add) == reference.encode(text, add_special_tokens=add)
    ids = ours.encode(text)
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == expected
        stream = Detokenizer(ours).stream((), skip)
        assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == expected


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_and_ids_are_the_same(name: str, text: str) -> None:
    same_on(*PAIRS[name], text)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(PAIRS)), text=st.text(max_size=60))
def test_any_text(name: str, text: str) -> None:
    same_on(*PAIRS[name], text)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 400), max_size=30), skip=st.booleans())
def test_any_ids_even_those_without_a_token(ids: list[int], skip: bool) -> None:
    ours, reference = PAIRS["digits apart"]
    assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", PAIRS)
def test_special_tokens_and_vocabulary_are_the_same(name: str) -> None:
    ours, reference = PAIRS[name]
    for role in ("bos", "eos", "unk", "pad"):
        assert getattr(ours, f"{role}_token_id") == getattr(reference, f"{role}_token_id")
    assert sorted(ours.all_special_ids) == sorted(reference.all_special_ids)
    assert ours.special_tokens_map == reference.special_tokens_map
    assert len(ours) == len(reference)
    assert ours.get_vocab() == reference.get_vocab()
    for token in ("<tool>", "<pad>", "the", "no such token"):
        assert ours.convert_tokens_to_ids(token) == reference.convert_tokens_to_ids(token)
    assert ours.decode(5) == reference.decode(5)


def test_without_named_tokens_there_are_no_ids() -> None:
    bare = {k: v for k, v in parts().items() if not k.endswith("_token_id")}
    ours = _byte_level(bare, digits_apart=True)
    reference = theirs(ours)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (None, None, None)
    assert ours.all_special_ids == reference.all_special_ids == []
    assert ours.convert_tokens_to_ids("no such token") is None
    same_on(ours, reference, TEXTS[6])


def test_the_embedded_tokenizer_is_theirs(embedded: LoadedModel) -> None:
    ours = embedded.tokenizer
    assert isinstance(ours, FastTokenizer)
    reference = theirs(ours)
    for text in TEXTS:
        same_on(ours, reference, text)
    chat = [{"role": "user", "content": "Hi 42"}, {"role": "assistant", "content": "é\n"}]
    for ask in (True, False):
        expected: Any = reference.apply_chat_template(chat, add_generation_prompt=ask)
        assert ours.apply_chat_template(chat, add_generation_prompt=ask) == dict(expected)


TEMPLATES = {
    "blocks and whitespace": "{% for m in messages %}\n  {% if loop.first %}\n{{ bos_token }}\n"
    "  {% endif %}\n{{- m['role'] ~ ': ' ~ m.content | trim }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}A:{% endif %}",
    "json": "{{ messages | tojson(indent=2) }}{{ {'a': '<é&>'} | tojson }}{{ tools | tojson }}"
    "{{ documents }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.role }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, x={'k': 1}) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ ns.x.k }}{{ dict(a=1) | tojson }}{{ dict.fromkeys(['b'], 2) | tojson }}",
    "generation": "{% for m in messages %}{{ m.role }}{% generation %}{% set t = m.content %}{{ t }}\n"
    "{% endgeneration %}{{ t is defined }}{% endfor %}",
    "variables": "{{ enable_thinking }}{{ eos_token }}{% if pad_token is defined %}{{ pad_token }}{% endif %}"
    "{{ 'x' if messages[0].tool_calls is defined else 'none' }}{{ undefined_thing }}",
    "date": "{{ strftime_now('%Y') }}{{ messages | map(attribute='role') | join(',') }}",
}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "  Hi <b>é</b> ", "tool_calls": None},
    {"role": "assistant", "content": "Yes <|im_end|> 12"},
]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("ask", [True, False])
def test_chat_templates_render_the_same(template: str, ask: bool) -> None:
    ours: Any
    reference: Any
    ours, reference = (copy.copy(tokenizer) for tokenizer in PAIRS["adds a BOS"])
    ours.chat_template = reference.chat_template = template
    options: dict[str, Any] = {"add_generation_prompt": ask, "enable_thinking": False}
    expected = reference.apply_chat_template(CHAT, tokenize=False, **options)
    assert ours.apply_chat_template(CHAT, tokenize=False, **options) == expected
    ids = reference.apply_chat_template(CHAT, return_dict=False, **options)
    assert ours.apply_chat_template(CHAT, return_dict=False, **options) == ids
    assert ours.apply_chat_template(CHAT, **options) == dict(reference.apply_chat_template(CHAT, **options))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", r"roles must alternate"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", r"__init__"),
        ("{% set ns = namespace(_a=1) %}", r"_a"),
        ("{{ messages.append(1) }}", r"append|unsafe"),
        ("{{ ''.__class__.__mro__ }}", r"unsafe|undefined|__class__"),
    ],
)
def test_templates_that_refuse_or_must_be_refused(template: str, message: str) -> None:
    for pair_member in PAIRS["digits apart"]:
        tokenizer: Any = copy.copy(pair_member)
        tokenizer.chat_template = template
        with pytest.raises(jinja2.TemplateError, match=message):
            tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_no_template_and_no_messages_are_named() -> None:
    ours = copy.copy(PAIRS["digits apart"][0])
    with pytest.raises(ValueError, match=r"no chat template: set chat_template"):
        ours.apply_chat_template(CHAT)
    ours.chat_template = "x"
    with pytest.raises(ValueError, match=r"at least one message"):
        ours.apply_chat_template([])


def test_what_is_saved_is_read_by_transformers(tmp_path: Path) -> None:
    ours = copy.copy(PAIRS["adds a BOS"][0])
    ours.chat_template = TEMPLATES["json"]
    ours.save_pretrained(tmp_path / "t")
    again = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert again.chat_template == ours.chat_template
    assert again.special_tokens_map == ours.special_tokens_map
    assert again.model_max_length == 512
    for text in TEXTS:
        assert again.encode(text) == ours.encode(text)
        assert again.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def test_it_can_be_sent_to_another_process() -> None:
    ours = PAIRS["digits apart"][0]
    assert pickle.loads(pickle.dumps(ours)).encode(TEXTS[4]) == ours.encode(TEXTS[4])


def test_it_needs_neither_transformers_nor_torch() -> None:
    script = """
import json, sys
from tokenizers import Tokenizer, models
from perflab.models.tokenizer import FastTokenizer
t = FastTokenizer(Tokenizer(models.BPE({"a": 0}, [])), {"eos_token": "<e>"}, "{{ messages[0].content }}")
ids = t.apply_chat_template([{"role": "user", "content": "a<e>"}], return_dict=False)
print(json.dumps([ids, [m for m in ("torch", "transformers") if m in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[0, 1], []]
