/* Loops over many tensors at once on a CPU: what kernels/adamw.py and kernels/square_sums.py do on a GPU; and a
   transposition.

   Tensors are flat. Low precision is bf16, read and written as its 16 bits. Work is dealt out to threads in chunks, in
   the same pieces whatever their number, so results do not depend on it. CHUNK comes from native.py. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define LANES 64

static inline float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To the nearest, ties to even; what is undefined stays so. */
static inline uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (uint16_t)rounded;
}

typedef struct {
    float scale, rate, inverse_root, keep, beta1, beta2, eps, ema_rate;
} Constants;

/* One chunk. The gradient is `grad` (fp32) or, where that is null, `low` (bf16); `param` and `ema` may be null. */
static inline void update(
    int64_t count, float *restrict w, const float *restrict grad, const uint16_t *restrict low, float *restrict m,
    float *restrict v, uint16_t *restrict param, float *restrict ema, Constants c
) {
    for (int64_t i = 0; i < count; i++) {
        float g = (grad ? grad[i] : widen(low[i])) * c.scale;
        float new_m = m[i] + (1.0f - c.beta1) * (g - m[i]);
        float new_v = c.beta2 * v[i] + (1.0f - c.beta2) * (g * g);
        float new_w = w[i] * c.keep - c.rate * new_m / (sqrtf(new_v) * c.inverse_root + c.eps);
        m[i] = new_m;
        v[i] = new_v;
        w[i] = new_w;
        if (param) param[i] = narrow(new_w);
        if (ema) ema[i] += c.ema_rate * (new_w - ema[i]);
    }
}

/* The tests of `update` on what is absent are the same for a whole chunk: a loop without them for each kind. */
static void dispatch(
    int64_t count, float *w, const float *grad, const uint16_t *low, float *m, float *v, uint16_t *param, float *ema,
    Constants c
) {
    if (low && param && !ema) update(count, w, 0, low, m, v, param, 0, c);
    else if (low && param) update(count, w, 0, low, m, v, param, ema, c);
    else if (!low && !param && !ema) update(count, w, grad, 0, m, v, 0, 0, c);
    else if (!low && !param) update(count, w, grad, 0, m, v, 0, ema, c);
    else update(count, w, grad, low, m, v, param, ema, c);
}

#define AT(list, kind, tensor, start) ((list)[tensor] ? (kind *)(list)[tensor] + (start) : 0)

/* AdamW of `tensors` tensors, or nothing where *ok is 0; grads[i] is bf16 where is_low[i]. params[i] and ema[i] may be
   null. `fixed` holds beta1, beta2, eps, the weight decay and the decay of the average. */
void vlaforge_adamw(
    int64_t tensors, const int64_t *numel, void **weights, void **grads, const uint8_t *is_low, void **exp_avgs,
    void **exp_avg_sqs, void **params, void **ema, const double *lr, const float *step, const float *scale,
    const uint8_t *ok, const double *fixed, int threads
) {
    if (!*ok) return;
    Constants c = {
        .scale = *scale,
        .rate = (float)(*lr / (1 - pow(fixed[0], *step))),
        .inverse_root = (float)(1 / sqrt(1 - pow(fixed[1], *step))),
        .keep = (float)(1 - *lr * fixed[3]),
        .beta1 = (float)fixed[0],
        .beta2 = (float)fixed[1],
        .eps = (float)fixed[2],
        .ema_rate = (float)(1 - fixed[4]),
    };
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int lane = 0; lane < threads; lane++) {
        int64_t chunk = 0;
        for (int64_t t = 0; t < tensors; t++)
            for (int64_t start = 0; start < numel[t]; start += CHUNK, chunk++) {
                if (chunk % threads != lane) continue;
                int64_t count = numel[t] - start < CHUNK ? numel[t] - start : CHUNK;
                const float *grad = is_low[t] ? 0 : AT(grads, float, t, start);
                const uint16_t *low = is_low[t] ? AT(grads, uint16_t, t, start) : 0;
                dispatch(
                    count, AT(weights, float, t, start), grad, low, AT(exp_avgs, float, t, start),
                    AT(exp_avg_sqs, float, t, start), AT(params, uint16_t, t, start), AT(ema, float, t, start), c
                );
            }
    }
}

