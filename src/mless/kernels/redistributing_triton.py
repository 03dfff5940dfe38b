"""The kernel behind `redistributing`, in Triton. One program is one token; its units stay in registers from the first count to the last.

A bf16 magnitude is 15 bits that sort like the values. So two of them share a 32-bit word and are compared with a probe in one subtraction:
in ``(probe | 0x8000) − key`` the highest bit stays where the key is not above the probe. Ranks follow from counts alone.
"""

# pyright: basic
# (a jitted function is Triton's language rather than Python's)

from __future__ import annotations

import functools
import math
import os
import threading
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Masks of both magnitudes and of both sign bits of a word; and the largest key, which fills places without a unit.
_BOTH = tl.constexpr(0x7FFF7FFF)
_ONES = tl.constexpr(0x00010001)
_LARGEST = tl.constexpr(0x7FFF)
#: The key of infinity. No probe lies above it: as bf16 that would be NaN, which never compares.
_INFINITY = tl.constexpr(0x7F80)


def launch(
    values: Tensor,
    up: Tensor | None,
    positions: Tensor | None,
    seeds: Tensor | None,
    out: Tensor,
    *,
    seed: int,
    factor: float,
    least: int,
    most: int,
    p1: float,
    add: bool,
    act: str,
) -> None:
    rows, tokens, units = values.shape
    plan = _planned(values.device, units, seed, factor, least, most, p1, add, act)
    # Triton's look-up of a compiled kernel takes longer than a small MLP. So a kernel is kept by what it was compiled for: which arguments
    # are given, their types, and whether they start at a multiple of 16 bytes.
    known = (
        values.data_ptr() % 16 | out.data_ptr() % 16,
        None if up is None else up.data_ptr() % 16,
        None if positions is None else (positions.dtype, positions.data_ptr() % 16),
        None if seeds is None else (seeds.dtype, seeds.data_ptr() % 16),
    )
    kernel = plan.compiled.get(known)
    grid = (rows * tokens, 1, 1)
    # Triton launches on the current device, which may differ from the tensors'.
    elsewhere = values.is_cuda and values.get_device() != torch.cuda.current_device()
    with torch.cuda.device(values.device) if elsewhere else _HERE:
        if kernel is not None:
            # A compiled kernel takes addresses and asks for no type.
            kernel[grid](values, up, positions, seeds, out, tokens, *plan.numbers, *plan.constants)
            return
        words = torch.int32
        pointers = (values.view(words), up.view(words) if up is not None else None, positions, seeds, out.view(words))
        run: Any = _kernel[grid]
        with _COMPILING:
            kernel = run(
                *pointers, tokens, *plan.numbers, *plan.constants, num_warps=plan.warps, maxnreg=_REGISTERS.get(plan.warps)
            )  # fmt: skip
    if kernel is not None:  # the interpreter compiles nothing
        plan.compiled[known] = kernel


_HERE = nullcontext()
#: Triton would compile a kernel once in each thread that asks for it at the same time.
_COMPILING = threading.Lock()


class _Plan(NamedTuple):
    """What does not change from call to call."""

    numbers: tuple[int | float, ...]
    constants: tuple[Any, ...]
    warps: int
    compiled: dict[tuple[Any, ...], Any]


@functools.lru_cache(maxsize=256)
def _planned(
    device: torch.device, units: int, seed: int, factor: float, least: int, most: int, p1: float, add: bool, act: str
) -> _Plan:
    place = (units - 1) * (p1 / 100)
    first, second, columns, warps = shape_of(units)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    numbers = (
        _signed(seed), _signed(seed >> 32), factor, least, most, math.floor(place), place - math.floor(place),
        320 if p1 >= 99 else 224 if p1 >= 95 else 128,  # how many keys above the mean size the percentile may be; a hint
    )  # fmt: skip
    packed = not interpreted and _packs(device)
    constants = (units, first, second, columns, act, add, factor < 0, packed, interpreted)
    return _Plan(numbers, constants, warps, _compiled_for(device, constants))


