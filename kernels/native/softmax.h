/* The softmax of transposed scores and its backward: for `attention.c` alone. */

#ifdef HAS_TILES
#include <math.h>

/* What a block of queries sees: keys below `all` are seen by every query, from `some` on by none; key k between them by
   the queries from ahead[k] - first on. */
typedef struct {
    int64_t all, some, first;
    const int64_t *ahead;
} Sight;

/* Of 16 queries from `from` on, those that see key k. */
INLINE __mmask16 seen(Sight x, int64_t k, int64_t from) {
    if (k < x.all) return 0xffff;
    int64_t hidden = k < x.some ? x.ahead[k] - x.first - from : 16;
    return hidden <= 0 ? 0xffff : hidden < 16 ? (__mmask16)(0xffff << hidden) : 0;
}

/* s [keys, 32 queries] to exp2(c s + bias - most) as p, tiles [padded / 32, 2] of a right factor over the keys. Gives
   the log-sum-exp to base 2 and the reciprocal of the sum; infinity and 0 for queries that see nothing. */
INLINE void softmax(
    const float *s, Sight sight, int64_t padded, float c, const float *bias, int wide, half *p, float *lse,
    __m512 *inverse
) {
    const __m512 factor = _mm512_set1_ps(c), lowest = _mm512_set1_ps(-INFINITY), none = _mm512_setzero_ps();
    const int halves = wide ? 2 : 1;
    const int64_t even = sight.all / 2 * 2;
    __m512 most[2] = {lowest, lowest}, total[2][2] = {{none, none}, {none, none}};
#define SCORE(k, j) at(s + 32 * (k) + 16 * (j))
#define BIASED(k, j) (bias ? _mm512_fmadd_ps(SCORE(k, j), factor, _mm512_set1_ps(bias[k])) : SCORE(k, j))
    for (int64_t k = 0; k < even; k += 2)
        for (int j = 0; j < halves; j++)
            most[j] = _mm512_max_ps(most[j], _mm512_max_ps(BIASED(k, j), BIASED(k + 1, j)));
    for (int64_t k = even; k < sight.some; k++)
        for (int j = 0; j < halves; j++)
            most[j] = _mm512_mask_max_ps(most[j], seen(sight, k, 16 * j), most[j], BIASED(k, j));
    for (int j = 0; j < halves; j++) {
        if (!bias) most[j] = _mm512_mul_ps(most[j], factor);
        most[j] = _mm512_max_ps(most[j], _mm512_set1_ps(-3e38f)); /* of a query that sees nothing */
    }
#define WEIGHT(k, j) \
    power(_mm512_fmadd_ps(SCORE(k, j), factor, _mm512_sub_ps(bias ? _mm512_set1_ps(bias[k]) : none, most[j])))
    for (int64_t k = 0; k < even; k += 2)
        for (int j = 0; j < halves; j++) {
            __m512 e[2] = {WEIGHT(k, j), WEIGHT(k + 1, j)};
            for (int i = 0; i < 2; i++) total[j][i] = _mm512_add_ps(total[j][i], e[i]);
            _mm512_store_si512(p + (k / 32 * 2 + j) * TILE + k % 32 * 16, zip(narrow2(e[1], e[0])));
        }
    for (int64_t k = even; k < padded; k += 2)
        for (int j = 0; j < halves; j++) {
            __m512 e[2] = {none, none};
            for (int i = 0; i < 2 && k + i < sight.some; i++) {
                e[i] = _mm512_maskz_mov_ps(seen(sight, k + i, 16 * j), WEIGHT(k + i, j));
                total[j][i] = _mm512_add_ps(total[j][i], e[i]);
            }
            _mm512_store_si512(p + (k / 32 * 2 + j) * TILE + k % 32 * 16, zip(narrow2(e[1], e[0])));
        }
    for (int j = 0; j < halves; j++) {
        __m512 sum = _mm512_add_ps(total[j][0], total[j][1]);
        __mmask16 some = _mm512_cmp_ps_mask(sum, none, _CMP_NEQ_UQ);
        __m512 log_sum = _mm512_add_ps(most[j], logarithm(sum));
        _mm512_storeu_ps(lse + 16 * j, _mm512_mask_mov_ps(_mm512_set1_ps(INFINITY), some, log_sum));
        inverse[j] = _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), sum);
    }
}

/* s and dp [keys, 32 queries] to p and ds [padded, 32] in bf16 (tiles of left factors over the queries) and ds again as
   `turned`, tiles [padded / 32, 2] of a right factor over the keys, queries in the order "mixed". s is overwritten. */
INLINE void softmax_backward(
    float *s, const float *dp, Sight sight, int64_t padded, float c, const float *bias, int wide, const float *lse,
    half *p, half *ds, half *turned
) {
    const __m512 factor = _mm512_set1_ps(c), none = _mm512_setzero_ps();
    const int halves = wide ? 2 : 1;
    const __m512 less[2] = {at(lse), at(lse + 16)};
    __m512 delta[2] = {none, none};
    for (int64_t k = 0; k < sight.some; k++) {
        __m512 e[2] = {none, none};
        for (int j = 0; j < halves; j++) {
            __m512 x = _mm512_fmsub_ps(SCORE(k, j), factor, less[j]);
            if (bias) x = _mm512_add_ps(x, _mm512_set1_ps(bias[k]));
            e[j] = power(x);
            if (k >= sight.all) e[j] = _mm512_maskz_mov_ps(seen(sight, k, 16 * j), e[j]);
            delta[j] = _mm512_fmadd_ps(e[j], at(dp + 32 * k + 16 * j), delta[j]);
            _mm512_storeu_ps(s + 32 * k + 16 * j, e[j]);
        }
        _mm512_store_si512(p + 32 * k, narrow2(e[1], e[0]));
    }
    for (int64_t k = sight.some; k < padded; k++) _mm512_store_si512(p + 32 * k, _mm512_setzero_si512());
#define CHANGE(k, j) _mm512_mul_ps(SCORE(k, j), _mm512_sub_ps(at(dp + 32 * (k) + 16 * (j)), delta[j]))
    for (int64_t k = 0; k < padded; k += 2) {
        __m512i two[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int i = 0; i < 2; i++) {
            if (k + i < sight.some) two[i] = narrow2(wide ? CHANGE(k + i, 1) : none, CHANGE(k + i, 0));
            _mm512_store_si512(ds + 32 * (k + i), two[i]);
        }
        half *to = turned + k / 32 * 2 * TILE + k % 32 * 16;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(two[0], two[1]));
        _mm512_store_si512(to + TILE, _mm512_unpackhi_epi16(two[0], two[1]));
    }
}
#undef SCORE
#undef BIASED
#undef WEIGHT
#undef CHANGE
#endif
