/* What lies between the products of a layer, row by row, on x86-64 with AVX-512: root-mean-square norms, gated units,
 * rotary positions, sums of the next token's distribution; and, on any CPU, writing keys and values into blocks.
 *
 * Each is several of a general library's operators, which cost more in calls and in passes over memory than in
 * arithmetic. Numbers are float32, or bfloat16 if `half`; they are rounded where the modules that this stands for round
 * them. A row's result depends on that row alone.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__

#define LANES 16
#define WORTH 65536 /* numbers that are worth waking the other threads for */

static inline __mmask16 first(long left) { return left >= LANES ? 0xffff : (__mmask16)((1 << left) - 1); }

static inline __attribute__((always_inline)) __m512 load(const int half, const void *from, long at, __mmask16 here) {
    if (!half) return _mm512_maskz_loadu_ps(here, (const float *)from + at);
    __m256i upper = _mm256_maskz_loadu_epi16(here, (const uint16_t *)from + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16));
}

/* The upper halves, rounded to the nearest, to even at a tie; what is no number stays none. */
static inline __m512i upper(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 none = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), none, _mm512_set1_epi32(0x7fc0));
}

static inline __attribute__((always_inline)) __m512 rounded(const int half, __m512 x) {
    return half ? _mm512_castsi512_ps(_mm512_slli_epi32(upper(x), 16)) : x;
}

static inline __attribute__((always_inline)) void store(const int half, void *to, long at, __mmask16 here, __m512 x) {
    if (half) _mm256_mask_storeu_epi16((uint16_t *)to + at, here, _mm512_cvtepi32_epi16(upper(x)));
    else _mm512_mask_storeu_ps((float *)to + at, here, x);
}

/* ---- norms */

static inline __attribute__((always_inline)) void norm(
    const int half, const void *x, const void *weight, void *out, long row, long n, float epsilon) {
    __m512 squares = _mm512_setzero_ps();
    for (long q = 0; q < n; q += LANES) {
        __m512 some = load(half, x, row * n + q, first(n - q));
        squares = _mm512_fmadd_ps(some, some, squares);
    }
    float mean = _mm512_reduce_add_ps(squares) / (float)n;
    __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + epsilon));
    for (long q = 0; q < n; q += LANES) {
        __mmask16 here = first(n - q);
        __m512 some = rounded(half, _mm512_mul_ps(load(half, x, row * n + q, here), factor));
        store(half, out, row * n + q, here, _mm512_mul_ps(some, load(half, weight, q, here)));
    }
}

/* out [m, n] = weight [n] * x [m, n] / sqrt(mean of x^2 + epsilon). */
void rollmill_norm(
    const void *x, const void *weight, void *out, long half, long m, long n, float epsilon, long threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m * n >= WORTH)
    for (long row = 0; row < m; row++) {
        if (half) norm(1, x, weight, out, row, n, epsilon);
        else norm(0, x, weight, out, row, n, epsilon);
    }
}

/* ---- gated units */

