"""Tokenizers from GGUF files, which give llama.cpp's ids; and byte-level ones of any vocabulary."""

import logging
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN_2

from kangaroo.models import prompts
from kangaroo.models.gguf_file import GGUFFile
from kangaroo.utils.errors import UnsupportedModel, explained

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
LLAMA_3 = {"llama3", "llama-v3", "llama-bpe"}  # whole tokens come before merges
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
GPT_2 = ByteLevel(add_prefix_space=False)

log = logging.getLogger(__name__)


def splits(pre: str) -> list[PreTokenizer] | None:
    """What splits a text before its tokens are merged, by the name in the file; None for an unknown
    name. (Transformers ignores the name smollm.)"""
    if pre == "smollm":
        return [Digits(individual_digits=True), GPT_2]
    if pre in ("qwen2", "deepseek-r1-qwen"):
        return [Split(Regex(QWEN_2), "isolated"), BYTES]
    if pre in LLAMA_3:
        return [Split(Regex(QWEN_2.replace(r"\p{N}|", r"\p{N}{1,3}|")), "isolated"), BYTES]
    return [GPT_2] if pre == "gpt-2" else None


def read_tokenizer(file: GGUFFile) -> prompts.Tokenizer:
    """The tokenizer that a file describes. Errors: `CorruptFile`, `UnsupportedModel`."""
    try:
        return _read(file)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise file.damage(f"its tokenizer cannot be read ({error!r})") from error


def _read(file: GGUFFile) -> prompts.Tokenizer:
    fields = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in file.fields.items()
        if name.startswith("tokenizer.ggml.")
    }
    pre = fields.get("pre", "default")
    splitting = splits(pre) if fields["model"] == "gpt2" else None
    if splitting is None:
        return _left_to_transformers(file, fields["model"], pre)
    tokens = fields["tokens"]
    kinds = fields["token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields.get("merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = byte_level_tokenizer(
        BPE(vocabulary, merges, ignore_merges=pre in LLAMA_3),
        splitting,
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL],
        chat_template=file.fields.get("tokenizer.chat_template"),
        model_max_length=file.field("context_length"),
        **{
            f"{name}_token": tokens[fields[f"{stored}_token_id"]]
            for name, stored in SPECIAL.items()
            if f"{stored}_token_id" in fields
        },
    )
    words = [
        token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.USER_DEFINED
    ]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    if fields.get("add_bos_token", pre in LLAMA_3):
        bos = str(tokenizer.bos_token)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def _left_to_transformers(file: GGUFFile, kind: str, pre: str) -> prompts.Tokenizer:
    if kind == "gpt2":
        log.warning(
            f"the tokenizer of '{file.path}' splits texts by '{pre}', which is not known here. "
            "Transformers reads it, and some texts may become other tokens than in llama.cpp."
        )
    problem = f"the tokenizer of '{file.path}' ({kind}) cannot be read"
    fix = "Pass model= another file, or the folder of the model that it was made from."
    # a malformed file can make transformers raise anything
    with explained(UnsupportedModel, problem, fix, (Exception,)):
        return AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)


def byte_level_tokenizer(
    bpe: BPE, splits: list[PreTokenizer], specials: list[str], **options: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer over GPT-2's characters for bytes, to which the last of `splits` maps bytes."""
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
