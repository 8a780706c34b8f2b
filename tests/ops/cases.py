"""Documents in every form, and what an attention of them needs. C = 4, so that several chunks stay cheap."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lineartime.layers import FLASH, GAU
from lineartime.ops.mixed_chunk import MixedChunkOptions
from lineartime.ops.packing import Packing, describe

CHUNK, D_QK, D_VALUE = 4, 6, 5
NORMALIZATIONS = ["count", "paper", "paper_sum"]


def packing_of(*shape: int, device: str = "cpu", **options: Any) -> Packing:
    if isinstance(ends := options.pop("ends", None), list):
        options["cu_seqlens"] = torch.tensor(ends)
    if isinstance(prefix := options.pop("prefix", None), list):
        options["prefix"] = torch.tensor(prefix)
    return describe(shape, device=torch.device(device), **options)


def padded(kind: str, rows: int, length: int) -> Tensor:
    """Row 0 is full, row 1 lacks 3 tokens, ..., but for "holes" and "all"."""
    tokens, padding = torch.arange(length).expand(rows, -1), torch.arange(rows)[:, None] * 3
    return {
        "right": tokens < length - padding,
        "left": tokens >= padding,
        "holes": tokens % 3 != padding // 3 % 3,
        "all": (tokens >= 0) & (padding > 0),
    }[kind]


CASES: dict[str, Callable[[], Packing]] = {
    "no tokens": lambda: packing_of(3, 0),
    "no rows": lambda: packing_of(0, 5),
    "a token": lambda: packing_of(3, 1),
    "a chunk": lambda: packing_of(3, 4),
    "more than a chunk": lambda: packing_of(3, 5),
    "chunks": lambda: packing_of(2, 12),
    "ragged": lambda: packing_of(2, 17),
    "right": lambda: packing_of(3, 17, mask=padded("right", 3, 17)),
    "left": lambda: packing_of(3, 14, mask=padded("left", 3, 14)),
    "holes": lambda: packing_of(3, 17, mask=padded("holes", 3, 17)),
    "all padding": lambda: packing_of(2, 9, mask=padded("all", 2, 9)),
    "pack": lambda: packing_of(1, 17, ends=[0, 4, 4, 5, 17]),
    "pack of short ones": lambda: packing_of(1, 17, ends=[0, 0, 1, 2, 3, 16, 17]),
    "masked pack": lambda: packing_of(1, 17, ends=[0, 4, 4, 5, 17], mask=padded("holes", 1, 17)),
    "pack in one grid": lambda: packing_of(1, 17, ends=[0, 2, 3, 17], one_grid=True),
    "prefixes": lambda: packing_of(4, 14, prefix=[0, 3, 9, 14]),
    "prefixes, left": lambda: packing_of(4, 14, mask=padded("left", 4, 14), prefix=[0, 3, 8, 5]),
    "prefixes, holes": lambda: packing_of(4, 14, mask=padded("holes", 4, 14), prefix=[0, 3, 9, 9]),
    "prefixes of a pack": lambda: packing_of(1, 14, ends=[0, 5, 5, 9, 14], prefix=[3, 0, 4, 1]),
    "prefixes of a masked pack": lambda: packing_of(
        1, 14, ends=[0, 5, 5, 9, 14], prefix=[3, 0, 4, 1], mask=(torch.arange(14) % 9 != 1)[None]
    ),
}


def options_of(
    chunk_size: int | None,
    causal: bool,
    bias: Tensor | None = None,
    *,
    d_qk: int = D_QK,
    backend: Any = "torch",
    **options: Any,
) -> MixedChunkOptions:
    """Those of a FLASH or, without chunks, of a GAU; the bias is one for each distance, [2 n - 1], of at most n tokens."""
    if chunk_size is None and options.get("normalization") == "paper_sum":
        options["normalization"] = "paper"
    size = {} if chunk_size is None else {"chunk_size": chunk_size}
    layer = (GAU if chunk_size is None else FLASH)(4, d_qk=d_qk, causal=causal, relative_bias=False, **size, **options)
    return MixedChunkOptions(
        chunk_size, causal, layer.scales(), layer.activation, None if bias is None else near(bias), backend
    )


def near(bias: Tensor) -> Callable[[int], Tensor]:
    longest = len(bias) // 2 + 1
    return lambda n: bias[longest - n : longest + n - 1]


def maps_of(count: int, chunk_size: int | None = CHUNK, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries and keys, of both parts or without chunks of one, and values."""
    widths = [D_QK] * (2 if chunk_size is None else 4) + [D_VALUE]
    return [torch.randn(count, width, dtype=torch.float64).to(dtype) for width in widths]


def bias_of(chunk_size: int | None, longest: int = 24) -> Tensor:
    return torch.randn(2 * (chunk_size or longest) - 1, dtype=torch.float64)


def assert_same(a: list[Tensor], b: list[Tensor], atol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)
