/* Attention of bf16 by AMX tiles, forward and backward: what `attention.py` describes.

   A problem is one key head of one sample with the query heads that read it. Its keys and values are packed into tiles
   once and stay in the second cache. Queries go by in blocks of 32. Scores are kept transposed, [keys, 32 queries], so
   that maxima, sums and log-sum-exps of queries are lanes of vectors, nothing is reduced across a vector, and the bf16
   probabilities are written in the order that tiles read:

       forward    Sᵀ = K Qᵀ    P = exp2(c S - max)    Oᵀ = Vᵀ P
       backward   Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    P = exp2(c S - lse)    dS = P (dP - Σ P dP)
                  dQᵀ = Kᵀ dSᵀ    dV = Pᵀ dO    dK = dSᵀ Q

   Masked keys are not packed at all. Every sum runs in an order that the shapes alone give, so results do not depend
   on the number of threads. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "softmax.h"

#ifdef HAS_TILES
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    half *data;
    int64_t b, h, t; /* strides of samples, heads, tokens; values of a head lie side by side */
} View;

typedef struct {
    int64_t batch, heads, groups, queries, keys, width;
    View q, k, v, out, grad, dq, dk, dv;
    const uint8_t *valid; /* [batch, keys], or null */
    const float *bias;    /* [keys], or null */
    float *lse;           /* [batch, heads, queries], to base 2 */
    float scale;
    int causal; /* query t sees keys up to t + keys - queries */
} Problem;

/* ---------------------------------------------------------------------------------------------------- problems */

typedef struct {
    int64_t steps, padded, blocks, chunk; /* 32s of the width, keys padded to 32s, blocks of queries: all, at a time */
} Plan;

#define CHUNK_BYTES 786432

static Plan plan(const Problem *x) {
    Plan n = {.steps = (x->width + 31) / 32, .padded = (x->keys + 31) / 32 * 32};
    int64_t repeat = x->heads / x->groups;
    n.blocks = x->causal ? repeat * ((x->queries + 31) / 32) : (repeat * x->queries + 31) / 32;
    int64_t fit = CHUNK_BYTES / (128 * (n.padded + 32 * n.steps));
    n.chunk = least(n.blocks, fit > 8 ? fit : 8);
    return n;
}

/* Memory of a problem, shared by the threads that work on it, and of a thread; cut from one piece, 64 bytes aligned. */
typedef struct {
    half *k, *v, *turned_k; /* the forward keeps Vᵀ in `v` */
    half *p, *ds, *q, *grad;
    float *dk, *dv;
    int64_t *index, *count;
    float *bias, *scale;
} Shared;

typedef struct {
    float *s, *dp, *c;
    half *q, *grad, *turned;
} Own;

INLINE char *cut(char **from, int64_t bytes) {
    char *here = *from;
    *from += (bytes + 63) / 64 * 64;
    return here;
}

static Shared share(const Problem *x, char **from, int backward) {
    Plan n = plan(x);
    int64_t packed = 64 * n.padded * n.steps, block = backward ? n.chunk : 0;
    Shared m = {.k = (half *)cut(from, packed), .v = (half *)cut(from, packed)};
    m.turned_k = (half *)cut(from, backward ? packed : 0);
    m.p = (half *)cut(from, 64 * block * n.padded);
    m.ds = (half *)cut(from, 64 * block * n.padded);
    m.q = (half *)cut(from, 2048 * block * n.steps);
    m.grad = (half *)cut(from, 2048 * block * n.steps);
    m.dk = (float *)cut(from, backward ? 2 * packed : 0);
    m.dv = (float *)cut(from, backward ? 2 * packed : 0);
    m.index = (int64_t *)cut(from, 8 * x->keys);
    m.bias = (float *)cut(from, 4 * x->keys);
    m.count = (int64_t *)cut(from, 8);
    m.scale = (float *)cut(from, 4);
    return m;
}

static Own own(const Problem *x, char **from) {
    Plan n = plan(x);
    Own m = {.s = (float *)cut(from, 128 * n.padded), .dp = (float *)cut(from, 128 * n.padded)};
    m.c = (float *)cut(from, 4096);
    m.q = (half *)cut(from, 2048 * n.steps);
    m.grad = (half *)cut(from, 2048 * n.steps);
    m.turned = (half *)cut(from, 64 * n.padded);
    return m;
}

/* Bytes that `threads` threads need. */
static int64_t room(const Problem *x, int backward, int threads) {
    char *from = 0;
    for (int i = 0; i < threads; i++) {
        share(x, &from, backward);
        own(x, &from);
    }
    return (int64_t)from + 64;
}

