"""Declare the struct that a kernel takes in Python, and have the compiler compare it with the C struct of that name.

A kernel has one parameter, a plain struct. Its Python twin is a frozen dataclass whose annotations name C types. The
compiler gets a check of the struct's size and of every field's offset, so a kernel does not compile if the two differ.

>>> @dataclass(frozen=True)
... class Inner(Params):
...     flag: U32
...     limit: U64
>>> Inner.nbytes(), Inner.offsets()
(16, {'flag': 0, 'limit': 8})
>>> bytes(Inner(flag=1, limit=2).packed()).hex()
'01000000000000000200000000000000'
>>> Inner(flag=2**32, limit=0).packed()
Traceback (most recent call last):
    ...
raymoe.errors.ConfigError: Inner.flag is 4294967296; it holds 0 to 4294967295
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from raymoe.errors import ConfigError

U32 = Annotated[int, ctypes.c_uint32]
U64 = Annotated[int, ctypes.c_uint64]
F32 = Annotated[float, ctypes.c_float]
Address = Annotated[int, ctypes.c_uint64]
"""A pointer; 0 is null."""

ROW_TYPES = {"bfloat16": "Bf16", "float16": "F16", "float32": "F32"}
"""The types of elements in kernels (kernels/include/raymoe/base/vectors.cuh), by their names in torch."""
NAMESPACE = "raymoe"


@dataclass(frozen=True)
class Params:
    """The base of all twins.

    A field is U32, U64, F32, Address, another twin, or an array: `Annotated[tuple[int, ...], ctype * n]`. An array of
    twins has `Twin.array(n)` as its type, and twins that are not given are zero.
    """

    _kinds: ClassVar[dict[str, type[Any]]]
    _struct: ClassVar[type[ctypes.Structure]]

    def __init_subclass__(cls) -> None:
        # Made here, because two threads that made it at first use could make two different C types.
        hints = get_type_hints(cls, include_extras=True)
        cls._kinds = {
            name: hint if isinstance(hint, type) and issubclass(hint, Params) else get_args(hint)[1]
            for name, hint in hints.items()
            if not name.startswith("_")
        }
        described = [(name, kind._struct if issubclass(kind, Params) else kind) for name, kind in cls._kinds.items()]
        cls._struct = type(cls.__name__, (ctypes.Structure,), {"_fields_": described})

    def packed(self) -> ctypes.Structure:
        """Return the C struct with these values. Every value is checked, because ctypes would truncate 4 GiB to 0."""
        return self._struct(*(_value(self, name, kind) for name, kind in self._kinds.items()))

    @classmethod
    def nbytes(cls) -> int:
        return ctypes.sizeof(cls._struct)

    @classmethod
    def array(cls, count: int) -> type[Any]:
        """Return the C type of an array of `count` of these.

        >>> Watched = dataclass(frozen=True)(type("Watched", (Params,), {"__annotations__": {"at": U64}}))
        >>> ctypes.sizeof(Watched.array(3))
        24
        """
        return cls._struct * count

    @classmethod
    def offsets(cls) -> dict[str, int]:
        """Return the offset of each field. Fields of inner structs are included, by dotted names."""
        offsets: dict[str, int] = {}
        for name, kind in cls._kinds.items():
            begin = getattr(cls._struct, name).offset
            offsets[name] = begin
            if issubclass(kind, Params):
                offsets |= {f"{name}.{inner}": begin + offset for inner, offset in kind.offsets().items()}
        return offsets

    @classmethod
    def place(cls, name: str) -> tuple[int, int]:
        """Return the offset and the bytes of a field by its path, which may go through inner structs and arrays.

        >>> Watched = dataclass(frozen=True)(type("Watched", (Params,), {"__annotations__": {"at": U64, "bytes": U32}}))
        >>> pair = Annotated[tuple[Watched, ...], Watched.array(2)]
        >>> Both = dataclass(frozen=True)(type("Both", (Params,), {"__annotations__": {"first": U64, "watched": pair}}))
        >>> Both.place("first"), Both.place("watched[1].bytes")
        ((0, 8), (32, 4))
        """
        ctype: Any = cls._struct
        offset = 0
        for step in re.findall(r"\w+", name):
            if issubclass(ctype, ctypes.Array):
                ctype = ctype._type_
                offset += int(step) * ctypes.sizeof(ctype)
            else:
                offset += getattr(ctype, step).offset
                ctype = dict(ctype._fields_)[step]
        return offset, ctypes.sizeof(ctype)

    @classmethod
    def layout_check(cls) -> str:
        """Return C++ code that compiles only if the C struct has the same layout.

        NVRTC 13.0 has no offsetof. Instead, a kernel tests each offset by conditions that are constant. A false offset
        leaves a call of an undefined function, which ptxas names: `CopyParams_bytes_is_not_at_byte_16`.
        """
        name = f"{NAMESPACE}::{cls.__name__}"
        declared, called = [], []
        for field, offset in cls.offsets().items():
            missing = f"{cls.__name__}_{field.replace('.', '_')}_is_not_at_byte_{offset}"
            declared.append(f'extern "C" __device__ void {missing}();')
            place = f"reinterpret_cast<unsigned long long>(&at->{field})"
            called.append(f"    if ({place} - reinterpret_cast<unsigned long long>(at) != {offset}) {missing}();")
        size = f'static_assert(sizeof({name}) == {cls.nbytes()}, "{cls.__name__} has {cls.nbytes()} bytes in Python");'
        kernel = f'extern "C" __global__ void layout_of_{cls.__name__}({name}* at) {{'
        return "\n".join([size, *declared, kernel, *called, "}"]) + "\n"


def address_setter(fields: ctypes.Structure, struct: type[Params], names: Sequence[str]) -> Callable[..., None]:
    """Make a function that sets several 64-bit fields of a packed struct at once. The fields must be adjacent.

    >>> @dataclass(frozen=True)
    ... class Three(Params):
    ...     a: U64
    ...     b: U64
    ...     c: U64
    >>> fields = Three(1, 2, 3).packed()
    >>> address_setter(fields, Three, ("b", "c"))(20, 30)
    >>> fields.a, fields.b, fields.c
    (1, 20, 30)
    """
    offsets, form = struct.offsets(), Struct(f"={len(names)}Q")
    begin = offsets[names[0]]
    if [offsets[name] for name in names] != [begin + 8 * index for index in range(len(names))]:
        raise ConfigError(f"fields {', '.join(names)} of {struct.__name__} are not adjacent in this order")
    return partial(form.pack_into, memoryview(fields).cast("B"), begin)


def _value(params: Params, name: str, ctype: Any) -> Any:
    value = getattr(params, name)
    where = f"{type(params).__name__}.{name}"
    if isinstance(value, Params):
        return value.packed()
    if issubclass(ctype, ctypes.Array):
        short = issubclass(ctype._type_, ctypes.Structure) and len(value) < ctype._length_  # the rest is zero
        if len(value) != ctype._length_ and not short:
            raise ConfigError(f"{where} has {len(value)} elements; it holds {ctype._length_}")
        packed = [item.packed() if isinstance(item, Params) else _checked(where, item, ctype._type_) for item in value]
        return ctype(*packed)
    return _checked(where, value, ctype)


def _checked(where: str, value: Any, ctype: Any) -> Any:
    if ctype is not ctypes.c_float:
        most = 256 ** ctypes.sizeof(ctype) - 1
        if not isinstance(value, int) or not 0 <= value <= most:
            raise ConfigError(f"{where} is {value!r}; it holds 0 to {most}")
    return value
