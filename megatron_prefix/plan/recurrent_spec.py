"""The recurrent layers of a hybrid model. [pure]"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
"""Positions that the kernels compute at once by matrix products."""
KINDS = {"M": "Mamba2", "G": "GatedDeltaNet", "*": "attention", "-": "MLP", "E": "experts"}
"""Layers of a hybrid pattern, by the symbols of Megatron's
megatron/core/ssm/mamba_hybrid_layer_allocation.py."""


@dataclass(frozen=True)
class GatedDelta:
    """The shape of GatedDeltaNet, which replaces attention in most layers of Qwen3-Next.

    key_heads, value_heads: value heads share keys in groups. key_dim, value_dim: width of a head.
    conv_width: positions that the convolution in front of the rule sees.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    @property
    def keys(self) -> int:
        """Channels of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def projected(self) -> tuple[int, ...]:
        """Rows of the input projection: queries, keys, values, gate, beta, alpha."""
        return (
            *(self.keys, self.keys, self.values, self.values),
            *(self.value_heads, self.value_heads),
        )

    @property
    def convolved(self) -> tuple[int, ...]:
        """Channels of the convolution: queries, keys, values."""
        return self.projected[:3]

    @property
    def state(self) -> int:
        """Numbers in a layer's state."""
        return self.value_heads * self.key_dim * self.value_dim

    def saved(self, size: int, fused: bool) -> float:
        """Bytes a position that a layer saves for backward, without the norm in front of it.

        Megatron's module, run as it stands (megatron/core/ssm/gated_delta_net.py, 0.16.1): the
        output norm's input and output, the gate and its SiLU in fp32 (torch.compile may keep less),
        the output projection's input; of alpha its sum with a bias, and its softplus.

        Its kernels (flash-linear-attention 0.4.2, causal-conv1d 1.5): the convolution its input;
        `L2NormFunction` its output; `ChunkGatedDeltaRuleFunction` queries and keys of every value
        head, values, g, beta, and A, `CHUNK` numbers a head. Norms a number a head, in fp32.

        Args:
            size: bytes of a number.
            fused: transformer-engine's norms; Megatron's local ones save the scaled input, too.
        """
        heads = self.value_heads
        repeated = 2 * heads * self.key_dim if heads > self.key_heads else 0
        kernels = sum(self.convolved) + 2 * self.keys + repeated + self.values + heads * CHUNK
        norm = (2 if fused else 3) * self.values
        gates, scales = 2 * self.values + 3 * heads, heads + 2 * self.key_heads
        narrow = kernels + norm + self.values + heads
        return narrow * size + (gates + scales) * max(4, size)

    def products(self, hidden: int) -> int:
        """Multiplications a position in matrix products, projections included."""
        scan = 3 * self.key_dim * self.value_dim + 2 * CHUNK * (self.key_dim + self.value_dim)
        return hidden * (sum(self.projected) + self.values) + self.value_heads * scan


@dataclass(frozen=True)
class Mamba:
    """The shape of Mamba2 (Nemotron-H).

    heads, head_dim: of Mamba2's values. state_dim: of a head's state. groups: of B and C.
    conv_width: positions that the convolution sees; Megatron has no option for it.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    conv_width: int = 4

    @property
    def inner(self) -> int:
        """Channels of the values."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> tuple[int, ...]:
        """Rows of the input projection: z, x, B, C, dt."""
        shared = self.groups * self.state_dim
        return self.inner, self.inner, shared, shared, self.heads

    @property
    def convolved(self) -> tuple[int, ...]:
        """Channels of the convolution: x, B, C."""
        return self.projected[1:4]

    @property
    def state(self) -> int:
        """Numbers in a layer's state."""
        return self.inner * self.state_dim

    def of_kernel(self, size: int) -> float:
        """Bytes a position of what the kernel saves: its input, and what it multiplies by the gate
        (`MambaSplitConv1dScanCombinedFn` in mamba-ssm 2.2)."""
        return (sum(self.projected) + self.inner) * size

    def saved(self, size: int, fused: bool) -> float:
        """Bytes a position that a layer saves for backward, without the norm in front of it: what
        the kernel saves, the gated norm's input (`LayerNormFn` of mamba-ssm) and, Megatron's own,
        the output projection's.

        Args:
            size: bytes of a number.
            fused: makes no difference: the gated norm is mamba-ssm's in any case.
        """
        return self.of_kernel(size) + 2 * self.inner * size

    def products(self, hidden: int) -> int:
        """Multiplications a position in matrix products, projections included."""
        scan = 2 * self.state + CHUNK * (self.groups * self.state_dim + self.inner)
        return hidden * (sum(self.projected) + self.inner) + scan


Recurrent = GatedDelta | Mamba
