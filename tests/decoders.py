"""Small decoders for the tests: one per option, with weights that make their text vary."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_ext.nn import Decoder, DecoderConfig

VOCAB = 64

OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "interleaved rope": {"rope_interleaved": True},
    "grouped queries": {"num_key_value_heads": 2},
    "one key-value head": {"num_key_value_heads": 1, "qk_norm": True},
    "narrow values": {"value_dim": 5},
    "wide heads": {"head_dim": 12, "value_dim": 17, "num_key_value_heads": 2},
    "partial rope": {"rope_fraction": 0.5},
    "partial interleaved rope": {"rope_fraction": 0.5, "rope_interleaved": True, "value_dim": 3},
    "scaled rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0},
    "qk norm": {"qk_norm": True},
    "learned positions": {"position": "learned"},
    "no positions": {"position": "none"},
    "gelu": {"mlp": "gelu"},
    "layer norm": {"norm": "layer"},
    "untied with biases": {"tie_word_embeddings": False, "attention_bias": True},
    "windows": {"window_sizes": [(3, 0), None]},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"position": "alibi"},
    "everything": {
        "position": "alibi",
        "window_sizes": [(5, 2), (2, 0)],
        "softcap": 3.0,
        "sinks": True,
        "num_key_value_heads": 2,
        "value_dim": 5,
        "dropout": 0.3,
    },
    "like gpt-2": {
        "position": "learned",
        "norm": "layer",
        "mlp": "gelu",
        "attention_bias": True,
    },
}

ENCODERS: dict[str, dict[str, object]] = {
    "encoder": {},
    "encoder with everything": {
        "position": "alibi",
        "window_sizes": [(2, 3), (-1, 1)],
        "softcap": 3.0,
        "sinks": True,
        "num_key_value_heads": 2,
        "value_dim": 5,
        "dropout": 0.3,
    },
}
for _options in ENCODERS.values():
    _options["causal"] = False


def make_config(**options: object) -> DecoderConfig:
    """Two layers of four heads of eight, twenty-four positions."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
    }
    return DecoderConfig.from_dict({**sizes, **options})


def make_decoder(**options: object) -> Decoder:
    """A decoder in evaluation mode whose blocks outweigh the embedding of the newest token."""
    decoder = Decoder(make_config(**options)).eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.startswith("layers") and parameter.dim() > 1:
                parameter.normal_(std=0.3)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return decoder


def random_ids(batch: int, length: int) -> Tensor:
    """Tokens (batch, length)."""
    return torch.randint(VOCAB, (batch, length))


def pad(rows: list[Tensor], side: str, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Rows (length,) of unequal length as ids and attention_mask (batch, longest)."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), filler)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[index, place] = row
        mask[index, place] = True
    return ids, mask
