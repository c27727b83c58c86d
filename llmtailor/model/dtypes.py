"""The dtypes of elements, and the encodings that fp32 states are rounded to. Pure.

Dtypes have the names of the safetensors format everywhere in the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Dtype(NamedTuple):
    """What libraries call a dtype."""

    name: str
    num_bytes: int
    torch: str
    numpy: str
    """Empty if numpy doesn't have it"""
    pickled: str
    """The class of its storages in pickles. Dtypes without one are pickled by ``_rebuild_tensor_v3`` and are in an
    ``UntypedStorage``."""
    exponent: int = 0
    """The exponent bits of a floating-point dtype, all set in infinities and NaNs"""


DTYPES: Mapping[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype("F64", 8, "float64", "<f8", "DoubleStorage", 0x7FF << 52),
        Dtype("F32", 4, "float32", "<f4", "FloatStorage", 0x7F800000),
        Dtype("F16", 2, "float16", "<f2", "HalfStorage", 0x7C00),
        Dtype("BF16", 2, "bfloat16", "", "BFloat16Storage", 0x7F80),
        Dtype("I64", 8, "int64", "<i8", "LongStorage"),
        Dtype("I32", 4, "int32", "<i4", "IntStorage"),
        Dtype("I16", 2, "int16", "<i2", "ShortStorage"),
        Dtype("I8", 1, "int8", "|i1", "CharStorage"),
        Dtype("U8", 1, "uint8", "|u1", "ByteStorage"),
        Dtype("BOOL", 1, "bool", "|b1", "BoolStorage"),
        Dtype("F8_E4M3", 1, "float8_e4m3fn", "", ""),
        Dtype("F8_E5M2", 1, "float8_e5m2", "", ""),
        Dtype("C64", 8, "complex64", "<c8", "ComplexFloatStorage"),
    )
}
"""The dtypes of safetensors files that llmtailor knows"""
OF_TORCH: Mapping[str, str] = {dtype.torch: dtype.name for dtype in DTYPES.values()}
"""torch's name of a dtype -> its name"""
SPELLINGS: Mapping[str, str] = {
    "bfloat16": "BF16", "bf16": "BF16", "float16": "F16", "fp16": "F16", "half": "F16", "float32": "F32", "fp32": "F32",
    "float": "F32",
}  # fmt: skip
"""Name of a dtype in recipes and options -> its name"""

F24: Literal["F24"] = "F24"
"""fp32 without its last 8 bits, see `storage.casts`. Only partial checkpoints hold it, as three ``U8`` each."""
Q8: Literal["Q8"] = "Q8"
Q8_ROOT: Literal["Q8_ROOT"] = "Q8_ROOT"
"""fp32 in blocks of 8-bit codes, or the squares of these, see `storage.casts`. Only partial checkpoints hold them."""
D16: Literal["D16"] = "D16"
"""`F24` masters as differences from those of an earlier save, or as bf16, see `storage.casts`"""
D24: Literal["D24"] = "D24"
"""All bits of `F24` masters, as compressed differences from those of an earlier save, see `storage.frames`"""
DIFFERENCES = (D16, D24)
PACKED = (F24, Q8, Q8_ROOT, D16)
"""What safetensors files hold as ``U8``"""

ITEMSIZE: Mapping[str, int] = {dtype.name: dtype.num_bytes for dtype in DTYPES.values()} | {F24: 3}
"""Bytes per element"""
FLOATING = frozenset(dtype.name for dtype in DTYPES.values() if dtype.exponent) | {F24}
"""The dtypes that weights and moments are trained in, or saved in"""


class Block(NamedTuple):
    """The layout of an encoding: ``head`` bytes, then ``code`` bytes for each of so many elements. The last block of a
    tensor may be shorter. A block of `D24` has at most so many bytes."""

    elements: int
    head: int
    code: int

    @property
    def num_bytes(self) -> int:
        return self.head + self.elements * self.code


BLOCKS: Mapping[str, Block] = {
    Q8: Block(128, 4, 1),
    Q8_ROOT: Block(128, 4, 1),
    D16: Block(32, 1, 2),
    D24: Block(1 << 17, 1 << 8, 3),
}


def size_of(dtype: str, numel: int) -> int:
    """Return the bytes that elements take in a file, of `D24` at most."""
    if (block := BLOCKS.get(dtype)) is not None:
        return numel * block.code + block.head * -(-numel // block.elements)
    return numel * ITEMSIZE[dtype]


def numel_of(dtype: str, num_bytes: int) -> int:
    """Return how many complete elements fit in ``num_bytes``."""
    if (block := BLOCKS.get(dtype)) is not None:
        return (num_bytes - block.head * -(-num_bytes // block.num_bytes)) // block.code
    return num_bytes // ITEMSIZE[dtype]


class Encoding(NamedTuple):
    """How bytes of a file become fp32 elements: ``numel`` of its blocks, after ``skip`` elements of the first one."""

    dtype: str
    """One of `BLOCKS`"""
    skip: int
    numel: int
    frames: tuple[int, ...] = ()
    """Of `D24`: the bytes of each block"""