/* e^x, to 2 units in the last place (Cephes), 0 and infinity included. */
static inline __m512 exp_of(__m512 x) {
    /* The second operand is returned for what is no number. */
    x = _mm512_min_ps(_mm512_set1_ps(104.0f), _mm512_max_ps(_mm512_set1_ps(-105.0f), x));
    __m512 n = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
    n = _mm512_roundscale_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_add_ps(_mm512_fmadd_ps(y, _mm512_mul_ps(x, x), x), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

static inline __attribute__((always_inline)) void gated(
    const int half, const void *gate, const void *up, void *out, long at, long count) {
    __mmask16 here = first(count);
    __m512 x = load(half, gate, at, here);
    __m512 sigmoid = _mm512_add_ps(_mm512_set1_ps(1.0f), exp_of(_mm512_sub_ps(_mm512_setzero_ps(), x)));
    store(half, out, at, here, _mm512_mul_ps(rounded(half, _mm512_div_ps(x, sigmoid)), load(half, up, at, here)));
}

/* out = gate / (1 + e^-gate) * up, for `count` numbers. */
void rollmill_gated(const void *gate, const void *up, void *out, long half, long count, long threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && count >= WORTH)
    for (long at = 0; at < count; at += LANES) {
        if (half) gated(1, gate, up, out, at, count - at);
        else gated(0, gate, up, out, at, count - at);
    }
}

/* ---- rotary positions */

/* Numbers `i` and `i + n / 2` of a head are turned into each other by an angle of their own. */
static inline __attribute__((always_inline)) void rotate(
    const int half, void *x, long at, const void *cosines, const void *sines, long angle, long n) {
    for (long q = 0, far = n / 2; q < n / 2; q += LANES, far += LANES) {
        __mmask16 here = first(n / 2 - q);
        __m512 low = load(half, x, at + q, here), high = load(half, x, at + far, here);
        __m512 one = rounded(half, _mm512_mul_ps(low, load(half, cosines, angle + q, here)));
        __m512 two = rounded(half, _mm512_mul_ps(high, load(half, sines, angle + q, here)));
        __m512 three = rounded(half, _mm512_mul_ps(high, load(half, cosines, angle + far, here)));
        __m512 four = rounded(half, _mm512_mul_ps(low, load(half, sines, angle + far, here)));
        store(half, x, at + q, here, _mm512_sub_ps(one, two));
        store(half, x, at + far, here, _mm512_add_ps(three, four));
    }
}

/* x [tokens, heads, n], in place: x * cos + (-upper half of x, lower half of x) * sin, with cos and sin [tokens, n]. */
void rollmill_rotate(
    void *x, const void *cosines, const void *sines, long half, long tokens, long heads, long n, long threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens * heads * n >= WORTH)
    for (long token = 0; token < tokens; token++) {
        for (long head = 0; head < heads; head++) {
            long at = (token * heads + head) * n;
            if (half) rotate(1, x, at, cosines, sines, token * n, n);
            else rotate(0, x, at, cosines, sines, token * n, n);
        }
    }
}

/* ---- the distribution of the next token, by blocks of the vocabulary */

static inline __attribute__((always_inline)) void sums_of(
    const int half, const void *logits, long row, long n, float temperature, float *greatest, float *sums, long block) {
    __m512 divisor = _mm512_set1_ps(temperature), most = _mm512_set1_ps(-__builtin_inff());
    for (long q = 0; q < n; q += LANES) {
        __mmask16 here = first(n - q);
        most = _mm512_mask_max_ps(most, here, _mm512_div_ps(load(half, logits, row * n + q, here), divisor), most);
    }
    *greatest = _mm512_reduce_max_ps(most);
    most = _mm512_set1_ps(*greatest);
    for (long from = 0; from < n; from += block) {
        long until = n < from + block ? n : from + block;
        __m512 sum = _mm512_setzero_ps();
        for (long q = from; q < until; q += LANES) {
            __mmask16 here = first(until - q);
            __m512 scaled = _mm512_div_ps(load(half, logits, row * n + q, here), divisor);
            sum = _mm512_mask_add_ps(sum, here, sum, exp_of(_mm512_sub_ps(scaled, most)));
        }
        *sums++ = _mm512_reduce_add_ps(sum);
    }
}

/* For each row of logits [m, n], divided by its temperature: the greatest, and sums of e^(logit - greatest) over each
 * `block` of it, [m, ceil(n / block)]; no number where a logit is none. */
void rollmill_block_sums(
    const void *logits, const float *temperatures, float *greatest, float *sums, long half, long m, long n, long block,
    long threads) {
    long blocks = (n + block - 1) / block;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && m * n >= WORTH)
    for (long row = 0; row < m; row++) {
        if (half) sums_of(1, logits, row, n, temperatures[row], greatest + row, sums + row * blocks, block);
        else sums_of(0, logits, row, n, temperatures[row], greatest + row, sums + row * blocks, block);
    }
}

#endif

/* ---- keys and values into blocks */

/* Token rows[w] (`w` itself without) of keys and values, whose heads and tokens lie `head` and `token` bytes apart, goes
 * to place offsets[w] of block blocks[w] of pools [blocks][kv_heads][size][dim]. From one block to the next are `block`
 * bytes; `bytes` are those of `dim` numbers. */
void rollmill_write(
    const char *keys, long key_head, long key_token, const char *values, long value_head, long value_token,
    const int64_t *rows, const int64_t *blocks, const int64_t *offsets, char *key_pool, char *value_pool, long block,
    long writes, long kv_heads, long size, long bytes) {
    for (long w = 0; w < writes; w++) {
        long row = rows ? rows[w] : w;
        for (long head = 0; head < kv_heads; head++) {
            long to = blocks[w] * block + (head * size + offsets[w]) * bytes;
            memcpy(key_pool + to, keys + head * key_head + row * key_token, bytes);
            memcpy(value_pool + to, values + head * value_head + row * value_token, bytes);
        }
    }
}
