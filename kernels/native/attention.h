/* Tiles of bf16, how they are packed and written back, and the vectors between: for `attention.c` alone.

   A tile is 16 rows of 32 values without gaps. One of a right factor holds pairs of its rows side by side, as TDPBF16PS
   reads them. */

#include "tiles.h"

#ifdef HAS_TILES

#define LOG2E 1.4426950408889634f
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t half;

/* ---------------------------------------------------------------------------------------------------- tiles */

/* Tiles of a factor: the other tile of the pair is `pair` values further on, the next step of the sum `step`. */
typedef struct {
    const half *at;
    int64_t pair, step;
} Tiles;

/* c [32, 32] (rows `stride` floats apart) = or += a · b; only its first 16 columns unless `wide`. */
INLINE void product(Tiles a, Tiles b, int64_t steps, int add, int wide, float *c, int64_t stride) {
    float *low = c + 16 * stride;
    if (add) {
        _tile_loadd(0, c, stride * 4);
        _tile_loadd(2, low, stride * 4);
        _tile_loadd(1, c + 16, stride * 4);
        _tile_loadd(3, low + 16, stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; i++, a.at += a.step, b.at += b.step) {
        _tile_loadd(4, a.at, 64);
        _tile_loadd(6, b.at, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a.at + a.pair, 64);
        _tile_dpbf16ps(2, 5, 6);
        if (wide) {
            _tile_loadd(7, b.at + b.pair, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, stride * 4);
    _tile_stored(2, low, stride * 4);
    if (wide) {
        _tile_stored(1, c + 16, stride * 4);
        _tile_stored(3, low + 16, stride * 4);
    }
}

/* ---------------------------------------------------------------------------------------------------- packing */

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE __mmask32 first(int64_t count) { return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0; }

/* Row i of a matrix whose rows are `stride` apart, or named by `index`. */
typedef struct {
    half *data;
    int64_t stride;
    const int64_t *index;
} Rows;

INLINE half *row(Rows rows, int64_t i) { return rows.data + (rows.index ? rows.index[i] : i) * rows.stride; }

INLINE void store16(__m512i r[16], half *out) {
    for (int i = 0; i < 16; i++) _mm512_store_si512(out + 32 * i, r[i]);
}

/* Rows top .. top + 15 (those below `count`), 32 values from `left`: as they are, or transposed in pairs of values. */
INLINE void across(Rows rows, int64_t top, int64_t count, int64_t left, int64_t width, int turn, half *out) {
    __m512i r[16];
    __mmask32 columns = first(width - left);
    for (int i = 0; i < 16; i++)
        r[i] = top + i < count ? _mm512_maskz_loadu_epi16(columns, row(rows, top + i) + left) : _mm512_setzero_si512();
    if (turn) tile_transpose(r);
    store16(r, out);
}

/* Rows top .. top + 31, 16 values from `left`: rows in pairs, or (`turn`) transposed: 16 rows of 32. */
INLINE void down(Rows rows, int64_t top, int64_t count, int64_t left, int64_t width, int turn, half *out) {
    __m512i r[16];
    __mmask16 columns = (__mmask16)first(least(16, width - left));
    for (int i = 0; i < 16; i++) {
        int64_t at = top + 2 * i;
        __m512i even = _mm512_setzero_si512(), odd = even;
        if (at < count) even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, row(rows, at) + left));
        if (at + 1 < count) odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, row(rows, at + 1) + left));
        r[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
    if (turn) tile_transpose(r);
    store16(r, out);
}

/* Left factor over the width: tiles [2 * blocks of 32 rows, steps]. One block of rows a call. */
static void pack_left(Rows rows, int64_t block, int64_t count, int64_t width, half *out) {
    int64_t steps = (width + 31) / 32;
    for (int64_t tile = 2 * block; tile < 2 * block + 2; tile++)
        for (int64_t step = 0; step < steps; step++)
            across(rows, 16 * tile, count, 32 * step, width, 0, out + (tile * steps + step) * TILE);
}

/* Right factor over the width, of 32 rows: tiles [steps, 2]. */
static void pack_right(Rows rows, int64_t count, int64_t width, half *out) {
    for (int64_t left = 0; left < width; left += 32)
        for (int half_block = 0; half_block < 2; half_block++, out += TILE)
            across(rows, 16 * half_block, count, left, width, 1, out);
}

/* Right factor over 32 rows from 32 * block on: tiles [width / 16]; `turn`: left factor of the transposed product. */
static void pack_down(Rows rows, int64_t block, int64_t count, int64_t width, int turn, half *out) {
    int64_t padded = (width + 31) / 32 * 32;
    for (int64_t left = 0; left < padded; left += 16, out += TILE)
        if (turn) down(rows, 32 * block, count, left, width, 1, out);
        else down(rows, 32 * block, count, left, width, 0, out);
}

/* ---------------------------------------------------------------------------------------------------- vectors */

INLINE __m512 at(const float *p) { return _mm512_loadu_ps(p); }

/* 2^x, its error below two units in the last place; 0 far down and for -inf. */
INLINE __m512 power(__m512 x) {
    __m512 f = _mm512_reduce_ps(x, 0x09); /* x - floor(x) */
    __m512 y = _mm512_set1_ps(2.16129149e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.2467847e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.67545155e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.54852821e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40229309e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93147063e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x);
}

/* log2 of positive x, by the series of log((1 + t) / (1 - t)) for a mantissa of 0.75 to 1.5. */
INLINE __m512 logarithm(__m512 x) {
    __m512 mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src), one = _mm512_set1_ps(1.0f);
    __m512 exponent = _mm512_getexp_ps(_mm512_div_ps(x, mantissa));
    __m512 t = _mm512_div_ps(_mm512_sub_ps(mantissa, one), _mm512_add_ps(mantissa, one)), square = _mm512_mul_ps(t, t);
    __m512 y = _mm512_set1_ps(2 * LOG2E / 9);
    for (int i = 7; i > 0; i -= 2) y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(2 * LOG2E / i));
    return _mm512_fmadd_ps(y, t, exponent);
}

