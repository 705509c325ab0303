"""Tokenising for the small real target: the byte-level BPE of its GGUF, by the package `tokenizers`."""

from __future__ import annotations

from dflashcpp.gguf_file import Header

_CONTROL = 3  # llama.cpp's token type of `<|im_start|>` and the like


class Bpe:
    """Encodes text whose special tokens are spelled out, as llama-server does with a rendered template."""

    def __init__(self, header: Header) -> None:
        from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

        texts = header.get("tokenizer.ggml.tokens")
        kinds = header.get("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ", 1)) for merge in header.get("tokenizer.ggml.merges")]
        self._tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
        digits = pre_tokenizers.Digits(individual_digits=True)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        special = [text for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL]
        self._tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def chat(self, request: str) -> list[int]:
        """One user turn in SmolLM2's template, up to where the assistant begins."""
        return self.encode(
            "<|im_start|>system\n"
            "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
        )
