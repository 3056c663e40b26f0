/* Products of fp32 matrices on the tiles of a CPU (AMX), with fp32's accuracy.

   A float has 24 significant bits, so it is a sum of three bf16 numbers, exactly: each takes 8 bits of what those before
   it left. Of the nine products of two such sums six are kept, a1b1, a1b2, a2b1, a2b2, a1b3 and a3b1; the others are
   below 2^-24 of the whole. Tiles multiply bf16 into fp32 sums sixteen times as fast as vectors multiply fp32, so six
   products are still faster than one (Henry, Tang, Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence
   Datatype For Higher-Precision Computations"). Infinity becomes NaN.

   A left factor lies in tiles of 16 rows by 32 of the summed axis, a right one in tiles of 16 pairs of the summed axis by
   16 columns; seen as 16 x 16 words of 32 bits, one kind is the transpose of the other. A panel is 32 rows (or columns)
   of a factor: two tiles of each part for every 32 of the summed axis. A thread lays out a block of left panels, which
   stays in its L2, and one right panel after the other. Laying out and writing results go on in slices between groups of
   four tile products, which take other units of the processor. Sums run in one order whatever the number of threads. */

#include <stdint.h>
#include <stdlib.h>

#include "tiles.h"

#ifdef HAS_TILES

#define PANEL 32
#define PARTS 3
#define BLOCK_BYTES 900000 /* of left panels */
#define PIECE 512          /* of the summed axis, at most */
#define ROW_SLICES 4       /* of a tile: four rows of words each */
#define FINISH_ROWS 4      /* of a result: rows of a slice */
#define AHEAD(values) _mm_prefetch((const char *)(values), _MM_HINT_T1) /* the same place of the next panel */

/* A factor: `size` rows (left) or columns (right) by the summed axis. One of its strides is 1. */
typedef struct {
    const float *values;
    int64_t size, stride_size, stride_depth;
    int slices; /* of a tile: those of its rows, then, where words are to be turned, one a part */
} Factor;

static Factor factor(const float *values, int64_t size, int64_t stride_size, int64_t stride_depth, int right) {
    int turned = (stride_depth == 1) == right;
    return (Factor){values, size, stride_size, stride_depth, ROW_SLICES + turned * PARTS};
}

/* Four of 16 rows of words. `count` rows at `stride` have `depth` values of the summed axis that follow each other. */
static void along(const float *from, int64_t stride, int64_t count, int64_t depth, uint16_t *to, int slice) {
#pragma GCC unroll 4
    for (int i = 4 * slice; i < 4 * slice + 4; i++) {
        const float *row = from + (i < count ? i * stride : 0);
        int64_t left = i < count ? depth : 0;
        AHEAD(row + PANEL * stride);
        AHEAD(row + PANEL * stride + 16);
        __m512i low = tile_floats(row, left), high = tile_floats(row + 16, left - 16);
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; part++)
            _mm512_store_si512(to + part * TILE + 32 * i, tile_join(tile_part(&low, part), tile_part(&high, part)));
    }
}

/* Four of 16 rows of words. `depth` rows at `stride` are summed; `count` values of each follow each other. */
static void across(const float *from, int64_t stride, int64_t count, int64_t depth, uint16_t *to, int slice) {
#pragma GCC unroll 4
    for (int i = 4 * slice; i < 4 * slice + 4; i++) {
        int64_t evens = 2 * i < depth ? count : 0, odds = 2 * i + 1 < depth ? count : 0;
        const float *row = from + (evens ? 2 * i * stride : 0);
        AHEAD(row + PANEL);
        AHEAD(row + PANEL + stride);
        __m512i even = tile_floats(row, evens), odd = tile_floats(row + (odds ? stride : 0), odds);
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; part++) {
            __m512i lower = _mm512_srli_epi32(tile_part(&even, part), 16);
            _mm512_store_si512(to + part * TILE + 32 * i, _mm512_or_si512(lower, tile_part(&odd, part)));
        }
    }
}

/* A panel that is being laid out: two tiles for every 32 of the summed axis, `depth` of which from `from`. */
typedef struct {
    const Factor *factor;
    int64_t panel, from, depth, tiles, tile;
    int slice;
    uint16_t *to;
} Laying;