INLINE __m512i narrow2(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* [low 0 .. 15, high 0 .. 15] to [low 0, high 0, low 1, ...]. */
INLINE __m512i zip(__m512i x) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
        16, 0
    );
    return _mm512_permutexvar_epi16(order, x);
}

/* Columns of c [32 of the width, 32 queries], times `factor` of the query, as rows of bf16, `width` values from `left`.
   Lane l of half j is query 8 (l / 4) + 4 j + l % 4 if `mixed` (the order of unpacklo and unpackhi), else 16 j + l. */
INLINE void write_queries(
    const float *c, const __m512 factor[2], int halves, int mixed, int64_t count, int64_t left, int64_t width, Rows out
) {
    for (int j = 0; j < halves; j++) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) {
            __m512 even = _mm512_mul_ps(at(c + 64 * i + 16 * j), factor[j]);
            __m512 odd = _mm512_mul_ps(at(c + 64 * i + 32 + 16 * j), factor[j]);
            r[i] = zip(narrow2(odd, even));
        }
        tile_transpose(r);
        for (int i = 0; i < 16; i++) {
            int64_t query = mixed ? 8 * (i / 4) + 4 * j + i % 4 : 16 * j + i;
            if (query < count) _mm512_mask_storeu_epi16(row(out, query) + left, first(width - left), r[i]);
        }
    }
}

/* Rows of c [32 keys, 32 of the width], times `factor`, as rows of bf16 from row `top` and value `left` on. */
INLINE void write_keys(
    const float *c, float factor, int64_t top, int64_t count, int64_t left, int64_t width, Rows out
) {
    __m512 times = _mm512_set1_ps(factor);
    for (int64_t i = 0; i < 32 && top + i < count; i++, c += 32) {
        __m512i both = narrow2(_mm512_mul_ps(at(c + 16), times), _mm512_mul_ps(at(c), times));
        _mm512_mask_storeu_epi16(row(out, top + i) + left, first(width - left), both);
    }
}
#endif
