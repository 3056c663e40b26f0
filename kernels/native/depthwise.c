/* Depthwise 3 x 3 convolution, stride 1, padding 1, of [N, H, W, C] without gaps, and its gradients.

   Values are fp32, or bf16 as its 16 bits (`low`); sums are fp32. Work is dealt out in tasks of ROWS rows and GROUP
   channels of an image, whatever the number of threads, and a task's part of the weight gradient has a place of its
   own: results do not depend on that number.

   LANES channels at a time walk along a row with all nine taps in registers: a value is read once for each of the three
   rows that it reaches, and the three sums that its column takes part in move along. The row after these is asked for
   meanwhile: a quarter to a third of the time where tensors come from memory. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define GROUP 64
#define BLOCKS (GROUP / LANES)
#define ROWS 8
#define SUMS 10 /* nine taps and the bias */

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

typedef struct {
    int64_t images, height, width, channels;
} Shape;

static Shape of(int64_t images, int64_t height, int64_t width, int64_t channels) {
    return (Shape){width ? images : 0, height, width, channels}; /* rows of nothing are no rows */
}

#define ALWAYS static inline __attribute__((always_inline))

/* gcc 12 makes four instructions of what is one here. */
ALWAYS Bits words(Halves half) {
#ifdef __AVX512F__
    return (Bits)_mm512_cvtepu16_epi32((__m256i)half);
#else
    return __builtin_convertvector(half, Bits);
#endif
}

ALWAYS Halves halves(Bits bits) {
#ifdef __AVX512F__
    return (Halves)_mm512_cvtepi32_epi16((__m512i)bits);
#else
    return __builtin_convertvector(bits, Halves);
#endif
}

/* `count` values, up to LANES, from the i-th on; zeros after them. */
ALWAYS Vector load(const void *values, int64_t i, int count, int low) {
    if (low) {
        Halves half = {0};
        memcpy(&half, (const uint16_t *)values + i, 2 * count);
        return (Vector)(words(half) << 16);
    }
    Vector wide = {0};
    memcpy(&wide, (const float *)values + i, 4 * count);
    return wide;
}

