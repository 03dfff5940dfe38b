"""Received attention on Hopper GPUs, written with the chip's own instructions: tiles come by TMA, scores by asynchronous wgmma.

The sum needs one exponential per score and one matrix product, which take about equally long on this chip. So several warp groups work on a
multiprocessor, and while one takes exponentials the tensor cores multiply for another. Scores are held as queries × keys. So a query's
log-sum-exp is two numbers per thread, a key's sum is added inside a thread, and threads exchange data only at the end.

There are two arrangements, with the same additions in the same order and so the same bits. Short prompts: programs of one warp group, three
per multiprocessor. Long prompts: three warp groups, each with a block of keys, share the query tiles that a fourth fetches, and take turns
at the tensor cores. Results of each attempt are in benchmarks/tried.md.
"""

# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# (a jitted function is Triton's language rather than Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # an older Triton, or one whose experimental parts have moved
    gluon = None

_LOG2E = 1.4426950408889634
_C_LOG2E = tl.constexpr(_LOG2E)
#: Queries in a tile; by head size, the keys of a warp group and the tiles fetched ahead.
_BM = 64
_SHAPES = {64: (128, 4), 128: (128, 3), 256: (64, 2)}
#: From how many keys on three warp groups with shared tiles are quicker; by head size, the tiles fetched ahead.
_LONG = 16384
_SHARED = {64: 6, 128: 4}
#: Places past the last query that a tile may reach.
_PAST = 128
#: Heads side by side in long prompts: few, so that their queries stay in the cache.
_SIDE = 2
#: The last heads are taken together, so that the last programs are small.
_LAST = 8


def fits(q: Tensor, k: Tensor) -> bool:
    """Whether these kernels can run: a Hopper GPU, 16-bit floats, a known head size, a Triton that compiles them."""
    return (
        gluon is not None
        and q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in _SHAPES
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and 2 * q.shape[0] * q.shape[1] * k.shape[2] < 1 << 31  # places are counted in 32 bits
    )


