"""Compile the functions of `memory.py` to processor instructions.

This file is imported when the first kernel is compiled.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from packprep.kernel.memory import (
    bits_set,
    copy_items,
    copy_run,
    flags_as_bits,
    leading_zeros,
    trailing_zeros,
)


def _copy_bytes(typing_context, target, target_begin, source, begin, n):
    """Generate a memcpy of n items between two contiguous arrays of one dtype."""

    def generate(context, builder, signature, arguments):
        target_pointer, size = _pointer(
            context, builder, signature.args[0], arguments[0], arguments[1]
        )
        source_pointer, _ = _pointer(
            context, builder, signature.args[2], arguments[2], arguments[3]
        )
        cgutils.raw_memcpy(builder, target_pointer, source_pointer, arguments[4], size)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), generate


def _copy_chunk(typing_context, target, target_begin, source, begin):
    """Generate one load and one store that copy CHUNK_BYTES between arrays of one dtype."""

    def generate(context, builder, signature, arguments):
        target_pointer, _ = _pointer(
            context, builder, signature.args[0], arguments[0], arguments[1]
        )
        source_pointer, _ = _pointer(
            context, builder, signature.args[2], arguments[2], arguments[3]
        )
        chunk = ir.VectorType(ir.IntType(8), CHUNK_BYTES).as_pointer()
        loaded = builder.load(builder.bitcast(source_pointer, chunk), align=1)
        builder.store(loaded, builder.bitcast(target_pointer, chunk), align=1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), generate


def _pointer(context, builder, array_type, array, index):
    """Return a pointer to an item of a contiguous array, and the item's size in bytes."""
    data = context.make_array(array_type)(context, builder, array).data
    size = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    return builder.gep(data, [index]), size


CHUNK_BYTES = 32
_copy_bytes_of: Any = intrinsic(_copy_bytes)
_copy_chunk_of: Any = intrinsic(_copy_chunk)


@overload(copy_items, jit_options={"forceinline": True})
def _copy_items(target, target_begin, source, begin, n):
    if target.dtype == source.dtype:

        def copy(target, target_begin, source, begin, n):
            _copy_bytes_of(target, target_begin, source, begin, n)

        return copy

    def cast(target, target_begin, source, begin, n):
        for i in range(n):
            target[target_begin + i] = source[begin + i]

    return cast


@overload(copy_run, jit_options={"forceinline": True})
def _copy_run(target, target_begin, source, begin, n, end):
    if target.dtype == source.dtype:
        chunk = CHUNK_BYTES // (target.dtype.bitwidth // 8)

        def copy(target, target_begin, source, begin, n, end):
            # A chunk may write after the run. Copy item by item where that would exceed `end` or
            # the source.
            if target_begin + n + chunk <= end and begin + n + chunk <= source.shape[0]:
                _copy_chunk_of(target, target_begin, source, begin)
                for copied in range(chunk, n, chunk):
                    _copy_chunk_of(target, target_begin + copied, source, begin + copied)
            else:
                for i in range(n):
                    target[target_begin + i] = source[begin + i]

        return copy

    def cast(target, target_begin, source, begin, n, end):
        for i in range(n):
            target[target_begin + i] = source[begin + i]

    return cast


def _trailing_zeros(typing_context, value):
    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _leading_zeros(typing_context, value):
    def generate(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _bits_set(typing_context, value):
    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


def _flags_as_bits(typing_context, flags, begin):
    def generate(context, builder, signature, arguments):
        flags_pointer, _ = _pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        of_64 = ir.VectorType(ir.IntType(8), 64)
        loaded = builder.load(builder.bitcast(flags_pointer, of_64.as_pointer()), align=1)
        return builder.bitcast(
            builder.icmp_unsigned("!=", loaded, ir.Constant(of_64, None)), ir.IntType(64)
        )

    return types.uint64(flags, types.int64), generate


_trailing_zeros_of: Any = intrinsic(_trailing_zeros)
_leading_zeros_of: Any = intrinsic(_leading_zeros)
_bits_set_of: Any = intrinsic(_bits_set)
_flags_as_bits_of: Any = intrinsic(_flags_as_bits)


@overload(trailing_zeros, jit_options={"forceinline": True})
def _compiled_trailing_zeros(value):
    return lambda value: _trailing_zeros_of(value)


@overload(leading_zeros, jit_options={"forceinline": True})
def _compiled_leading_zeros(value):
    return lambda value: _leading_zeros_of(value)


@overload(bits_set, jit_options={"forceinline": True})
def _compiled_bits_set(value):
    return lambda value: _bits_set_of(value)


@overload(flags_as_bits, jit_options={"forceinline": True})
def _compiled_flags_as_bits(flags, begin):
    return lambda flags, begin: _flags_as_bits_of(flags, begin)
