"""Which weights of a tile drop, at a draw for eight of them: the counter of onchip/philox.py, shared between lanes.

A warpgroup holds a tile of 64 x 64 as its products leave it: warp w has rows 16 w + 8 h + r, and the lane 4 r + c of it
the columns 8 g + 2 c + {0, 1}. A draw serves eight neighbouring keys, and these lie in several lanes: in the four with
the same r where keys are columns (forward), in the eight with the same c where they are rows (backward). Each thread
makes 4 of a warpgroup's 512 draws. Their 32 lanes of 16 bits become 32 bits, set for what drops, two lanes at a time:

    min(min(lane, threshold) - threshold, 1)     in halves of a register; 0 if the lane is not below the threshold

The bits of neighbouring columns lie 16 apart, those of other columns in nibbles. Then the threads that need a draw
exchange what they need of their words, half of it in each step, as a transposition does. Each thread ends with one
word: the bits of its own 32 weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip import philox

ROUNDS = gl.constexpr(philox.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = gl.constexpr(philox.MULTIPLIER_0), gl.constexpr(philox.MULTIPLIER_1)
WEYL_0, WEYL_1 = gl.constexpr(philox.WEYL_0), gl.constexpr(philox.WEYL_1)
OF_DRAWS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16]))
"""(64, 8), rows and eights of columns: a lane makes the draws of the eights 2 c and 2 c + 1 of its rows."""
OF_TURNED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0]],
        lane_bases=[[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]],
        warp_bases=[[2, 0], [4, 0]],
        block_bases=[],
        shape=[8, 64],
    )
)
"""(8, 64), eights of columns and rows: a lane makes the draws of the rows 8 r + 2 c + {0, 1} for its warp's columns."""


@gluon.jit
def key_of(seed):
    """The two words of a seed in memory."""
    key = gl.load(seed)
    return (key & 0xFFFFFFFF).to(gl.uint32), ((key >> 32) & 0xFFFFFFFF).to(gl.uint32)


@gluon.jit
def loaded_dropout(dropout):
    """Both words of the seed, below which lanes drop, and what the rest is multiplied by; None without a seed."""
    seed, threshold, kept_scale = dropout
    found = None
    if seed is not None:
        k0, k1 = key_of(seed)
        found = (k0, k1, threshold, kept_scale)
    return found


@gluon.jit
def afresh(key):
    """The key, of which no compiler knows that it stays: those of the rounds then take no registers between blocks."""
    k0, k1 = key
    k0 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [k0], dtype=gl.uint32, is_pure=False, pack=1)
    k1 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [k1], dtype=gl.uint32, is_pure=False, pack=1)
    return k0, k1


@gluon.jit
def product(c, MULTIPLIER: gl.constexpr):
    """High and low word, by one multiplication."""
    both = c.to(gl.uint64) * MULTIPLIER
    return (both >> 32).to(gl.uint32), both.to(gl.uint32)