@functools.cache
def _compiled_for(device: torch.device, constants: tuple[Any, ...]) -> dict[tuple[Any, ...], Any]:
    """Kernels that differ only in numbers are the same."""
    return {}


def _signed(value: int) -> int:
    """The lower 32 bits as a number that always has the same type."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _packs(device: torch.device) -> bool:
    """Whether the device compares two bf16 in one instruction: Hopper and later."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


#: Two programs on a multiprocessor, so that one counts while the other waits for its sum.
_REGISTERS = {8: 128}


def shape_of(units: int) -> tuple[int, int, int, int]:
    """Lines of the first and the second block (powers of two, the second perhaps 0), words in a line, and warps.

    A thread holds whole columns, so that counting needs one exchange between threads and not one per block.
    """
    words = units // 2
    warps = 4 if words <= 1024 else 8
    columns = min(128 * warps, _power_of_two(words))
    lines = math.ceil(words / columns)
    first = 1 << (lines.bit_length() - 1)
    rest = lines - first
    return first, _power_of_two(rest) if rest else 0, columns, warps


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


# What is counted: signed values from 0 on, magnitudes, their deviations from a median, or plain keys (numbers of units).
_MAGNITUDE = tl.constexpr(0)
_SIGNED = tl.constexpr(1)
_DEVIATION = tl.constexpr(2)
_PLAIN = tl.constexpr(3)


@triton.jit
def _keys(x, median, WHAT: tl.constexpr, BY_HAND: tl.constexpr):
    """The 15-bit keys that are compared, two to a word."""
    if WHAT == _MAGNITUDE:
        return x & _BOTH
    if WHAT == _SIGNED:
        # What is negative is below every probe, as 0 is.
        return x & ~(((x >> 15) & _ONES) * 0x7FFF) & _BOTH
    if WHAT == _DEVIATION:
        m = x & _BOTH
        away = _pack(tl.abs(_low(m) - _float(median)), tl.abs(_high(m) - _float(median)), False, BY_HAND)
        return tl.where(m == _BOTH, _BOTH, away)
    return x


