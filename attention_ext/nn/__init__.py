"""Decoder modules built on `attention_ext.scaled_dot_product_attention`.

`Decoder` learns and writes text, `DecoderConfig` describes it, `KVCache` and `PagedKVCache` hold
past keys and values, the tokenizers turn text into ids and back. Saving needs safetensors,
byte-pair encoding needs tokenizers: ``pip install attention_ext[decoder]``.
"""

from .config import DecoderConfig
from .decoder import Decoder
from .kv_cache import KVCache
from .paged_kv_cache import PagedKVCache
from .sampling import filter_logits, sample_next
from .streaming import StreamDecoder, TextStream, stream_decoder
from .tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "BpeTokenizer",
    "ByteTokenizer",
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "PagedKVCache",
    "StreamDecoder",
    "TextStream",
    "Tokenizer",
    "filter_logits",
    "load_tokenizer",
    "sample_next",
    "stream_decoder",
]
