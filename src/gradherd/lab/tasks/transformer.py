"""A transformer layer out of plain modules, so that every example's gradient can be read.

Shapes: B examples, T positions, W width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Self-attention with H heads."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide width {width}, got {heads}")
        self.heads, self.causal = heads, causal
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Mix (B, T, W) along T; where `seen`, (B, T), is False nothing is looked at."""
        # Numbers of examples and positions stay two dimensions of their own throughout.
        queries, keys, values = (
            self.into(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        mask = None if seen is None else seen[:, None, None, :]
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=self.causal
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class TransformerLayer(nn.Module):
    """Attention, then two linear maps at each position, each added to what came in (GPT-2)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Turn (B, T, W) into (B, T, W)."""
        x = x + self.attention(self.norm1(x), seen)
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.norm2(x)), approximate="tanh"))
        return out


class Transformer(nn.Module):
    """Token and position embeddings and a stack of layers."""

    def __init__(
        self, tokens: int, positions: int, width: int, heads: int, layers: int, *, causal: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(
            TransformerLayer(width, heads, causal=causal) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As GPT-2 does: what is added to the stream starts smaller in deeper stacks.
                added = name.endswith(("out.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * layers) ** 0.5 if added else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, seen: Tensor | None = None) -> Tensor:
        """Turn (B, T) tokens into (B, T, W)."""
        # One row of positions per example: else they could not be told apart by example.
        steps = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(steps)
        for layer in self.layers:
            x = layer(x, seen)
        out: Tensor = self.norm(x)
        return out