@triton.jit
def _sum_of_pairs(a, b):
    return tl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _by_thread(x):
    """Lines × columns as lines × threads × a thread's part of a line, so that sums over the first and last axis need no exchange."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // 4, 4))


@triton.jit
def _under(x, probe, median, WHAT: tl.constexpr, PACKED: tl.constexpr, BY_HAND: tl.constexpr):
    """By thread, how many keys are not above the probe."""
    word = probe | (probe << 16)
    if PACKED and WHAT != _PLAIN:
        # Two bf16 in one instruction: 1.0 or 0.0 in each half, and their sums, exact up to 256.
        if WHAT == _SIGNED:
            flags = tl.inline_asm_elementwise(
                "set.le.bf16x2.bf16x2 $0, $1, $2;", "=r,r,r", [x, word], dtype=tl.int32, is_pure=True, pack=1
            )
        elif WHAT == _MAGNITUDE:
            flags = tl.inline_asm_elementwise(
                "{.reg .b32 t; abs.bf16x2 t, $1; set.le.bf16x2.bf16x2 $0, t, $2;}",
                "=r,r,r", [x, word], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            flags = tl.inline_asm_elementwise(
                "{.reg .b32 t, u; abs.bf16x2 t, $1; sub.rn.bf16x2 u, t, $3; abs.bf16x2 t, u; set.le.bf16x2.bf16x2 $0, t, $2;}",
                "=r,r,r,r", [x, word, median | (median << 16)], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        total = tl.reduce(tl.reduce(_by_thread(flags), 2, _sum_of_pairs), 0, _sum_of_pairs)
        return (_low(total) + _high(total)).to(tl.int32)
    # The highest bit of a half stays where the key is not above the probe.
    flags = (((word | -0x7FFF8000) - _keys(x, median, WHAT, BY_HAND)) >> 15) & _ONES
    total = tl.sum(tl.sum(_by_thread(flags), axis=2), axis=0)
    return (total & 0xFFFF) + ((total >> 16) & 0xFFFF)


@triton.jit
def _count(
    x0, x1, probe, median, WHAT: tl.constexpr, SECOND: tl.constexpr, PACKED: tl.constexpr, BY_HAND: tl.constexpr
):
    found = _under(x0, probe, median, WHAT, PACKED, BY_HAND)
    if SECOND > 0:
        found += _under(x1, probe, median, WHAT, PACKED, BY_HAND)
    return found


@triton.jit
def _halved(rank, count, lo, hi, probe, upper):
    """The half of (lo, hi] that holds the rank, and the next probe: `upper` after a first probe that was not too high, else the middle.

    There is no more `upper` then. Kept short, because every thread waits for it between two counts.
    """
    left = rank < count
    hi = tl.where(left, probe, hi)
    lo = tl.where(left, lo, probe)
    following = tl.where(left | (upper < 0), (lo + hi) >> 1, upper)
    return lo, hi, tl.maximum(tl.minimum(following, hi - 1), lo + 1)


@triton.jit
def _select(
    x0, x1, rank, lo, hi, guess, width, median, WHAT: tl.constexpr, SECOND: tl.constexpr, PACKED: tl.constexpr, BY_HAND: tl.constexpr
):  # fmt: skip
    """The key of that rank (from 0) among x0 and x1, in (lo, hi]. The first probes are `width` around the guess; then bisection.

    Bisection, not interpolation: that needs fewer counts, but more work between two counts, which takes the time.
    """
    probe = tl.maximum(tl.minimum(guess - width, hi - 1), lo + 1)
    upper = tl.cast(guess + width, tl.int32)
    while hi - lo > 1:
        count = tl.sum(_count(x0, x1, probe, median, WHAT, SECOND, PACKED, BY_HAND), axis=0)
        lo, hi, probe = _halved(rank, count, lo, hi, probe, upper)
        upper = tl.cast(-1, tl.int32)
    return hi


@triton.jit
def _select_two(
    x0, x1, rank, guess, width, place, guess_place, width_place, keys, SECOND: tl.constexpr, PACKED: tl.constexpr, BY_HAND: tl.constexpr
):  # fmt: skip
    """The magnitude of one rank and the signed value of another, searched together.

    Also how many values are not above the latter. Together, because that halves the waits.
    """
    lo = tl.cast(-1, tl.int32)
    hi = tl.cast(_INFINITY, tl.int32)
    low, high = lo, hi
    upto = tl.cast(keys, tl.int32)
    zero = tl.cast(0, tl.int32)
    probe, upper = tl.maximum(guess - width, 0), tl.cast(guess + width, tl.int32)
    signed, upper_signed = tl.maximum(guess_place - width_place, 0), tl.cast(guess_place + width_place, tl.int32)
    probe, signed = tl.minimum(probe, hi - 1), tl.minimum(signed, hi - 1)
    while (hi - lo > 1) | (high - low > 1):
        # A finished search continues with a probe at its end, which changes nothing.
        found = _count(x0, x1, probe, zero, _MAGNITUDE, SECOND, PACKED, BY_HAND)
        both = tl.sum(found + (_count(x0, x1, signed, zero, _SIGNED, SECOND, PACKED, BY_HAND) << 16), axis=0)
        second = (both >> 16) & 0xFFFF
        upto = tl.where(place < second, second, upto)
        lo, hi, probe = _halved(rank, both & 0xFFFF, lo, hi, probe, upper)
        low, high, signed = _halved(place, second, low, high, signed, upper_signed)
        upper = tl.cast(-1, tl.int32)
        upper_signed = tl.cast(-1, tl.int32)
    return hi, high, upto


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _low(x):
    """The float in a word's lower half; a bf16 is the upper half of a float."""
    return (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(x):
    return (x & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bits(value, BY_HAND: tl.constexpr):
    """A float rounded to bf16 (nearest, ties to even), as 16 bits of a word. By hand under the interpreter, which would truncate."""
    if BY_HAND:
        whole = value.to(tl.int32, bitcast=True)
        return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16) & 0xFFFF
    return value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _pack(low, high, PACKED: tl.constexpr, BY_HAND: tl.constexpr):
    if PACKED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    return _bits(low, BY_HAND) | (_bits(high, BY_HAND) << 16)


@triton.jit
def _times(a, b, PACKED: tl.constexpr, BY_HAND: tl.constexpr):
    """The products of two words' halves. The product of two bf16 is exact in float32, so it is rounded once either way."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return _pack(_low(a) * _low(b), _high(a) * _high(b), PACKED, BY_HAND)


@triton.jit
def _key(value):
    """The key at or just below a value that is not negative."""
    return value.to(tl.int32, bitcast=True) >> 16


@triton.jit
def _float(key):
    return (key << 16).to(tl.float32, bitcast=True)


@triton.jit
def _over(a, b, PACKED: tl.constexpr):
    """a / b; the quick reciprocal is right to 1 part in 10⁷, which a rounding to bf16 seldom shows."""
    if PACKED:
        return a * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )
    return a / b


@triton.jit
def _act(g, ACT: tl.constexpr, PACKED: tl.constexpr):
    if ACT == "silu":
        g = _over(g, 1 + tl.exp2(g * -1.4426950408889634), PACKED)
    elif ACT == "gelu":
        g = g * 0.5 * (1 + tl.erf(g * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # (1 + tanh(x)) / 2 = 1 / (1 + exp(−2x))
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        g = _over(g, 1 + tl.exp2(inner * -2.8853900817779268), PACKED)
    return g


@triton.jit
def _words(pointer, offsets, there, ACT: tl.constexpr, PACKED: tl.constexpr, BY_HAND: tl.constexpr):
    """The activations, two to a word; the largest key, twice, beyond the last unit."""
    x = tl.load(pointer + offsets, mask=there, other=0)
    if ACT != "none":
        x = _pack(_act(_low(x), ACT, PACKED), _act(_high(x), ACT, PACKED), PACKED, BY_HAND)
    return tl.where(there, x, _BOTH)


@triton.jit
def _tied(x, offsets, threshold):
    """The unit where the magnitude is the threshold, the largest key elsewhere."""
    even = tl.where((x & 0x7FFF) == threshold, 2 * offsets, _LARGEST)
    odd = tl.where(((x >> 16) & 0x7FFF) == threshold, 2 * offsets + 1, _LARGEST)
    return even | (odd << 16)


@triton.jit
def _smallest_above(x, key):
    """By word, the smallest value above that of a key, as a float; infinity where there is none."""
    edge = _float(key)
    low = tl.where(_low(x) > edge, _low(x), float("inf"))
    return tl.minimum(low, tl.where(_high(x) > edge, _high(x), float("inf")))


@triton.jit
def _smallest_negative(x, there):
    """The smallest magnitude of the negative values, by word."""
    m = x & _BOTH
    low = tl.where(there & (_low(x) < 0), m & 0x7FFF, _LARGEST)
    high = tl.where(there & (_high(x) < 0), (m >> 16) & 0x7FFF, _LARGEST)
    return tl.minimum(low, high)


@triton.jit
def _new(old, sixteen, unit, last, top, bottom, ADD: tl.constexpr):
    """`old`, or what is drawn in its place where it is among the smallest: by magnitude and then by unit, up to `last`."""
    chosen = ((_key(tl.abs(old)) << 15) | unit) <= last
    # 16 bits of the hash behind a 1: a float in [1, 2)
    share = (sixteen | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    drawn = share * tl.where(old < 0, bottom, top)
    new = drawn
    if ADD:
        new = old + drawn
    return tl.where(chosen, new, old)


# Numbers are not specialised for 1 or multiples of 16, because the compiled kernel is reused with others.
# Over 60 lines: a kernel is one function.
@triton.jit(do_not_specialize=["tokens", "seed_low", "seed_high", "least", "most", "place", "far"])
def _kernel(
    values, up, positions, seeds, out, tokens, seed_low, seed_high, factor, least, most, place, between, far,
    N: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, COLUMNS: tl.constexpr,
    ACT: tl.constexpr, ADD: tl.constexpr, BY_FRACTION: tl.constexpr, PACKED: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = N // 2
    token = tl.program_id(0).to(tl.int64)
    values += token * WORDS
    column = tl.arange(0, COLUMNS)[None, :]
    o0 = tl.arange(0, FIRST)[:, None] * COLUMNS + column
    t0 = o0 < WORDS
    x0 = _words(values, o0, t0, ACT, PACKED, BY_HAND)
    o1, t1, x1 = o0, t0, x0
    if SECOND > 0:
        o1 = FIRST * COLUMNS + tl.arange(0, SECOND)[:, None] * COLUMNS + column
        t1 = o1 < WORDS
        x1 = _words(values, o1, t1, ACT, PACKED, BY_HAND)

    # The mean size is only a hint, so every second unit is enough; the least value is |min a|.
    size = tl.sum(tl.where(t0, tl.abs(_high(x0)), 0.0), axis=0)
    least_value = tl.min(tl.where(t0, tl.minimum(_low(x0), _high(x0)), 0.0), axis=0)
    if SECOND > 0:
        size += tl.sum(tl.where(t1, tl.abs(_high(x1)), 0.0), axis=0)
        least_value = tl.minimum(least_value, tl.min(tl.where(t1, tl.minimum(_low(x1), _high(x1)), 0.0), axis=0))
    typical = _key(tl.sum(size, axis=0) / WORDS)
    bottom = -tl.min(least_value, axis=0)

    half: tl.constexpr = (N - 1) // 2
    zero = tl.cast(0, tl.int32)
    if BY_FRACTION:
        k = tl.cast(least, tl.int32)
        threshold, high, upto = _select_two(
            x0, x1, k - 1, typical - 160, 256, place, typical + far, 256, N, SECOND, PACKED, BY_HAND
        )
        free = tl.cast(0, tl.int1)
    else:
        median, high, upto = _select_two(
            x0, x1, half, typical - 64, 256, place, typical + far, 256, N, SECOND, PACKED, BY_HAND
        )
        # First the median deviation, then the k-th magnitude, which is a deviation from 0: one loop serves for both.
        k = tl.cast(half + 1, tl.int32)
        free = tl.cast(0, tl.int1)
        lo = tl.cast(-1, tl.int32)
        hi = tl.cast(_INFINITY, tl.int32)
        centre = median
        guess = median - 64
        threshold = median
        for search in range(2):
            threshold = _select(x0, x1, k - 1, lo, hi, guess, 128, centre, _DEVIATION, SECOND, PACKED, BY_HAND)
            if search == 0:
                epsilon = _float(threshold) * factor
                # The largest key whose value is smaller than epsilon; −1 where there is none.
                edge = (epsilon.to(tl.int32, bitcast=True) - 1) >> 16
                count = tl.sum(_count(x0, x1, tl.maximum(edge, 0), zero, _MAGNITUDE, SECOND, PACKED, BY_HAND), axis=0)
                count = tl.where(edge < 0, 0, count)
                k = tl.minimum(tl.maximum(count, least), most)
                # Where the share is within its bounds, the units below epsilon are chosen, and no search is needed.
                free = k == count
                lo = tl.where(count > k, -1, edge)
                hi = tl.where(free, edge + 1, tl.where(count > k, edge, _INFINITY))
                # Near zero values are spread evenly, so k-th / median ≈ k / half.
                guess = _key(_float(median) * (2.0 * k / N))
                centre = zero

    # Ties: the first units are taken, up to this one. What lies below epsilon has all of them.
    last_tie = tl.cast(-1, tl.int32)
    if free == 0:
        below = tl.sum(_count(x0, x1, tl.maximum(threshold - 1, 0), zero, _MAGNITUDE, SECOND, PACKED, BY_HAND), axis=0)
        ties = k - tl.where(threshold > 0, below, 0)
        i0 = _tied(x0, o0, threshold)
        i1 = i0
        if SECOND > 0:
            i1 = _tied(x1, o1, threshold)
        # Where all ties are taken, this finds the last one.
        last_tie = _select(
            i0, i1, ties - 1, last_tie, tl.cast(N, tl.int32), N // 4, N // 4, zero, _PLAIN, SECOND, PACKED, BY_HAND
        )

    # The next value up is the same one where there are several of it, and else the smallest above.
    following = _float(high)
    if upto == place + 1:
        after = tl.min(tl.where(t0, _smallest_above(x0, high), float("inf")), axis=0)
        if SECOND > 0:
            after = tl.minimum(after, tl.min(tl.where(t1, _smallest_above(x1, high), float("inf")), axis=0))
        above = tl.min(after, axis=0)
        following = tl.where(above == float("inf"), following, above)
    a = _float(high)
    if high == 0:
        # The percentile's place may hold a negative value while the next is positive: then the largest negative one is a part of it.
        nearest = tl.min(_smallest_negative(x0, t0), axis=0)
        below_zero = tl.sum((t0 & (_low(x0) < 0)).to(tl.int32) + (t0 & (_high(x0) < 0)).to(tl.int32), axis=0)
        if SECOND > 0:
            nearest = tl.minimum(nearest, tl.min(_smallest_negative(x1, t1), axis=0))
            below_zero += tl.sum((t1 & (_low(x1) < 0)).to(tl.int32) + (t1 & (_high(x1) < 0)).to(tl.int32), axis=0)
        a = tl.where(place == tl.sum(below_zero, axis=0) - 1, -_float(tl.min(nearest, axis=0)), a)
    top = tl.maximum(a + (following - a) * between, 0.0)

    position = token % tokens
    if positions is not None:
        position = tl.load(positions + token).to(tl.int64)
    low = seed_low.to(tl.uint32)
    upper = seed_high.to(tl.uint32)
    if seeds is not None:
        own = tl.load(seeds + token // tokens).to(tl.int64)
        low = (own & 0xFFFFFFFF).to(tl.uint32)
        upper = ((own >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = _mix(position.to(tl.uint32) * 0x9E3779B9 + _mix(low + _mix(upper)))
    HAS_UP: tl.constexpr = up is not None
    factors = out
    if HAS_UP:
        factors = up + token * WORDS
    out += token * WORDS
    last = (threshold << 15) + last_tie
    # Read again, line by line: the code is so short that it stays in the instruction cache, which saves more than reading costs.
    line = tl.arange(0, COLUMNS)
    for at in range(0, WORDS, COLUMNS):
        offsets = at + line
        there = offsets < WORDS
        x = _words(values, offsets, there, ACT, PACKED, BY_HAND)
        hashed = _mix(key + offsets.to(tl.uint32) * 0x9E3779B9)
        even = _new(_low(x), ((hashed & 0xFFFF) << 7).to(tl.int32), 2 * offsets, last, top, -bottom, ADD)
        odd = _new(_high(x), ((hashed >> 16) << 7).to(tl.int32), 2 * offsets + 1, last, top, -bottom, ADD)
        word = _pack(even, odd, PACKED, BY_HAND)
        if HAS_UP:
            word = _times(word, tl.load(factors + offsets, mask=there, other=0), PACKED, BY_HAND)
        tl.store(out + offsets, word, mask=there)