/* The next slice; 0 when there is none left. */
static inline int lay(Laying *l) {
    if (l->tile >= l->tiles) return 0;
    const Factor *f = l->factor;
    uint16_t *to = l->to + l->tile * PARTS * TILE;
    int64_t first = l->panel * PANEL + l->tile % 2 * 16, step = l->tile / 2 * 32;
    int64_t count = f->size - first < 16 ? f->size - first : 16, depth = l->depth - step < 32 ? l->depth - step : 32;
    if (count < 0) count = first = 0;
    const float *from = f->values + first * f->stride_size + (l->from + step) * f->stride_depth;
    if (l->slice >= ROW_SLICES) tile_turn(to + (l->slice - ROW_SLICES) * TILE);
    else if (f->stride_depth == 1) along(from, f->stride_size, count, depth, to, l->slice);
    else across(from, f->stride_depth, count, depth, to, l->slice);
    if (++l->slice == f->slices) l->slice = 0, l->tile++;
    return 1;
}

typedef struct {
    int64_t rows, columns, depth;
    float *out;
    int64_t stride;
    const float *bias; /* of the columns, or null */
} Result;

/* Sums [32, 32] on their way to the result: of the first piece of the summed axis, or to be added to it? */
typedef struct {
    const Result *result;
    const float *sums;
    int64_t row, column;
    int first, slice;
} Finishing;

/* The next slice; 0 when there is none left. */
static inline int finish(Finishing *f) {
    if (f->slice >= PANEL / FINISH_ROWS) return 0;
    const Result *r = f->result;
    int64_t begin = f->slice++ * FINISH_ROWS, end = begin + FINISH_ROWS;
    if (end > r->rows - f->row) end = r->rows - f->row;
    for (int64_t left = 0; left < PANEL && f->column + left < r->columns; left += 16) {
        __mmask16 mask = tile_mask(r->columns - f->column - left);
        __m512 bias = f->first && r->bias ? _mm512_maskz_loadu_ps(mask, r->bias + f->column + left) : _mm512_setzero_ps();
        for (int64_t i = begin; i < end; i++) {
            float *out = r->out + (f->row + i) * r->stride + f->column + left;
            __m512 before = f->first ? bias : _mm512_maskz_loadu_ps(mask, out);
            _mm512_mask_storeu_ps(out, mask, _mm512_add_ps(before, _mm512_load_ps(f->sums + i * PANEL + left)));
        }
    }
    return 1;
}

/* What goes on while tiles multiply. */
typedef struct {
    Finishing finishing;
    Laying left, right;
} Aside;

static inline int aside(Aside *a) { return finish(&a->finishing) || lay(&a->left) || lay(&a->right); }

#define LEFT(part) TILE_LOAD(4, a + part * TILE); TILE_LOAD(5, a + (PARTS + part) * TILE)
#define RIGHT(part) TILE_LOAD(6, b + part * TILE); TILE_LOAD(7, b + (PARTS + part) * TILE)
#define MULTIPLY()           \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(1, 4, 7); \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_dpbf16ps(3, 5, 7); \
    aside(meanwhile)

/* sums [32, 32] = a left panel times a right one, over `steps` times 32; small products first. */
static void multiply(const uint16_t *a, const uint16_t *b, int64_t steps, float *sums, Aside *meanwhile) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; k++, a += 2 * PARTS * TILE, b += 2 * PARTS * TILE) {
        LEFT(2); RIGHT(0); MULTIPLY();
        LEFT(1); MULTIPLY();
        RIGHT(1); MULTIPLY();
        LEFT(0); MULTIPLY();
        RIGHT(2); MULTIPLY();
        RIGHT(0); MULTIPLY();
    }
    TILE_STORE(0, sums, PANEL);
    TILE_STORE(1, sums + 16, PANEL);
    TILE_STORE(2, sums + 16 * PANEL, PANEL);
    TILE_STORE(3, sums + 16 * PANEL + 16, PANEL);
}

