"""A decoder-only Transformer on the package's attention operator.

    x = embedding[ids] (+ learned positions)
    for each block:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = norm(x) @ vocabulary^T

Everything is causal, the logits at a position depend on the tokens up to it, unless the
configuration says ``causal=False``: then it is an encoder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_ext.errors import ArgumentError, ArgumentTypeError

from . import checkpoint
from . import generate as generation
from .alibi import AlibiSlopes
from .attention import AttentionCall, CachedCall
from .block import Block
from .cache import AnyCache, CacheRows, rows_of
from .config import DecoderConfig
from .inputs import IGNORED_TARGET, check_causal, check_ids, check_inputs, outside_vocabulary
from .norm import make_norm
from .packing import Packing, make_packing
from .rotary import RotaryEmbedding


class _Plan(NamedTuple):
    """How a call without a cache runs: its tokens, packed where rows are padded."""

    ids: Tensor  # (batch, columns)
    call: AttentionCall
    packing: Packing | None


class Decoder(nn.Module):
    """A causal language model; with ``causal=False`` an encoder.

    Weights start normal with standard deviation ``sqrt(0.4 / hidden_size)``, as in GPT-2 smaller by
    ``sqrt(2 * num_hidden_layers)`` in the two projections of each block that write to the residual
    stream; biases and sinks 0, normalisation weights 1. (GPT-2's own 0.02 suits its width of 768.
    At width 128, on Python's documentation, 0.05 gave 2.44 bits per byte after 110 steps and 2.04
    after 400 where 0.02 gave 2.63 and 2.07; 2026-11.) With tied embeddings there is one vocabulary
    matrix, not two names.

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
        self.alibi = AlibiSlopes(config) if config.position == "alibi" else None
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
            if name.endswith(("bias", "sinks")):
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
        self, ids: Tensor, *, cache: AnyCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Logits of the token after each position.

        Args:
            ids: tokens (batch, L), int64 or int32.
            cache: past keys and values: a `KVCache`, a `PagedKVCache` or some rows of one. The
                call's tokens follow them and are appended, nothing is recorded for gradients. Any
                split of a text into calls gives the same logits up to rounding.
            attention_mask: (batch, L) bool, True = a real token, for this call's ids. Padding,
                left or right, is neither seen nor cached nor counted in positions; its own logits
                are finite and mean nothing.

        Returns:
            Logits (batch, L, vocab_size) in the model's dtype.

        Raises:
            ArgumentError: wrong shapes, ids outside the vocabulary (on the CPU), more positions
                than ``max_position_embeddings``, or a cache of another configuration, batch size,
                dtype or device, without room, or in training with dropout; nothing has been
                written to it then.
            ArgumentTypeError: ids that are not integers, a mask that is not bool, a cache of
                another class.
        """
        hidden = self.hidden_states(ids, cache=cache, attention_mask=attention_mask)
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            return self.project(hidden)

    def hidden_states(
        self, ids: Tensor, *, cache: AnyCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """What `forward` computes before the vocabulary projection, (batch, L, hidden)."""
        if cache is not None:
            with torch.no_grad():
                return self._run_cached(ids, rows_of(cache), attention_mask)
        plan = self._plan(ids, attention_mask)
        x = self._run(plan)
        return x if plan.packing is None else plan.packing.unpack(x)

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
            ArgumentError: as `forward`, and targets of another shape or outside the vocabulary, or
                an encoder.
        """
        check_causal("Decoder.loss", self.config)
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

    def attention_weights(
        self,
        ids: Tensor,
        layers: Sequence[int] | None = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The softmax weights with which each position looks at the others.

        The chosen layers compute them in a second pass, beside an output that this does not change
        by a bit; all others, and what lies between, run as in `forward`, up to the last chosen one.

        Args:
            ids: tokens (batch, L).
            layers: which layers, counted from 0 or, negative, from the end; default: all.
            attention_mask: as in `forward`.

        Returns:
            Weights (layers, batch, num_attention_heads, L, L) in the model's dtype: row i holds
            those of query i, before dropout. They are 0 where it does not look, and sum to 1, to
            less with sinks. Rows and columns of padding are 0.

        Raises:
            ArgumentError: as `forward`, and a layer that there is not.
            ArgumentTypeError: as `forward`, and layers that are no sequence of integers.

        Example:
            >>> config = DecoderConfig(256, 32, num_hidden_layers=2, num_attention_heads=4)
            >>> weights = Decoder(config).attention_weights(torch.tensor([[77, 97, 121]]), [-1])
            >>> weights.shape
            torch.Size([1, 1, 4, 3, 3])
            >>> (weights[0, 0, 0] > 0).int()
            tensor([[1, 0, 0],
                    [1, 1, 0],
                    [1, 1, 1]], dtype=torch.int32)
        """
        every = range(self.config.num_hidden_layers)
        try:
            wanted = [every[layer] for layer in (every if layers is None else layers)]
            last = max(wanted)
        except (IndexError, ValueError):
            raise ArgumentError(
                "Decoder.attention_weights: expected at least one layer, from "
                f"{-len(every)} to {len(every) - 1}, got {list(layers or ())}"
            ) from None
        except TypeError:
            raise ArgumentTypeError(
                "Decoder.attention_weights: expected layers to be a sequence of integers, "
                f"got {layers!r}"
            ) from None
        plan = self._plan(ids, attention_mask)
        found = plan.call.weights
        found |= dict.fromkeys(wanted)
        self._run(plan, self.layers[: last + 1])
        weights = torch.stack([found[layer] for layer in wanted])  # type: ignore[misc]
        if plan.packing is None or attention_mask is None:
            return weights
        weights = plan.packing.unpack(plan.packing.unpack(weights, -1, 1), -2, 1)
        real = attention_mask[:, None]  # (batch, 1, L)
        return weights.masked_fill(~(real[..., None] & real[..., None, :]), 0.0)

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

    def _run(self, plan: _Plan, layers: nn.ModuleList | None = None) -> Tensor:
        """Embeddings, blocks and final normalisation, (batch, columns, hidden)."""
        x = self._embed(plan.ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions.weight[: x.shape[1]]
        return self._blocks(x, plan.call, layers)

    def _run_cached(self, ids: Tensor, rows: CacheRows, attention_mask: Tensor | None) -> Tensor:
        """The same behind past tokens, (batch, L, hidden)."""
        check_causal("Decoder with a cache", self.config)
        check_inputs(ids, attention_mask)
        rows.check_use(self.config, len(ids), self.dtype, self.device)
        self._check_no_dropout()
        counts = packing = None
        if attention_mask is not None:
            counts = attention_mask.sum(dim=-1).tolist()
            packing = make_packing(attention_mask, max([1, *counts]))
            ids = packing.pack(ids.masked_fill(~attention_mask, 0))  # padding may be any number
        x = self._embed(ids)  # before the plan: wrong ids leave the cache as it was
        try:
            writes = rows.plan(ids.shape[1], counts)
            if self.embed_positions is not None:
                x = x + self._positions_behind(rows.seqlens, ids.shape[1], packing is not None)
            cached = CachedCall(writes, *rows.cache.layers(), self._rotary_tables())
            x = self._blocks(x, AttentionCall(alibi_slopes=self._slopes(), cached=cached))
        except (ArgumentError, IndexError):
            rows.check_room(counts or [ids.shape[1]] * len(ids))  # to say it about this call
            raise
        rows.advance(writes)
        return x if packing is None else packing.unpack(x)

    def _embed(self, ids: Tensor) -> Tensor:
        """Tokens (batch, columns) without positions, (batch, columns, hidden)."""
        try:
            x: Tensor = self.embed_tokens(ids)
        except IndexError:
            raise outside_vocabulary("ids", ids, self.config.vocab_size) from None
        return x

    def _blocks(
        self, x: Tensor, call: AttentionCall, layers: nn.ModuleList | None = None
    ) -> Tensor:
        for layer in self.layers if layers is None else layers:
            x = layer(x, call)
        x = self.norm(x)
        return x

    def _plan(self, ids: Tensor, attention_mask: Tensor | None) -> _Plan:
        """How a call without a cache runs: padding behind the tokens of each row."""
        check_inputs(ids, attention_mask)
        length = ids.shape[1]
        packing = seqused = None
        if attention_mask is not None:
            if length > self.config.max_position_embeddings:
                length = max([1, *attention_mask.sum(dim=-1).tolist()])
            packing = make_packing(attention_mask, length)
            ids = packing.pack(ids.masked_fill(~attention_mask, 0))  # padding may be any number
            seqused = None if self.config.causal else packing.counts
        self._check_context(length)
        rotary = None if self.rotary is None else self.rotary.lookup(slice(0, length))
        return _Plan(ids, AttentionCall(rotary, self._slopes(), seqused), packing)

    def _positions_behind(self, seqlens: Tensor, columns: int, padded: bool) -> Tensor:
        """Learned positions (batch, columns, hidden) behind those in use."""
        assert self.embed_positions is not None
        positions = seqlens[:, None] + torch.arange(columns, device=seqlens.device)
        if padded:  # columns without a token may lie beyond the last position
            positions = positions.clamp_max(self.config.max_position_embeddings - 1)
        found: Tensor = self.embed_positions(positions)
        return found

    def _rotary_tables(self) -> tuple[Tensor | None, Tensor | None]:
        """Cos and sin of all positions, (positions, R/2) each."""
        if self.rotary is None:
            return None, None
        cos, sin = self.rotary.table.unbind(1)
        return cos, sin

    def _slopes(self) -> Tensor | None:
        return None if self.alibi is None else self.alibi.table

    def _check_no_dropout(self) -> None:
        if self.training and self.config.dropout:
            raise ArgumentError(
                "Decoder with a cache: expected evaluation mode, in which nothing drops out, got "
                f"training mode with dropout = {self.config.dropout}"
            )

    def _check_context(self, longest: int) -> None:
        if longest > self.config.max_position_embeddings:
            raise ArgumentError(
                "Decoder: expected at most max_position_embeddings = "
                f"{self.config.max_position_embeddings} positions, got {longest}"
            )
