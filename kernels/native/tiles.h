/* Tiles of a CPU (AMX): 16 rows of 64 bytes, here 16 x 32 bf16 or 16 x 16 words. */

#pragma once
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define HAS_TILES
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 512 /* bf16 values */
#define TILE_LOAD(number, from) _tile_loadd(number, from, 64)
#define TILE_STORE(number, to, columns) _tile_stored(number, to, 4 * (columns)) /* fp32 */

/* Asks the kernel for tiles, once a process: whether they were granted. */
static inline int tile_permission(void) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* Eight whole tiles, for the calling thread, until _tile_release(). */
static inline void tile_start(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
}

static inline __mmask16 tile_mask(int64_t count) {
    return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

/* Up to 16 floats; zeros after them. */
static inline __m512i tile_floats(const float *from, int64_t count) {
    return (__m512i)_mm512_maskz_loadu_ps(tile_mask(count), from);
}

/* Takes the next 8 significant bits of 16 floats: in the upper halves of the words, the lower ones zero. What is left
   after two such parts has no more than 8, and is not rounded: so NaN stays. */
static inline __m512i tile_part(__m512i *floats, const int part) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    if (part == 2) return _mm512_and_si512(*floats, upper);
    __m512i bits = _mm512_and_si512(_mm512_add_epi32(*floats, _mm512_set1_epi32(0x8000)), upper);
    *floats = (__m512i)_mm512_sub_ps((__m512)*floats, (__m512)bits);
    return bits;
}

/* 32 bf16 of the upper halves of 2 x 16 words. */
static inline __m512i tile_join(__m512i low, __m512i high) {
    static const uint16_t odd[32] __attribute__((aligned(64))) = {
        1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63,
    };
    return _mm512_permutex2var_epi16(low, _mm512_load_si512(odd), high);
}

/* 16 x 16 words. */
static inline __attribute__((always_inline)) void tile_transpose(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

/* The same of a tile in memory. */
static inline void tile_turn(uint16_t *tile) {
    __m512i words[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) words[i] = _mm512_load_si512(tile + 32 * i);
    tile_transpose(words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, words[i]);
}
#endif