/* One thread's part: panels [top, bottom) of the left factor by [begin, end) of the right one. */
static void part_of(
    const Factor *left, const Factor *right, const Result *r, int64_t top, int64_t bottom, int64_t begin, int64_t end,
    int64_t piece, uint16_t *room
) {
    float sums[2][PANEL * PANEL] __attribute__((aligned(64)));
    int64_t panel = piece / 32 * 2 * PARTS * TILE, block = BLOCK_BYTES / (2 * panel), turn = 0;
    uint16_t *rights[2] = {room, room + panel}, *lefts = room + 2 * panel;
    Aside meanwhile = {.finishing = {.slice = PANEL}};
    for (int64_t from = 0; from < r->depth; from += piece) {
        int64_t depth = r->depth - from < piece ? r->depth - from : piece, tiles = (depth + 31) / 32 * 2;
        for (int64_t start = top; start < bottom; start += block) {
            int64_t stop = start + block < bottom ? start + block : bottom;
            meanwhile.left = (Laying){left, start, from, depth, tiles, 0, 0, lefts};
            meanwhile.right = (Laying){right, begin, from, depth, tiles, 0, 0, rights[0]};
            while (aside(&meanwhile));
            for (int64_t column = begin; column < end; column++) {
                int64_t next = (column + 1 - begin) % 2;
                if (column + 1 < end)
                    meanwhile.right = (Laying){right, column + 1, from, depth, tiles, 0, 0, rights[next]};
                for (int64_t p = start; p < stop; p++, turn ^= 1) {
                    uint16_t *ready = lefts + (p - start) * panel;
                    if (column == begin && p + 1 < stop)
                        meanwhile.left = (Laying){left, p + 1, from, depth, tiles, 0, 0, ready + panel};
                    multiply(ready, rights[1 - next], tiles / 2, sums[turn], &meanwhile);
                    while (finish(&meanwhile.finishing) || lay(&meanwhile.left));
                    meanwhile.finishing = (Finishing){r, sums[turn], p * PANEL, column * PANEL, from == 0, 0};
                }
                while (lay(&meanwhile.right));
            }
        }
    }
    while (finish(&meanwhile.finishing));
}

/* Room of the calling thread, kept; null when memory is short. */
static uint16_t *room_of(size_t bytes) {
    static _Thread_local uint16_t *kept;
    if (!kept && posix_memalign((void **)&kept, 64, bytes)) kept = 0;
    return kept;
}

/* Whether this code has tiles and this process may use them. */
int vlaforge_has_tiles(void) { return tile_permission(); }

/* out [rows, columns], its rows at `stride`, = left [rows, depth] x right [depth, columns] + bias [columns] or null. One
   stride of each factor is 1, and no size is 0. Returns 0, or 1 when memory is short. */
int vlaforge_product(
    int64_t rows, int64_t columns, int64_t depth, const float *left, int64_t left_row, int64_t left_depth,
    const float *right, int64_t right_depth, int64_t right_column, const float *bias, float *out, int64_t stride,
    int threads
) {
    Factor a = factor(left, rows, left_row, left_depth, 0), b = factor(right, columns, right_column, right_depth, 1);
    Result r = {rows, columns, depth, out, stride, bias};
    int64_t pieces = (depth + PIECE - 1) / PIECE, piece = ((depth + pieces - 1) / pieces + 31) / 32 * 32;
    int64_t tall = (rows + PANEL - 1) / PANEL, wide = (columns + PANEL - 1) / PANEL, beside = 1, least = INT64_MAX;
    /* The grid of threads that lays out least twice. */
    for (int64_t n = 1; n <= threads; n++) {
        int64_t cost = (tall + threads / n - 1) / (threads / n) + (wide + n - 1) / n;
        if (threads % n == 0 && cost < least) least = cost, beside = n;
    }
    int64_t below = threads / beside;
    int failed = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(| : failed)
    for (int t = 0; t < threads; t++) {
        int64_t i = t / beside, j = t % beside;
        uint16_t *room = room_of(BLOCK_BYTES + 2 * (PIECE / 32 * 2 * PARTS * TILE * 2));
        if (!room) {
            failed = 1;
            continue;
        }
        tile_start();
        part_of(&a, &b, &r, tall * i / below, tall * (i + 1) / below, wide * j / beside, wide * (j + 1) / beside, piece, room);
        _tile_release();
    }
    return failed;
}
#else
int vlaforge_has_tiles(void) { return 0; }
#endif
