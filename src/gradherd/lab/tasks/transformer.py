"""A transformer built from plain modules, so that per-example gradients can be read.

`nn.MultiheadAttention` applies its projections without calling submodules, so hooks never see them.

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
        # One layer for all three: one hook, and one matrix product.
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend over T in (B, T, W); positions where `mask`, (B, T), is False are ignored."""
        # B and T stay separate dimensions throughout, so that rows can be split by example.
        queries, keys, values = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if mask is None else mask[:, None, None, :],
            is_causal=self.causal,
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class TransformerLayer(nn.Module):
    """Self-attention and a feed-forward network, each with a residual connection (as in GPT-2)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T, W) to (B, T, W)."""
        x = x + self.attention(self.norm1(x), mask)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class Transformer(nn.Module):
    """Token and position embeddings and a stack of layers.

    Args:
        tokens: Size of the vocabulary.
        positions: Longest sequence, T.
        width: W.
        heads: H; must divide W.
        layers: Number of layers.
        causal: Whether a position sees only those before it.
    """

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
                # As in GPT-2: projections into the residual stream start smaller in deeper stacks.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * layers) ** 0.5 if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T) token ids to (B, T, W)."""
        # Expanded to one row per example: a shared row would have no gradient per example.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, mask)
        out: Tensor = self.norm(x)
        return out
