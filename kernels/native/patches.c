/* The patches that a square convolution of [N, H, W, C] without gaps reads, one a row, and the sum back.

   A row holds [C, kernel, kernel], as the weights of a convolution lie, so that a product with them is the
   convolution. */

#include <stdint.h>
#include <string.h>

#define MOST 256 /* taps */

typedef struct {
    int64_t images, height, width, channels, kernel, stride, padding;
} Shape;

static int64_t rows(Shape s) { return (s.height + 2 * s.padding - s.kernel) / s.stride + 1; }
static int64_t columns(Shape s) { return (s.width + 2 * s.padding - s.kernel) / s.stride + 1; }

#define COPY(kind)                                                                                                     \
    for (int64_t c = 0; c < s.channels; c++)                                                                           \
        for (int tap = 0; tap < taps; tap++) ((kind *)to)[c * taps + tap] = ((const kind *)from[tap])[c * step[tap]]

/* out [N, rows, columns, C, kernel, kernel] of x, zeros outside; values of 16 bits if `low`, else 32. */
void vlaforge_patches(const int64_t *shape, const void *x, void *out, int low, int threads) {
    static const float zero = 0;
    Shape s;
    memcpy(&s, shape, sizeof s);
    const int taps = (int)(s.kernel * s.kernel);
    const int64_t size = low ? 2 : 4, down = rows(s), across = columns(s);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t place = 0; place < s.images * down * across; place++) {
        const void *from[MOST];
        int64_t step[MOST];
        int64_t image = place / across / down, top = place / across % down * s.stride - s.padding;
        int64_t left = place % across * s.stride - s.padding;
        for (int tap = 0; tap < taps; tap++) {
            int64_t h = top + tap / s.kernel, w = left + tap % s.kernel;
            step[tap] = h >= 0 && h < s.height && w >= 0 && w < s.width;
            from[tap] = &zero;
            if (step[tap]) from[tap] = (const char *)x + size * s.channels * ((image * s.height + h) * s.width + w);
        }
        char *to = (char *)out + size * place * taps * s.channels;
        if (low) COPY(uint16_t);
        else COPY(uint32_t);
    }
}

/* dx [N, H, W, C] = the sum of all that grad [N, rows, columns, C, kernel, kernel] has for a value, fp32. */
void vlaforge_patches_backward(const int64_t *shape, const float *grad, float *dx, int threads) {
    Shape s;
    memcpy(&s, shape, sizeof s);
    const int64_t taps = s.kernel * s.kernel, down = rows(s), across = columns(s);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t pixel = 0; pixel < s.images * s.height * s.width; pixel++) {
        const float *from[MOST];
        int64_t parts = 0;
        int64_t image = pixel / s.width / s.height, h = pixel / s.width % s.height, w = pixel % s.width;
        for (int64_t tap = 0; tap < taps; tap++) {
            int64_t i = h + s.padding - tap / s.kernel, j = w + s.padding - tap % s.kernel;
            if (i < 0 || j < 0 || i % s.stride || j % s.stride) continue;
            if (i / s.stride >= down || j / s.stride >= across) continue;
            from[parts++] = grad + ((image * down + i / s.stride) * across + j / s.stride) * s.channels * taps + tap;
        }
        for (int64_t c = 0; c < s.channels; c++) {
            float sum = 0;
            for (int64_t part = 0; part < parts; part++) sum += from[part][c * taps];
            dx[pixel * s.channels + c] = sum;
        }
    }
}