@gluon.jit
def below(word, limits, less):
    """1 in each half of a word that is below its half of `limits`, 0 in others; `less` is minus the limits."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, ones;
        mov.b32 ones, 0x00010001;
        min.u16x2 x, $1, $2;
        add.u16x2 x, x, $3;
        min.u16x2 $0, x, ones;
        }
        """,
        "=r,r,r,r", [word, limits, less], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def drawn(key, sequence, head, row, group, threshold):
    """What drops of a draw: bits 4 n and 16 + 4 n of its columns 2 n and 2 n + 1.

    Indices broadcast against each other, and so few products are made as they allow: the first three rounds have some
    that depend on rows or on groups only.
    """
    k0, k1 = key
    c0 = group.to(gl.uint32)
    c1 = row.to(gl.uint32)
    c2 = head.to(gl.uint32)
    c3 = sequence.to(gl.uint32)
    for _ in gl.static_range(ROUNDS):
        high_0, low_0 = product(c0, MULTIPLIER_0)
        high_1, low_1 = product(c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = k0 + WEYL_0
        k1 = k1 + WEYL_1
    limits = threshold.to(gl.uint32) * 0x10001
    less = ((65536 - threshold) & 0xFFFF).to(gl.uint32) * 0x10001
    bits = below(c3, limits, less)
    bits = bits * 16 + below(c2, limits, less)
    bits = bits * 16 + below(c1, limits, less)
    return bits * 16 + below(c0, limits, less)


@gluon.jit
def from_lane(word, DISTANCE: gl.constexpr):
    """The word of the lane whose number differs by this bit."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [word, DISTANCE],
        dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def bytes_of(word, other, selector):
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [word, other, selector], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def traded(word, place, DISTANCE: gl.constexpr, BITS: gl.constexpr):
    """A step of a transposition between two lanes, the first (place 0) and the second (place 1).

    Of each 2 * BITS bits the first lane keeps the lower half and gets the other's lower half above it; the second one
    keeps the upper half, and gets the other's upper half below it.
    """
    other = from_lane(word, DISTANCE)
    if BITS == 16:
        word = bytes_of(word, other, gl.where(place == 0, 0x5410, 0x3276))
    elif BITS == 8:
        word = bytes_of(word, other, gl.where(place == 0, 0x6240, 0x3715))
    else:
        gl.static_assert(BITS == 4)
        turned = gl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [other, gl.where(place == 0, 4, 28)],
            dtype=gl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
        own = gl.where(place == 0, 0x0F0F0F0F, 0xF0F0F0F0).to(gl.uint32)
        word = (word & own) | (turned & ~own)
    return word


@gluon.jit
def spread(word, layout: gl.constexpr):
    """A word of each thread, for each of its elements (64, 64)."""
    bits = word.reshape([4, 1, 8, 1, 4, 1])
    inner: gl.constexpr = bits.type.layout
    bits = bits | gl.zeros([4, 2, 8, 8, 4, 2], gl.uint32, layout=inner)
    return gl.convert_layout(bits.reshape([64, 64]), layout, assert_trivial=True)


@gluon.jit
def places(layout: gl.constexpr, TURNED: gl.constexpr):
    """The bit of each element (64, 64) in its thread's word, which the compiler knows."""
    h = (gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) // 8 % 2)[:, None]
    y = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    g = y // 8
    if TURNED:
        # the draws of the rows 8 g + 2 c + {0, 1} are those of r = g
        place = g % 2 * 16 + g // 4 * 8 + g // 2 % 2 * 4 + h * 2 + y % 2
    else:
        # the draws of the eights 2 n and 2 n + 1 are those of c = n
        place = y % 2 * 16 + g // 4 * 8 + g // 2 % 2 * 4 + h * 2 + g % 2
    return place


@gluon.jit
def without(halves, word, TURNED: gl.constexpr = False):
    """Weights of 16 bits (64, 64), with zeros in place of those that drop.

    Bits go to the top of a byte, and PRMT copies those of two weights to the 16 of each.
    """
    layout: gl.constexpr = halves.type.layout
    place = places(layout, TURNED)
    bits = spread(word, layout) << (7 - place % 8)
    second = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :] % 2
    selector = (8 + place // 8 + 4 * second) * 0x11 << 8 * second
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, which;
        or.b32 which, $4, $5;
        prmt.b32 x, $2, $3, which;
        not.b32 x, x;
        and.b32 $0, $1, x;
        }
        """,
        "=r,r,r,r,r,r", [halves, bits, selector], dtype=halves.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def alive(word, layout: gl.constexpr, TURNED: gl.constexpr = False):
    """Which weights of a tile live, bool (64, 64)."""
    return (spread(word, layout) >> places(layout, TURNED) & 1) == 0


# Keys are columns


@gluon.jit
def dropped(key, sequence, head, row, column, threshold):
    """The bits of each thread's weights in a tile of 64 rows and the columns from this multiple of 8 on.

    `row` is (64,), `head` (64, 1) or a number. Returns uint32 (4, 8, 4), a word for each thread: warps, r and c.
    """
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, OF_DRAWS))[:, None]
    groups = gl.arange(0, 8, layout=gl.SliceLayout(0, OF_DRAWS))[None, :]
    row = gl.convert_layout(row, gl.SliceLayout(1, OF_DRAWS), assert_trivial=True)[:, None]
    HEADS: gl.constexpr = len(head.shape)
    if HEADS > 0:
        head = gl.convert_layout(head, OF_DRAWS, assert_trivial=True)
    bits = drawn(key, sequence, head, row, column // 8 + groups, threshold)
    # a nibble holds the thread's rows r and r + 8 of two eights of columns
    bits = bits << (rows // 8 % 2 * 2 + groups % 2)
    word = gl.sum(gl.sum(bits.reshape([4, 2, 8, 4, 2]), axis=4), axis=1)
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, word.type.layout)))[None, None, :]
    # columns 2 n and 2 n + 1 of eight are those of c = n
    word = traded(word, c // 2, 2, 8)
    return traded(word, c % 2, 1, 4)


# Keys are rows


@gluon.jit
def dropped_turned(key, sequence, head, row, column, threshold):
    """The bits of each thread's weights in a tile (columns, rows) of 64 x 64: as `dropped`, from this row on."""
    eights = gl.arange(0, 8, layout=gl.SliceLayout(1, OF_TURNED))[:, None]
    rows = gl.arange(0, 64, layout=gl.SliceLayout(0, OF_TURNED))[None, :]
    bits = drawn(key, sequence, head, row + rows, column // 8 + eights, threshold)
    # a nibble holds the two eights of columns of the warp, and of each two neighbouring rows
    bits = bits << (eights % 2 * 2 + rows % 2)
    word = gl.sum(gl.sum(bits.reshape([4, 2, 8, 4, 2]), axis=4), axis=1)
    r = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, word.type.layout)))[None, :, None]
    # columns 2 n and 2 n + 1 of eight are those of r = 2 n and 2 n + 1
    word = traded(word, r % 2, 4, 16)
    word = traded(word, r // 4, 16, 8)
    return traded(word, r // 2 % 2, 8, 4)