/* bf16: to the nearest, ties to even. What is undefined stays so: its lower half is zero, as it came from bf16. */
ALWAYS Halves narrow(Vector wide) {
#ifdef __AVX512BF16__
    return (Halves)_mm512_cvtneps_pbh((__m512)wide);
#else
    Bits bits = (Bits)wide;
    return halves((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

ALWAYS void store(void *values, int64_t i, int count, int low, Vector wide) {
    if (low) {
        Halves half = narrow(wide);
        memcpy((uint16_t *)values + i, &half, 2 * count);
    } else {
        memcpy((float *)values + i, &wide, 4 * count);
    }
}

ALWAYS void ask(const void *values, int64_t i, int low) { __builtin_prefetch((const char *)values + (low ? 2 : 4) * i); }

/* A row of a tensor that a sum reads: the first value, and how far the next column is. A row outside has zeros. */
typedef struct {
    const void *values;
    int64_t step;
} Row;

/* out[w] = bias + sum of taps[3 r + s] * rows[r][w + s - 1]. With `beside`, a row of the other factor, also
   sums[3 r + s] += rows[r][w + s - 1] * beside[w] and sums[9] += rows[1][w]. */
ALWAYS void walk(
    const Row *rows, int64_t width, int64_t step, int64_t line, const Vector *taps, void *out, const void *beside,
    Vector *sums, int count, int low
) {
    Vector k[9], d[SUMS], left = {0}, here = {0}, done = {0}, bias = taps[9], now = bias;
    for (int i = 0; i < 9; i++) k[i] = taps[i];
    if (beside) {
        for (int i = 0; i < SUMS; i++) d[i] = sums[i];
        here = load(beside, 0, count, low);
    }
    for (int64_t w = 0; w < width; w++) {
        Vector right = {0}, next = bias;
        if (beside && w + 1 < width) right = load(beside, (w + 1) * step, count, low);
        ask(rows[2].values, w * rows[2].step + line, low);
        if (beside) ask(beside, w * step + line, low);
        for (int r = 0; r < 3; r++) {
            Vector x = load(rows[r].values, w * rows[r].step, count, low);
            next += x * k[3 * r];
            now += x * k[3 * r + 1];
            done += x * k[3 * r + 2];
            if (!beside) continue;
            d[3 * r] += x * right;
            d[3 * r + 1] += x * here;
            d[3 * r + 2] += x * left;
            if (r == 1) d[9] += x;
        }
        if (w) store(out, (w - 1) * step, count, low, done);
        done = now;
        now = next;
        left = here;
        here = right;
    }
    store(out, (width - 1) * step, count, low, done);
    if (beside)
        for (int i = 0; i < SUMS; i++) sums[i] = d[i];
}

static int64_t bands(Shape shape) { return (shape.height + ROWS - 1) / ROWS; }
static int64_t groups(Shape shape) { return (shape.channels + GROUP - 1) / GROUP; }

/* One task: a band of an image's rows, all blocks of a group. `partial` is null or [SUMS, GROUP]; the i-th
   block's taps and bias begin at taps[SUMS i]. */
ALWAYS void task(
    Shape shape, int64_t image, int64_t band, int64_t group, const void *x, const Vector *taps, void *out,
    const void *beside, float *partial, int low
) {
    static const float zeros[LANES] = {0};
    Vector sums[BLOCKS][SUMS] = {0};
    int64_t size = low ? 2 : 4, step = shape.channels, line = shape.width * step;
    int64_t bottom = (band + 1) * ROWS < shape.height ? (band + 1) * ROWS : shape.height;
    for (int64_t h = band * ROWS; h < bottom; h++)
        for (int block = 0; block < BLOCKS; block++) {
            int64_t channel = group * GROUP + block * LANES, rest = shape.channels - channel;
            if (rest <= 0) break;
            int64_t at = size * ((image * shape.height + h) * line + channel);
            Row rows[3];
            for (int r = 0; r < 3; r++) {
                int inside = h + r - 1 >= 0 && h + r - 1 < shape.height;
                rows[r].values = inside ? (const char *)x + at + (r - 1) * line * size : (const char *)zeros;
                rows[r].step = inside ? step : 0;
            }
            void *to = (char *)out + at;
            const void *other = beside ? (const char *)beside + at : 0;
            const Vector *k = taps + SUMS * block;
            if (other && rest >= LANES)
                walk(rows, shape.width, step, line, k, to, other, sums[block], LANES, low);
            else if (other)
                walk(rows, shape.width, step, line, k, to, other, sums[block], rest, low);
            else if (rest >= LANES)
                walk(rows, shape.width, step, line, k, to, 0, 0, LANES, low);
            else
                walk(rows, shape.width, step, line, k, to, 0, 0, rest, low);
        }
    if (!partial) return;
    for (int block = 0; block < BLOCKS; block++)
        for (int i = 0; i < SUMS; i++) memcpy(partial + i * GROUP + block * LANES, &sums[block][i], sizeof(Vector));
}

ALWAYS float number(const void *values, int64_t i, int low) { return load(values, i, 1, low)[0]; }

static int64_t taps_room(Shape shape) { return groups(shape) * BLOCKS * SUMS; }

/* Vectors of a block: its taps from weights [C, 9], in turn or (for the gradient) from the last to the first, and its
   bias, which may be absent. */
static void spread_taps(
    Shape shape, const void *weight, const void *bias, int turned, Vector *taps, int low, int threads
) {
    memset(taps, 0, sizeof(Vector) * taps_room(shape));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t channel = 0; channel < shape.channels; channel++) {
        float *to = (float *)(taps + channel / LANES * SUMS) + channel % LANES;
        for (int tap = 0; tap < 9; tap++)
            to[LANES * tap] = number(weight, 9 * channel + (turned ? 8 - tap : tap), low);
        if (bias) to[LANES * 9] = number(bias, channel, low);
    }
}

static void all(
    Shape shape, const void *x, const Vector *taps, void *out, const void *beside, float *partial, int low, int threads
) {
    int64_t tasks = shape.images * bands(shape) * groups(shape);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < tasks; i++) {
        int64_t group = i % groups(shape), band = i / groups(shape) % bands(shape);
        int64_t image = i / groups(shape) / bands(shape);
        const Vector *k = taps + group * BLOCKS * SUMS;
        float *part = partial ? partial + i * SUMS * GROUP : 0;
        if (low && beside) task(shape, image, band, group, x, k, out, beside, part, 1);
        else if (low) task(shape, image, band, group, x, k, out, 0, 0, 1);
        else if (beside) task(shape, image, band, group, x, k, out, beside, part, 0);
        else task(shape, image, band, group, x, k, out, 0, 0, 0);
    }
}

/* How many fp32 of scratch, aligned as a Vector, the functions below need. */
int64_t vlaforge_depthwise_scratch(int64_t images, int64_t height, int64_t width, int64_t channels, int backward) {
    Shape shape = of(images, height, width, channels);
    int64_t partial = backward ? shape.images * bands(shape) * groups(shape) * SUMS * GROUP : 0;
    return taps_room(shape) * LANES + partial;
}

/* out [N, H, W, C] of x, weights [C, 9] and a bias [C], which may be null. */
void vlaforge_depthwise(
    int64_t images, int64_t height, int64_t width, int64_t channels, const void *x, const void *weight,
    const void *bias, void *out, float *scratch, int low, int threads
) {
    Shape shape = of(images, height, width, channels);
    spread_taps(shape, weight, bias, 0, (Vector *)scratch, low, threads);
    all(shape, x, (Vector *)scratch, out, 0, 0, low, threads);
}

/* Gradients of x, of the weights [C, 9] and of a bias [C], in one walk over grad and x. */
void vlaforge_depthwise_backward(
    int64_t images, int64_t height, int64_t width, int64_t channels, const void *grad, const void *x,
    const void *weight, void *dx, void *dweight, void *dbias, float *scratch, int low, int threads
) {
    Shape shape = of(images, height, width, channels);
    float *partial = scratch + taps_room(shape) * LANES;
    spread_taps(shape, weight, 0, 1, (Vector *)scratch, low, threads);
    all(shape, grad, (Vector *)scratch, dx, x, partial, low, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t group = 0; group < groups(shape); group++) {
        double total[SUMS][GROUP] = {{0}};
        for (int64_t i = 0; i < shape.images * bands(shape); i++) {
            const float *part = partial + (i * groups(shape) + group) * SUMS * GROUP;
            for (int sum = 0; sum < SUMS; sum++)
                for (int c = 0; c < GROUP; c++) total[sum][c] += part[sum * GROUP + c];
        }
        for (int64_t c = 0; c < GROUP && group * GROUP + c < channels; c++) {
            int64_t channel = group * GROUP + c;
            /* The gradient's own rows and columns run the other way. */
            for (int tap = 0; tap < 9; tap++)
                store(dweight, 9 * channel + tap, 1, low, (Vector){(float)total[8 - tap][c]});
            store(dbias, channel, 1, low, (Vector){(float)total[9][c]});
        }
    }
}
