"""A byte-level tokenizer of exactly 512 entries, written out by rule so that it needs no training text."""

from __future__ import annotations

import itertools
import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BEGIN, END, TURN = SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|turn|>")
VOCABULARY = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

SPACE = "\u0120"  # how byte-level tokenizers write a blank


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """4 special tokens, the 256 bytes and 252 pairs (syllables, and letters after a blank); any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges()
    entries = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        extra_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def _merges() -> list[tuple[str, str]]:
    vowels = "aeiou"
    consonants = [letter for letter in string.ascii_lowercase if letter not in f"{vowels}w"]
    syllables = itertools.chain(itertools.product(consonants, vowels), itertools.product(vowels, consonants))
    return [*syllables, *itertools.product(SPACE, string.ascii_letters)]