/* Writes which keys count, how many, and what is added to their scores (to base 2). A sample without a valid key mixes
   all of them alike, whatever their scores; where causality hides keys as well, none. */
static void select_keys(const Problem *x, int64_t sample, Shared m) {
    const uint8_t *valid = x->valid ? x->valid + sample * x->keys : 0;
    int64_t count = 0;
    for (int64_t i = 0; i < x->keys; i++)
        if (!valid || valid[i]) m.index[count++] = i;
    const int none = count == 0 && !x->causal;
    for (; none && count < x->keys; count++) m.index[count] = count;
    for (int64_t i = 0; i < count && x->bias; i++) m.bias[i] = none ? 0 : x->bias[m.index[i]] * LOG2E;
    *m.count = count;
    *m.scale = none ? 0 : x->scale;
}

/* 32 or fewer queries of a key head; `top` counts those of its query heads one after the other. Where position matters
   a block belongs to one query head. */
typedef struct {
    int64_t top, count, position;
} Block;

INLINE Block block_of(const Problem *x, int64_t i) {
    int64_t each = (x->queries + 31) / 32, repeat = x->heads / x->groups, position = i % each * 32;
    if (!x->causal) return (Block){32 * i, least(32, repeat * x->queries - 32 * i), 0};
    return (Block){i / each * x->queries + position, least(32, x->queries - position), position};
}

/* The block's rows of a view by queries; `offsets` has room for those of several heads. */
INLINE Rows queries_of(const Problem *x, View view, int64_t sample, int64_t group, Block at, int64_t *offsets) {
    int64_t head = at.top / x->queries, query = at.top % x->queries;
    half *data = view.data + sample * view.b + group * (x->heads / x->groups) * view.h;
    if (query + at.count <= x->queries) return (Rows){data + head * view.h + query * view.t, view.t, 0};
    for (int64_t i = 0; i < at.count; i++) {
        offsets[i] = head * view.h + query * view.t;
        if (++query == x->queries) head++, query = 0;
    }
    return (Rows){data, 1, offsets};
}

INLINE Rows keys_of(View view, int64_t sample, int64_t group, const int64_t *index) {
    return (Rows){view.data + sample * view.b + group * view.h, view.t, index};
}

/* Keys (of `count`, by their places) that stand at `limit` or before. */
INLINE int64_t up_to(const int64_t *index, int64_t count, int64_t limit) {
    int64_t n = limit < 0 ? 0 : least(count, limit + 1);
    while (n && index[n - 1] > limit) n--;
    return n;
}

INLINE Sight sight_of(const Problem *x, Block at, const int64_t *index, int64_t count) {
    if (!x->causal) return (Sight){count, count, 0, index};
    int64_t first = at.position + x->keys - x->queries;
    return (Sight){up_to(index, count, first), up_to(index, count, first + at.count - 1), first, index};
}

INLINE void wait(int lanes) {
    if (lanes > 1) {
#pragma omp barrier
    }
}

INLINE float *lse_of(const Problem *x, int64_t sample, int64_t group, Block at) {
    return x->lse + (sample * x->heads + group * (x->heads / x->groups)) * x->queries + at.top;
}

/* Sᵀ of one block: [32 * blocks of keys, 32] = left [tiles of keys, steps] · right [steps, 2]. */
INLINE void score(const half *left, const half *right, Plan n, int64_t count, int wide, float *s) {
    for (int64_t k = 0; k < count; k += 32) {
        Tiles a = {left + k * 32 * n.steps, TILE * n.steps, TILE}, b = {right, TILE, 2 * TILE};
        product(a, b, n.steps, 0, wide, s + 32 * k, 32);
    }
}

INLINE void forward_block(
    const Problem *x, Plan n, int64_t sample, int64_t group, Block at, Shared m, Own o, int64_t count, float scale,
    int wide
) {
    Sight sight = sight_of(x, at, m.index, count);
    int64_t blocks = (sight.some + 31) / 32, offsets[32];
    float lse[32];
    __m512 inverse[2];
    pack_right(queries_of(x, x->q, sample, group, at, offsets), at.count, x->width, o.q);
    score(m.k, o.q, n, sight.some, wide, o.s);
    if (x->bias) softmax(o.s, sight, 32 * blocks, scale * LOG2E, m.bias, wide, o.turned, lse, inverse);
    else softmax(o.s, sight, 32 * blocks, scale * LOG2E, 0, wide, o.turned, lse, inverse);
    memcpy(lse_of(x, sample, group, at), lse, 4 * at.count);
    Rows out = queries_of(x, x->out, sample, group, at, offsets);
    for (int64_t step = 0; step < n.steps; step++) {
        Tiles a = {m.v + 2 * step * TILE, TILE, 2 * n.steps * TILE}, b = {o.turned, TILE, 2 * TILE};
        product(a, b, blocks, 0, wide, o.c, 32);
        write_queries(o.c, inverse, wide ? 2 : 1, 0, at.count, 32 * step, x->width, out);
    }
}