def sums(q: Tensor, k: Tensor, scale: float, members: Tensor, end: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of each set, and each key's own share of its own attention in the last; causal, no key hidden.

    `end`: the place after each row's last member. Nothing is added after it.
    """
    batch, heads, queries, dim = q.shape
    keys, n_sets = k.shape[2], members.shape[1]
    out = torch.empty(batch, n_sets, heads, keys, device=q.device)
    own = torch.zeros(batch, heads, keys, device=q.device)  # keys that are not queries of this call stay 0
    level = torch.empty(batch, heads, queries + _PAST, device=q.device)
    weights = torch.empty(batch, queries + _PAST, device=q.device)
    _prepare[(batch * heads, triton.cdiv(queries + _PAST, 1024))](
        lse, members.contiguous().view(torch.int8), level, weights, heads, queries, SETS=n_sets, PAST=_PAST, BLOCK=1024
    )
    long = keys >= _LONG and dim in _SHARED
    bn, buffers = (128, _SHARED[dim]) if long else _SHAPES[dim]
    q_desc, q_at = _described(q, _BM)
    k_desc, k_at = _described(k, bn)
    # Programs start in the order of their numbers: heads side by side, and the first keys first, because they have the most work.
    pairs = batch * heads
    early = max(0, pairs - _LAST) // _SIDE * _SIDE if long else 0
    numbers = (scale * _LOG2E, queries, keys, heads, heads // k.shape[1], _SIDE, early, pairs, *q_at, *k_at)
    pointers = (q_desc, k_desc, level, weights, end, out, own)
    constants = {"SETS": n_sets, "BM": _BM, "BN": bn, "D": dim, "NBUF": buffers, "PAST": _PAST}
    if long:
        grid = (pairs * triton.cdiv(keys, 3 * bn),)
        _long[grid](*pointers, *numbers, **constants, num_warps=4)
    else:
        grid = (pairs * triton.cdiv(keys, bn),)
        _short[grid](*pointers, *numbers, **constants, num_warps=4, maxnreg=168)
    return out, own


def _described(x: Tensor, rows: int) -> tuple[object, tuple[int, int, int]]:
    """A TMA descriptor of rows, the distance in rows between batch rows and between heads, and the columns of a head."""
    batch, heads, tokens, dim = x.shape
    layout = gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)
    turned = x.transpose(1, 2)
    if turned.is_contiguous() and x.data_ptr() % 16 == 0:
        # As models leave it: one row per token, its heads side by side.
        shape = [batch * tokens, heads * dim]
        return TensorDescriptor(turned, shape, [heads * dim, 1], [rows, dim], layout), (tokens, 0, dim)
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    shape = [batch * heads * tokens, dim]
    return TensorDescriptor(x, shape, [dim, 1], [rows, dim], layout), (heads * tokens, tokens, 0)


@triton.jit(do_not_specialize=["HEADS", "QUERIES"])
def _prepare(lse, members, level, weights, HEADS, QUERIES, SETS: tl.constexpr, PAST: tl.constexpr, BLOCK: tl.constexpr):
    """By query what the kernels read: its log-sum-exp in base 2, negative, and its weight in the second set.

    A query outside the set, or past the last, has −∞, so that its shares are 0.
    """
    pair = tl.program_id(0).to(tl.int64)
    b, h = pair // HEADS, pair % HEADS
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = rows < QUERIES
    kept = rows < QUERIES + PAST
    member = tl.load(members + b * SETS * QUERIES + rows, mask=there, other=0) != 0
    found = tl.load(lse + pair * QUERIES + rows, mask=there, other=0.0) * -_C_LOG2E
    tl.store(level + pair * (QUERIES + PAST) + rows, tl.where(member, found, float("-inf")), mask=kept)
    if SETS == 2:
        second = tl.load(members + (b * SETS + 1) * QUERIES + rows, mask=there, other=0).to(tl.float32)
        tl.store(weights + b * (QUERIES + PAST) + rows, second, mask=kept & (h == 0))


if gluon is not None:

    @gluon.jit
    def _exp2(x):
        # With .ftz: otherwise every value is scaled and scaled back for numbers too small to matter.
        return gl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
        )

    @gluon.jit
    def _fold(p, BM: gl.constexpr, BN: gl.constexpr):
        """The sum over a thread's two rows of a tile; no exchange between threads."""
        return gl.sum(gl.reshape(p, (BM // 16, 2, 8, BN)), axis=1)

    @gluon.jit
    def _total(folded, WARPS: gl.constexpr):
        line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        return gl.convert_layout(gl.sum(gl.sum(folded, 0), 0), line)

    @gluon.jit
    def _levels(levels, weights, rows, SETS: gl.constexpr):
        """What `_prepare` has left for these queries."""
        level = gl.load(levels + rows)
        second = level
        if SETS == 2:
            second = gl.load(weights + rows)
        return level, second

    @gluon.jit
    def _diagonal(
        s, level, second, places, keys, own, count, a, b, c, SETS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr
    ):
        """A tile with scores on both sides of the diagonal. The diagonal is stored, with the weights of the last set.

        Places and keys are counted from the first key, of which there are `count`.
        """
        p = _exp2(s * c + level[:, None])
        later = gl.where(places[:, None] > keys[None, :], p, 0.0)
        a += _fold(later, BM, BN)
        mine = gl.where(places[:, None] == keys[None, :], p, 0.0)
        if SETS == 2:
            b += _fold(later * second[:, None], BM, BN)
            mine = mine * second[:, None]
        # A key meets itself in one tile.
        line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        at = gl.min(keys, 0) + gl.arange(0, BN, line)
        met = gl.min(places, 0)
        gl.store(own + at, _total(_fold(mine, BM, BN), 4), mask=(at >= met) & (at < met + BM) & (at < count))
        return a, b

    @gluon.jit
    def _full(s, level, second, a, b, c, SETS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
        p = _exp2(s * c + level[:, None])
        a += _fold(p, BM, BN)
        if SETS == 2:
            b += _fold(p * second[:, None], BM, BN)
        return a, b

    @gluon.jit
    def _task(side, early, pairs, blocks):
        """Which batch row and head a program is for, and which block of keys: the early ones a few at a time, the others all together."""
        index = gl.program_id(0)
        first = index // (side * blocks) * side
        inside = index % (side * blocks)
        width = side
        if index >= early * blocks:
            first = early
            inside = index - early * blocks
            width = pairs - early
        return first + inside % width, inside // width

    @gluon.jit
    def _placed(index, heads, groups, queries, keys, q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h, first):
        """Where a program's tiles lie, from its batch row and head and its first key."""
        b = index // heads
        h = index % heads
        kv = h // groups
        # The first query that is not before the first key.
        begin = gl.maximum(first - (keys - queries), 0)
        return (
            b, h, begin,
            b * q_row_b + h * q_row_h + begin, h * q_col_h, b * k_row_b + kv * k_row_h + first, kv * k_col_h,
        )  # fmt: skip

    # ---- short: a program is one warp group

    # Over 60 lines: a kernel is one function.
    @gluon.jit
    def _short(
        q_desc, k_desc, levels, weights, ends, out, own, c, queries, keys, heads, groups, side, early, pairs,
        q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h,
        SETS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, NBUF: gl.constexpr, PAST: gl.constexpr, num_warps: gl.constexpr,
    ):  # fmt: skip
        mma: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BN, 16]
        )
        DIAGONAL: gl.constexpr = BN // BM
        pair, block = _task(side, early, pairs, gl.cdiv(keys, BN))
        first = block * BN
        b, h, begin, q_row, q_col, k_row, k_col = _placed(
            pair, heads, groups, queries, keys, q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h, first
        )
        left = gl.load(ends + b) - begin
        ahead = keys - queries + begin - first
        k_tile = gl.allocate_shared_memory(q_desc.dtype, [BN, D], k_desc.layout)
        q_tiles = gl.allocate_shared_memory(q_desc.dtype, [NBUF, BM, D], q_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [NBUF, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for i in gl.static_range(NBUF):
            mbarrier.init(ready.index(i), count=1)
        mbarrier.init(k_ready, count=1)
        zero = gl.zeros((BM, BN), gl.float32, mma)
        a = _fold(zero, BM, BN)
        b_sum = a
        tiles = gl.where(left > 0, gl.maximum(gl.cdiv(left, BM), DIAGONAL), 0)
        line: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
        column = gl.arange(0, BN, line)
        there = first + column < keys
        if tiles > 0:
            mbarrier.expect(k_ready, BN * D * 2)
            tma.async_copy_global_to_shared(k_desc, [k_row, k_col], k_ready, k_tile)
            for i in gl.static_range(NBUF):
                mbarrier.expect(ready.index(i), BM * D * 2, pred=i < tiles)
                tma.async_copy_global_to_shared(
                    q_desc, [q_row + i * BM, q_col], ready.index(i), q_tiles.index(i), pred=i < tiles
                )
            rows = gl.arange(0, BM, gl.SliceLayout(1, mma))
            places = gl.arange(0, BN, gl.SliceLayout(0, mma))
            levels += (b * heads + h) * (queries + PAST) + begin
            weights += b * (queries + PAST) + begin
            own += (b * heads + h) * keys + first
            mbarrier.wait(k_ready, 0)
            turned = k_tile.permute((1, 0))
            for t in range(DIAGONAL):
                mbarrier.wait(ready.index(t % NBUF), (t // NBUF) & 1)
                s = warpgroup_mma(q_tiles.index(t % NBUF), turned, zero, use_acc=False, is_async=True)
                level, second = _levels(levels, weights, t * BM + rows, SETS)
                s = warpgroup_mma_wait(0, [s])
                mbarrier.expect(ready.index(t % NBUF), BM * D * 2, pred=t + NBUF < tiles)
                tma.async_copy_global_to_shared(
                    q_desc, [q_row + (t + NBUF) * BM, q_col], ready.index(t % NBUF), q_tiles.index(t % NBUF), pred=t + NBUF < tiles
                )  # fmt: skip
                a, b_sum = _diagonal(
                    s, level, second, ahead + t * BM + rows, places, own, keys - first, a, b_sum, c, SETS, BM, BN
                )
            slot = gl.to_tensor(DIAGONAL % NBUF)
            phase = gl.to_tensor(DIAGONAL // NBUF)
            for t in range(DIAGONAL, tiles):
                mbarrier.wait(ready.index(slot), phase)
                s = warpgroup_mma(q_tiles.index(slot), turned, zero, use_acc=False, is_async=True)
                level, second = _levels(levels, weights, t * BM + rows, SETS)
                s = warpgroup_mma_wait(0, [s])
                mbarrier.expect(ready.index(slot), BM * D * 2, pred=t + NBUF < tiles)
                tma.async_copy_global_to_shared(
                    q_desc, [q_row + (t + NBUF) * BM, q_col], ready.index(slot), q_tiles.index(slot), pred=t + NBUF < tiles
                )  # fmt: skip
                a, b_sum = _full(s, level, second, a, b_sum, c, SETS, BM, BN)
                wrapped = slot == NBUF - 1
                slot = gl.where(wrapped, 0, slot + 1)
                phase = gl.where(wrapped, phase ^ 1, phase)
        out += (b * SETS * heads + h) * keys + first
        gl.store(out + column, _total(a, num_warps), mask=there)
        if SETS == 2:
            gl.store(out + heads * keys + column, _total(b_sum, num_warps), mask=there)

    # ---- long: three warp groups that add, one that fetches

    @gluon.jit
    def _fetch(
        q_desc, k_desc, q_tiles, k_tiles, ready, free, k_ready, tiles, q_row, q_col, k_row, k_col,
        BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, NBUF: gl.constexpr,
    ):  # fmt: skip
        mbarrier.expect(k_ready, 3 * BN * D * 2)
        for i in gl.static_range(3):
            tma.async_copy_global_to_shared(k_desc, [k_row + i * BN, k_col], k_ready, k_tiles.index(i))
        for t in range(tiles):
            slot = t % NBUF
            mbarrier.wait(free.index(slot), ((t // NBUF) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), BM * D * 2)
            tma.async_copy_global_to_shared(q_desc, [q_row + t * BM, q_col], ready.index(slot), q_tiles.index(slot))

    @gluon.jit
    def _scored(
        t, q_tiles, turned, ready, free, turns, turn, levels, weights,
        WHICH: gl.constexpr, IN_TURN: gl.constexpr, SETS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, NBUF: gl.constexpr,
    ):  # fmt: skip
        mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
        rows = t * BM + gl.arange(0, BM, gl.SliceLayout(1, mma))
        zero = gl.zeros((BM, BN), gl.float32, mma)
        level, second = _levels(levels, weights, rows, SETS)
        slot = t % NBUF
        mbarrier.wait(ready.index(slot), (t // NBUF) & 1)
        # Two products at once would each take twice as long; then all groups compute exponentials while the tensor cores wait.
        if IN_TURN:
            # The first group's first turn waits for no other.
            mbarrier.wait(turns.index(WHICH), (turn & 1) ^ (WHICH == 0))
        s = warpgroup_mma(q_tiles.index(slot), turned, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        if IN_TURN:
            mbarrier.arrive(turns.index((WHICH + 1) % 3), count=1)
        mbarrier.arrive(free.index(slot), count=1)
        return s, level, second, rows

    @gluon.jit
    def _add(
        q_tiles, k_tiles, totals, ready, free, turns, k_ready, levels, weights, own, tiles, ahead, count, c,
        WHICH: gl.constexpr, SETS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, NBUF: gl.constexpr,
    ):  # fmt: skip
        mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
        # Each starts with the tile of its own first key, so the additions equal those of the short arrangement. Not where a cache's length
        # is no multiple of a tile.
        before = gl.maximum(WHICH * BN - ahead, 0) // BM
        diagonal = gl.cdiv(gl.maximum((WHICH + 1) * BN - ahead, 0), BM)
        places = WHICH * BN + gl.arange(0, BN, gl.SliceLayout(0, mma))
        a = _fold(gl.zeros((BM, BN), gl.float32, mma), BM, BN)
        b = a
        turned = k_tiles.index(WHICH).permute((1, 0))
        for t in range(gl.minimum(before, tiles)):
            mbarrier.wait(ready.index(t % NBUF), (t // NBUF) & 1)
            mbarrier.arrive(free.index(t % NBUF), count=1)
        mbarrier.wait(k_ready, 0)
        for t in range(before, gl.minimum(diagonal, tiles)):
            s, level, second, rows = _scored(
                t, q_tiles, turned, ready, free, turns, 0, levels, weights, WHICH, False, SETS, BM, BN, NBUF
            )
            a, b = _diagonal(s, level, second, ahead + rows, places, own, count, a, b, c, SETS, BM, BN)
        # They take turns once all three have whole tiles.
        common = gl.cdiv(gl.maximum(3 * BN - ahead, 0), BM)
        for t in range(diagonal, gl.minimum(common, tiles)):
            s, level, second, _ = _scored(
                t, q_tiles, turned, ready, free, turns, 0, levels, weights, WHICH, False, SETS, BM, BN, NBUF
            )
            a, b = _full(s, level, second, a, b, c, SETS, BM, BN)
        for t in range(common, tiles):
            turn = t - common
            s, level, second, _ = _scored(
                t, q_tiles, turned, ready, free, turns, turn, levels, weights, WHICH, True, SETS, BM, BN, NBUF
            )
            a, b = _full(s, level, second, a, b, c, SETS, BM, BN)
        totals.index(WHICH * SETS).store(_total(a, 4))
        if SETS == 2:
            totals.index(WHICH * SETS + 1).store(_total(b, 4))

    @gluon.jit
    def _long(
        q_desc, k_desc, levels, weights, ends, out, own, c, queries, keys, heads, groups, side, early, pairs,
        q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h,
        SETS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, NBUF: gl.constexpr, PAST: gl.constexpr, num_warps: gl.constexpr,
    ):  # fmt: skip
        pair, block = _task(side, early, pairs, gl.cdiv(keys, 3 * BN))
        first = block * (3 * BN)
        b, h, begin, q_row, q_col, k_row, k_col = _placed(
            pair, heads, groups, queries, keys, q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h, first
        )
        left = gl.load(ends + b) - begin
        ahead = keys - queries + begin - first
        k_tiles = gl.allocate_shared_memory(q_desc.dtype, [3, BN, D], k_desc.layout)
        q_tiles = gl.allocate_shared_memory(q_desc.dtype, [NBUF, BM, D], q_desc.layout)
        totals = gl.allocate_shared_memory(gl.float32, [3 * SETS, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ready = gl.allocate_shared_memory(gl.int64, [NBUF, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [NBUF, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        turns = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(3):
            mbarrier.init(turns.index(i), count=1)
        for i in gl.static_range(NBUF):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(free.index(i), count=3)
        mbarrier.init(k_ready, count=1)
        tiles = gl.where(left > 0, gl.cdiv(left, BM), 0)
        levels += (b * heads + h) * (queries + PAST) + begin
        weights += b * (queries + PAST) + begin
        own += (b * heads + h) * keys + first
        count = keys - first
        # Registers: every thread starts with 128; the fetching warps give most of theirs to the adding ones.
        gl.warp_specialize(
            [
                (_add, (q_tiles, k_tiles, totals, ready, free, turns, k_ready, levels, weights, own, tiles, ahead, count, c, 0, SETS, BM, BN, NBUF)),
                (_add, (q_tiles, k_tiles, totals, ready, free, turns, k_ready, levels, weights, own, tiles, ahead, count, c, 1, SETS, BM, BN, NBUF)),
                (_add, (q_tiles, k_tiles, totals, ready, free, turns, k_ready, levels, weights, own, tiles, ahead, count, c, 2, SETS, BM, BN, NBUF)),
                (_fetch, (q_desc, k_desc, q_tiles, k_tiles, ready, free, k_ready, tiles, q_row, q_col, k_row, k_col, BM, BN, D, NBUF)),
            ],
            [4, 4, 1],
            [152, 152, 40],
        )  # fmt: skip
        line: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
        column = gl.arange(0, BN, line)
        out += (b * SETS * heads + h) * keys
        for i in gl.static_range(3):
            place = first + i * BN + column
            for which in gl.static_range(SETS):
                total = totals.index(i * SETS + which).load(line)
                gl.store(out + which * heads * keys + place, total, mask=place < keys)
