"""A decoder-only Transformer on the package's attention operator.

    x = embedding[ids] (+ learned positions)
    for each block:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = norm(x) @ vocabulary^T

Everything is causal: the logits at a position depend on the tokens up to it.
"""

from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_ext.errors import ArgumentError

from . import checkpoint
from . import generate as generation
from .attention import Attention, AttentionCall
from .config import DecoderConfig
from .inputs import IGNORED_TARGET, check_ids, check_inputs, outside_vocabulary
from .kv_cache import KVCache
from .mlp import make_mlp
from .norm import make_norm
from .rotary import RotaryEmbedding


class Block(nn.Module):
    """Attention, then feed-forward, each behind a normalisation and around a residual.

    Args:
        config: the decoder's configuration.
        layer: index of the block.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, x: Tensor, call: AttentionCall) -> Tensor:
        """Update the residual stream x (batch, L, hidden)."""
        x = x + self.attention(self.attention_norm(x), call)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Decoder(nn.Module):
    """A causal language model.

    Weights start normal with standard deviation ``sqrt(0.4 / hidden_size)``, as in GPT-2 smaller by
    ``sqrt(2 * num_hidden_layers)`` in the two projections of each block that write to the residual
    stream; biases 0, normalisation weights 1. (GPT-2's own 0.02 suits its width of 768. At width
    128, on Python's documentation, 0.05 gave 2.44 bits per byte after 110 steps and 2.04 after 400
    where 0.02 gave 2.63 and 2.07; 2026-11.) With tied embeddings there is one vocabulary matrix,
    not two names.

    Args:
        config: sizes and options.

    Example:
        >>> config = DecoderConfig(256, 32, num_hidden_layers=2, num_attention_heads=4)
        >>> decoder = Decoder(config)
        >>> ids = torch.tensor([[77, 97, 121, 97]])
        >>> decoder(ids).shape
        torch.Size([1, 4, 256])
        >>> decoder.loss(ids[:, :-1], ids[:, 1:]).backward()
        >>> decoder.generate(ids, 3).shape
        torch.Size([1, 7])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size)
            if config.position == "learned"
            else None
        )
        self.rotary = RotaryEmbedding(config) if config.position == "rope" else None
        self.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights from torch's generator."""
        std = math.sqrt(0.4 / self.config.hidden_size)
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=residual_std)
            else:
                nn.init.normal_(parameter, std=std)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.embed_tokens.weight.dtype

    def num_parameters(self) -> int:
        """How many numbers are trained; tied weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self, ids: Tensor, *, cache: KVCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Logits of the token after each position.

        Args:
            ids: tokens (batch, L), int64 or int32.
            cache: past keys and values. The call's tokens follow them, are appended, and nothing
                is recorded for gradients. Any split of a text into calls gives the same logits up
                to rounding.
            attention_mask: (batch, L) bool, True = a real token, for this call's ids. Padding,
                left or right, is neither seen nor cached nor counted in positions; its own logits
                are finite and mean nothing.

        Returns:
            Logits (batch, L, vocab_size) in the model's dtype.

        Raises:
            ArgumentError: wrong shapes, ids outside the vocabulary (on the CPU), more positions
                than ``max_position_embeddings``, or a cache of another configuration, batch size,
                dtype or device, or without room; nothing has been written to it then.
            ArgumentTypeError: ids that are not integers, a mask that is not bool.
        """
        hidden = self.hidden_states(ids, cache=cache, attention_mask=attention_mask)
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            return self.project(hidden)

    def hidden_states(
        self, ids: Tensor, *, cache: KVCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """What `forward` computes before the vocabulary projection, (batch, L, hidden)."""
        check_inputs(ids, attention_mask)
        if attention_mask is not None:
            ids = ids.masked_fill(~attention_mask, 0)  # padding may be any number
        if cache is None:
            return self._run(ids, *self._plan(ids, attention_mask))
        with torch.no_grad():
            positions, call = self._plan_cached(ids, cache, attention_mask)
            x = self._run(ids, positions, call)
            if call.write is not None:
                cache.advance(call.write)
            return x

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocab_size) of hidden states (..., hidden)."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, weight)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean next-token cross-entropy in nats.

        Args:
            ids: tokens (batch, L).
            targets: (batch, L) int64: ``targets[:, t]`` is the token after ``ids[:, t]``; -100 is
                ignored.

        Returns:
            A scalar, float32 at least; 0 if every target is ignored.

        Raises:
            ArgumentError: as `forward`, and targets of another shape or outside the vocabulary.
        """
        check_ids("ids", ids)
        check_ids("targets", targets)
        if targets.shape != ids.shape:
            raise ArgumentError(
                f"Decoder.loss: expected targets in the shape of ids, got {tuple(targets.shape)} "
                f"and {tuple(ids.shape)}"
            )
        logits = self(ids).flatten(0, 1)  # (batch * L, vocab)
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        flat = targets.flatten().long()
        try:
            total = F.cross_entropy(logits, flat, ignore_index=IGNORED_TARGET, reduction="sum")
        except IndexError:
            raise outside_vocabulary("targets", targets, self.config.vocab_size) from None
        return total / (flat != IGNORED_TARGET).sum().clamp_min(1)

    generate = generation.generate
    save_pretrained = checkpoint.save_pretrained

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Decoder:
        """Read what `save_pretrained` wrote.

        Args:
            folder: holds ``config.json`` and ``model.safetensors``.
            device: where the weights go; default: torch's default device.
            dtype: of the weights; default: as stored.

        Returns:
            The decoder, in evaluation mode.

        Raises:
            ArgumentError: a missing or unreadable file, or weights that do not fit the
                configuration.
        """
        config, weights = checkpoint.read_pretrained(folder)
        with torch.device("meta"):
            decoder = cls(config)
        checkpoint.check_weights(decoder, weights, folder)
        stored = dtype or next(iter(weights.values())).dtype
        decoder = decoder.to(stored).to_empty(device=device or torch.get_default_device())
        decoder.load_state_dict(weights)
        return decoder.eval()

    def _run(self, ids: Tensor, positions: slice | Tensor, call: AttentionCall) -> Tensor:
        """Embeddings, blocks and final normalisation."""
        try:
            x = self.embed_tokens(ids)  # (batch, L, hidden)
        except IndexError:
            raise outside_vocabulary("ids", ids, self.config.vocab_size) from None
        if self.embed_positions is not None:
            x = x + self.embed_positions.weight[positions]
        for layer in self.layers:
            x = layer(x, call)
        final: Tensor = self.norm(x)
        return final

    def _plan(
        self, ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[slice | Tensor, AttentionCall]:
        """Positions and visibility of a call without a cache."""
        length = ids.shape[1]
        positions: slice | Tensor = slice(0, length)
        longest, hidden = length, None
        if attention_mask is not None:
            positions = (attention_mask.cumsum(dim=-1) - 1).clamp_min(0)  # (batch, L)
            hidden = attention_mask[:, None, None, :]  # (batch, 1, 1, L): padding as keys
            if length > self.config.max_position_embeddings:
                longest = int(attention_mask.sum(dim=-1).max()) if len(ids) else 0
        self._check_context(longest)
        return positions, AttentionCall(self._rotary(positions), hidden, is_causal=True)

    def _plan_cached(
        self, ids: Tensor, cache: KVCache, attention_mask: Tensor | None
    ) -> tuple[slice | Tensor, AttentionCall]:
        """The same behind the tokens of a cache, with the slots of the new ones."""
        cache.check_use(self.config, len(ids), self.dtype, self.device)
        write = cache.reserve(ids.shape[1], attention_mask)
        self._check_context(write.end)
        positions: slice | Tensor
        if write.start is not None:
            positions = slice(write.start, write.end)
        elif write.positions is not None:
            positions = write.positions
        call = AttentionCall(
            self._rotary(positions),
            write.visible,
            is_causal=write.visible is None,
            cache=cache,
            write=write,
        )
        return positions, call

    def _rotary(self, positions: slice | Tensor) -> tuple[Tensor, ...] | None:
        return None if self.rotary is None else self.rotary.lookup(positions)

    def _check_context(self, longest: int) -> None:
        if longest > self.config.max_position_embeddings:
            raise ArgumentError(
                "Decoder: expected at most max_position_embeddings = "
                f"{self.config.max_position_embeddings} positions, got {longest}"
            )
