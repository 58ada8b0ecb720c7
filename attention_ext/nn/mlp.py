"""The feed-forward part of a block: what happens to each position by itself.

    swiglu: y = W_down (silu(W_gate x) * (W_up x))          no biases
    gelu:   y = W_down gelu_tanh(W_up x + b_up) + b_down    as in GPT-2

``gate_up_proj.weight`` (2 * intermediate, hidden) holds the gate's rows first, then the up rows, so
that one product serves both.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from attention_ext.layers import swiglu

from .config import DecoderConfig


class SwiGLU(nn.Module):
    """Gated feed-forward network.

    Args:
        hidden: width of input and output.
        intermediate: width of the gate.
    """

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., hidden) to the same shape."""
        y: Tensor = self.down_proj(swiglu(self.gate_up_proj(x)))
        return y


class GeluMLP(nn.Module):
    """Two-layer feed-forward network with the tanh form of GELU.

    Args:
        hidden: width of input and output.
        intermediate: width between the two layers.
    """

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden, intermediate)
        self.down_proj = nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., hidden) to the same shape."""
        y: Tensor = self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))
        return y


def make_mlp(config: DecoderConfig) -> nn.Module:
    """The feed-forward network that ``config.mlp`` asks for."""
    kind = SwiGLU if config.mlp == "swiglu" else GeluMLP
    return kind(config.hidden_size, config.intermediate_size or 0)
