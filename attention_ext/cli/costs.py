"""What a decoder costs by its sizes: arithmetic of training, memory of writing."""

from __future__ import annotations

import math

import torch

from attention_ext.nn import Decoder, DecoderConfig


def flops_per_token(decoder: Decoder) -> int:
    """Multiplications and additions of forward and backward for one token of a full context.

    6 for each weight of a product (the embedding counts as the output's product), and 6 for each
    visible pair of positions and component of queries and values.
    """
    config = decoder.config
    heads = config.heads
    weights = sum(p.numel() for p in decoder.parameters() if p.dim() >= 2)
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    pairs = sum(visible_keys(config, layer) for layer in range(config.num_hidden_layers))
    products = pairs * heads.num_heads * (heads.head_dim + heads.value_dim)
    return 6 * (weights + math.ceil(products))


def visible_keys(config: DecoderConfig, layer: int) -> float:
    """How many keys a query of a full context sees in a layer, on average.

    Example:
        >>> windows = ((1, 0), None)
        >>> config = DecoderConfig(9, 8, 2, 2, max_position_embeddings=4, window_sizes=windows)
        >>> visible_keys(config, 0), visible_keys(config, 1)
        (1.75, 2.5)
    """
    context, most = config.max_position_embeddings, _most_visible_keys(config, layer)
    return (most * (most + 1) / 2 + (context - most) * most) / context  # the first ones see fewer


def kv_bytes_per_token(config: DecoderConfig) -> int:
    """What the cache of a float32 decoder keeps of each position, in bytes."""
    return config.num_hidden_layers * _kv_numbers_per_layer(config) * torch.float32.itemsize


def kv_bytes_per_step(config: DecoderConfig) -> int:
    """What writing a token reads of that cache when the context is full: windows shorten it."""
    return _kv_numbers_per_step(config, config.max_position_embeddings) * torch.float32.itemsize


def bytes_per_step(decoder: Decoder, length: int) -> int:
    """What writing a token must read: the weights of all products, and the cache.

    Args:
        decoder: the model; of an embedding that is not the output's product it reads one row.
        length: positions in use, the token's own too.
    """
    config = decoder.config
    weights = sum(parameter.nbytes for parameter in decoder.parameters())
    if not config.tie_word_embeddings:
        weights -= decoder.embed_tokens.weight.nbytes
    if decoder.embed_positions is not None:
        weights -= decoder.embed_positions.weight.nbytes
    return weights + _kv_numbers_per_step(config, length) * decoder.dtype.itemsize


def _kv_numbers_per_step(config: DecoderConfig, length: int) -> int:
    layers = range(config.num_hidden_layers)
    keys = sum(min(length, _most_visible_keys(config, layer)) for layer in layers)
    return keys * _kv_numbers_per_layer(config)


def _most_visible_keys(config: DecoderConfig, layer: int) -> int:
    context, (left, _) = config.max_position_embeddings, config.window(layer)
    return context if left < 0 else min(context, left + 1)


def _kv_numbers_per_layer(config: DecoderConfig) -> int:
    heads = config.heads
    return heads.num_kv_heads * (heads.head_dim + heads.value_dim)