static void forward(const Problem *x, int64_t problem, Shared m, Own o, int lane, int lanes) {
    Plan n = plan(x);
    int64_t sample = problem / x->groups, group = problem % x->groups;
    if (lane == 0) select_keys(x, sample, m);
    wait(lanes);
    const int64_t count = *m.count;
    const float scale = *m.scale;
    for (int64_t i = lane; i < (count + 31) / 32; i += lanes) {
        pack_left(keys_of(x->k, sample, group, m.index), i, count, x->width, m.k);
        pack_down(keys_of(x->v, sample, group, m.index), i, count, x->width, 1, m.v + 2 * i * n.steps * TILE);
    }
    wait(lanes);
    for (int64_t i = lane; i < n.blocks; i += lanes) {
        Block at = block_of(x, i);
        if (at.count > 16) forward_block(x, n, sample, group, at, m, o, count, scale, 1);
        else forward_block(x, n, sample, group, at, m, o, count, scale, 0);
    }
    wait(lanes);
}

INLINE void backward_block(
    const Problem *x, Plan n, int64_t sample, int64_t group, Block at, int64_t place, Shared m, Own o, int64_t count,
    float scale, int wide
) {
    Sight sight = sight_of(x, at, m.index, count);
    int64_t padded = (count + 31) / 32 * 32, offsets[32];
    half *p = m.p + 32 * place * n.padded, *ds = m.ds + 32 * place * n.padded;
    float lse[32] = {0}, c = scale * LOG2E;
    memcpy(lse, lse_of(x, sample, group, at), 4 * at.count);
    Rows q = queries_of(x, x->q, sample, group, at, offsets);
    pack_right(q, at.count, x->width, o.q);
    pack_down(q, 0, at.count, x->width, 0, m.q + 2 * place * n.steps * TILE);
    Rows grad = queries_of(x, x->grad, sample, group, at, offsets);
    pack_right(grad, at.count, x->width, o.grad);
    pack_down(grad, 0, at.count, x->width, 0, m.grad + 2 * place * n.steps * TILE);
    score(m.k, o.q, n, sight.some, wide, o.s);
    score(m.v, o.grad, n, sight.some, wide, o.dp);
    if (x->bias) softmax_backward(o.s, o.dp, sight, padded, c, m.bias, wide, lse, p, ds, o.turned);
    else softmax_backward(o.s, o.dp, sight, padded, c, 0, wide, lse, p, ds, o.turned);
    const __m512 factor[2] = {_mm512_set1_ps(scale), _mm512_set1_ps(scale)};
    Rows dq = queries_of(x, x->dq, sample, group, at, offsets);
    for (int64_t step = 0; step < n.steps; step++) {
        Tiles a = {m.turned_k + 2 * step * TILE, TILE, 2 * n.steps * TILE}, b = {o.turned, TILE, 2 * TILE};
        product(a, b, (sight.some + 31) / 32, 0, 1, o.c, 32);
        write_queries(o.c, factor, 2, 1, at.count, 32 * step, x->width, dq);
    }
}

/* dK or dV of 32 keys: += left [chunk, keys, 32 queries] · right [chunk, width / 16 tiles]; written after the last. */
INLINE void sum_block(
    const Problem *x, Plan n, const half *left, const half *right, int64_t i, int64_t chunk, int add, int last,
    float *c, float factor, int64_t count, Rows out
) {
    for (int64_t step = 0; step < n.steps; step++) {
        Tiles a = {left + 2 * i * TILE, TILE, 32 * n.padded}, b = {right + 2 * step * TILE, TILE, 2 * n.steps * TILE};
        float *here = c + (i * n.steps + step) * 1024;
        product(a, b, chunk, add, 1, here, 32);
        if (last) write_keys(here, factor, 32 * i, count, 32 * step, x->width, out);
    }
}

/* Keys that nobody sees have no gradient. */
static void clear_unseen(const Problem *x, Rows out, int64_t count, const int64_t *index) {
    out.index = 0;
    for (int64_t i = 0, next = 0; i < x->keys; i++)
        if (next < count && index[next] == i) next++;
        else memset(row(out, i), 0, 2 * x->width);
}