static float squares(int64_t count, const float *restrict wide, const uint16_t *restrict low) {
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float x = low ? widen(low[i + lane]) : wide[i + lane];
            lanes[lane] += x * x;
        }
    for (; i < count; i++) {
        float x = low ? widen(low[i]) : wide[i];
        lanes[i % LANES] += x * x;
    }
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

/* out[i] = sum of x^2 of tensor i; `partial` has room for every chunk. */
void vlaforge_square_sums(
    int64_t tensors, const int64_t *numel, void **values, const uint8_t *is_low, float *out, float *partial, int threads
) {
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int lane = 0; lane < threads; lane++) {
        int64_t chunk = 0;
        for (int64_t t = 0; t < tensors; t++)
            for (int64_t start = 0; start < numel[t]; start += CHUNK, chunk++) {
                if (chunk % threads != lane) continue;
                int64_t count = numel[t] - start < CHUNK ? numel[t] - start : CHUNK;
                partial[chunk] = is_low[t] ? squares(count, 0, AT(values, uint16_t, t, start))
                                           : squares(count, AT(values, float, t, start), 0);
            }
    }
    int64_t chunk = 0;
    for (int64_t t = 0; t < tensors; t++) {
        double total = 0;
        for (int64_t start = 0; start < numel[t]; start += CHUNK) total += partial[chunk++];
        out[t] = (float)total;
    }
}

#define TILE 32

/* An 8 x 8 corner of 16-bit values; strides in values. */
static inline void transpose8(const uint16_t *in, int64_t in_stride, uint16_t *out, int64_t out_stride) {
#ifdef __SSE2__
    __m128i rows[8], pairs[8];
    for (int i = 0; i < 8; i++) rows[i] = _mm_loadu_si128((const __m128i *)(in + i * in_stride));
    for (int i = 0; i < 4; i++) {
        pairs[i] = _mm_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
        pairs[i + 4] = _mm_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
    }
    for (int half = 0; half < 2; half++) {
        const __m128i *p = pairs + 4 * half;
        uint16_t *to = out + 4 * half * out_stride;
        __m128i low = _mm_unpacklo_epi32(p[0], p[1]), low2 = _mm_unpacklo_epi32(p[2], p[3]);
        __m128i high = _mm_unpackhi_epi32(p[0], p[1]), high2 = _mm_unpackhi_epi32(p[2], p[3]);
        _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi64(low, low2));
        _mm_storeu_si128((__m128i *)(to + out_stride), _mm_unpackhi_epi64(low, low2));
        _mm_storeu_si128((__m128i *)(to + 2 * out_stride), _mm_unpacklo_epi64(high, high2));
        _mm_storeu_si128((__m128i *)(to + 3 * out_stride), _mm_unpackhi_epi64(high, high2));
    }
#else
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) out[j * out_stride + i] = in[i * in_stride + j];
#endif
}

/* out [columns, rows] = in [rows, columns] transposed, both without gaps. */
void vlaforge_transpose(int64_t rows, int64_t columns, const uint16_t *in, uint16_t *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t left = 0; left < columns; left += TILE)
        for (int64_t top = 0; top < rows; top += TILE) {
            if (left + TILE <= columns && top + TILE <= rows) {
                for (int j = 0; j < TILE; j += 8)
                    for (int i = 0; i < TILE; i += 8)
                        transpose8(in + (top + i) * columns + left + j, columns, out + (left + j) * rows + top + i, rows);
                continue;
            }
            for (int64_t j = left; j < columns && j < left + TILE; j++)
                for (int64_t i = top; i < rows && i < top + TILE; i++) out[j * rows + i] = in[i * columns + j];
        }
}
