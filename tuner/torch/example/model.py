"""A transformer over characters, of PyTorch's own modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention of several heads, from queries, keys and values in one tensor [batch, length, 3 * width]."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:
        """[batch, length, width]."""
        batch, length, _ = qkv.shape
        query, key, value = (part.reshape(batch, length, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class Block(nn.Module):
    """One layer: attention and two linear maps, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), Attention(heads), nn.Linear(width, width))
        self.think = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width]."""
        x = x + self.mix(x)
        return x + self.think(x)


class Transformer(nn.Module):
    """Predicts the next character.

    Args:
        characters: how many there are.
        length: the longest text it sees.
        width: of the vectors between the layers.
        heads: of each attention; they divide the width.
        layers: how many.
    """

    def __init__(self, characters: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, text: Tensor) -> Tensor:
        """The logits of the next characters [batch, length, characters] after each of a text's [batch, length]."""
        return self.head(self.blocks(self.characters(text) + self.places))