static void backward(const Problem *x, int64_t problem, Shared m, Own o, int lane, int lanes) {
    Plan n = plan(x);
    int64_t sample = problem / x->groups, group = problem % x->groups;
    if (lane == 0) select_keys(x, sample, m);
    wait(lanes);
    const int64_t count = *m.count;
    const float scale = *m.scale;
    int64_t key_blocks = (count + 31) / 32;
    Rows k = keys_of(x->k, sample, group, m.index), dk = keys_of(x->dk, sample, group, m.index);
    Rows dv = keys_of(x->dv, sample, group, m.index);
    for (int64_t i = lane; i < key_blocks; i += lanes) {
        pack_left(k, i, count, x->width, m.k);
        pack_left(keys_of(x->v, sample, group, m.index), i, count, x->width, m.v);
        pack_down(k, i, count, x->width, 1, m.turned_k + 2 * i * n.steps * TILE);
    }
    wait(lanes);
    for (int64_t start = 0; start < n.blocks; start += n.chunk) {
        int64_t chunk = least(n.chunk, n.blocks - start);
        for (int64_t i = lane; i < chunk; i += lanes) {
            Block at = block_of(x, start + i);
            if (at.count > 16) backward_block(x, n, sample, group, at, i, m, o, count, scale, 1);
            else backward_block(x, n, sample, group, at, i, m, o, count, scale, 0);
        }
        wait(lanes);
        int add = start > 0, last = start + chunk == n.blocks;
        for (int64_t i = lane; i < key_blocks; i += lanes) {
            sum_block(x, n, m.p, m.grad, i, chunk, add, last, m.dv, 1.0f, count, dv);
            sum_block(x, n, m.ds, m.q, i, chunk, add, last, m.dk, scale, count, dk);
        }
        wait(lanes);
    }
    if (lane == 0 && count < x->keys) {
        clear_unseen(x, dk, count, m.index);
        clear_unseen(x, dv, count, m.index);
    }
    wait(lanes);
}

/* ---------------------------------------------------------------------------------------------------- entry */

/* Problems are dealt out to threads whole; where there are few, all threads work on one. */
static void run(const Problem *x, int backwards, int threads, char *memory) {
    int64_t problems = x->batch * x->groups;
    const int together = problems % threads && problems < 4 * threads;
    memory += -(intptr_t)memory & 63;
#pragma omp parallel num_threads(threads)
    {
        int lane = 0, lanes = 1;
#ifdef _OPENMP
        lane = omp_get_thread_num(), lanes = omp_get_num_threads();
#endif
        char *from = memory;
        Shared m;
        Own o;
        for (int i = 0; i <= lane; i++) {
            Shared next = share(x, &from, backwards);
            if (i == 0 || !together) m = next;
            o = own(x, &from);
        }
        tile_start();
        for (int64_t i = together ? 0 : lane; i < problems; i += together ? 1 : lanes)
            if (backwards) backward(x, i, m, o, together ? lane : 0, together ? lanes : 1);
            else forward(x, i, m, o, together ? lane : 0, together ? lanes : 1);
        _tile_release();
    }
}

static Problem problem_of(const int64_t *sizes) {
    Problem x = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], .causal = (int)sizes[6]};
    return x;
}

int64_t vlaforge_attention_room(const int64_t *sizes, int backwards, int threads) {
    Problem x = problem_of(sizes);
    return room(&x, backwards, threads);
}

/* sizes: samples, query heads, key heads, queries, keys, width, whether causal. data and strides (samples, heads,
   tokens): q, k, v and, forward, the output; backward, null, the output's gradient and those of q, k, v. `memory`: as
   many bytes as room says. */
void vlaforge_attention(
    const int64_t *sizes, void **data, const int64_t *strides, const uint8_t *valid, const float *bias, float *lse,
    double scale, int backwards, int threads, void *memory
) {
    Problem x = problem_of(sizes);
    View *views[] = {&x.q, &x.k, &x.v, &x.out, &x.grad, &x.dq, &x.dk, &x.dv};
    for (int i = 0; i < 8; i++) *views[i] = (View){data[i], strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
    x.valid = valid, x.bias = bias, x.lse = lse, x.scale = (float)scale;
    run(&x, backwards, threads, memory);
}

#else
int64_t vlaforge_attention_room(const int64_t *sizes, int backwards, int threads) { return 0; }
void vlaforge_attention(
    const int64_t *sizes, void **data, const int64_t *strides, const uint8_t *valid, const float *bias, float *lse,
    double scale, int backwards, int threads, void *memory
) {}
#endif
