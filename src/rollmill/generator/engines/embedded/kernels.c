/* Matrix products for few rows, and attention of decoded tokens, on x86-64 with AVX2 and FMA; wider with AVX-512, and in
 * bfloat16 with its instructions for that. Which of the three this is, the compiler's flags say.
 *
 * Decoding multiplies 8 to 64 rows with weights that do not fit into any cache. General libraries re-order the weights
 * at every call to a layout that their inner loop can stream; here that is done once, when the weights are loaded.
 *
 * Packed layout of W [n, k]: panels of two vectors of output columns (16, with AVX-512 32), each [k][columns], the last
 * one padded with zeros. A tile of rows x columns is kept in registers; each weight is read from memory once per call.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16          /* of a vector */
#define ROWS 12           /* of a tile: 24 of 32 registers */
#define NEAR _MM_HINT_T1  /* the cache that the next block is brought into: the first would lose what is in use */
#define NARROW 64         /* inputs of a block of integers, which are widened into the first-level cache: 8 KiB */
#else
#define LANES 8
#define ROWS 6 /* 12 of 16 registers */
#define NEAR _MM_HINT_T0
#define NARROW 384
#endif
#define COLUMNS (2 * LANES) /* of a panel */
#define GROUP 32            /* inputs that share a factor */
#define DEPTH 384           /* inputs of a block, whose weights stay in a cache: 24 KiB, with AVX-512 48 */
#define CHUNK 240           /* rows whose activations stay in the second-level cache */

typedef float lanes __attribute__((vector_size(32), aligned(4)));
typedef float wide __attribute__((vector_size(4 * LANES), aligned(4)));

/* Output columns of a panel: what a packed weight is padded to. */
long rollmill_columns(void) { return COLUMNS; }

/* ---- packing */

static void transpose_8x8(const float *from, long stride, float *to) {
    __m256 r[8], s[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(from + i * stride);
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        /* The packed copy is not read again soon: past the caches. */
        _mm256_stream_ps(to + i * COLUMNS, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_stream_ps(to + (i + 4) * COLUMNS, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

static void pack_panel(const float *w, float *panel, long n, long k) {
    long whole = n == COLUMNS ? k - k % 8 : 0;
    for (long q = 0; q < whole; q += 8) {
        for (long column = 0; column < COLUMNS; column += 8)
            transpose_8x8(w + column * k + q, k, panel + q * COLUMNS + column);
    }
    for (long q = whole; q < k; q++)
        for (long column = 0; column < COLUMNS; column++)
            panel[q * COLUMNS + column] = column < n ? w[column * k + q] : 0.0f;
}

/* Numbers of 32 bits, whatever they are. `packed` must be aligned to 32 bytes and hold whole panels of k floats. */
void rollmill_pack(const float *w, float *packed, long n, long k, long threads) {
    long panels = (n + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long p = 0; p < panels; p++) {
        long columns = n - p * COLUMNS < COLUMNS ? n - p * COLUMNS : COLUMNS;
        pack_panel(w + p * COLUMNS * k, packed + p * COLUMNS * k, columns, k);
        _mm_sfence();
    }
}

/* ---- multiplying */

#ifdef __AVX512F__
static inline wide spread(const float *value) { return (wide)_mm512_set1_ps(*value); }
static inline wide fused(wide a, wide b, wide c) { return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
static inline wide spread(const float *value) { return (wide)_mm256_broadcast_ss(value); }
static inline wide fused(wide a, wide b, wide c) { return (wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#endif

/* Where the inputs of a tile's rows are read. Twelve addresses do not fit into the registers: one for each four rows
 * does, and which of the four is part of the instruction. */
struct rows {
    const char *four[(ROWS + 3) / 4];
    long stride; /* bytes from one row to the next */
};

static inline __attribute__((always_inline)) struct rows rows_of(const int rows, const void *x, long stride) {
    struct rows at = {.stride = stride};
    for (int j = 0; 4 * j < rows; j++) at.four[j] = (const char *)x + 4 * j * stride;
    return at;
}

static inline __attribute__((always_inline)) const void *row_of(const struct rows *at, const int i, long thrice) {
    return at->four[i / 4] + (i % 4 == 3 ? thrice : i % 4 * at->stride);
}

/* To the next 32 bits of each row. The compiler is kept from making twelve addresses of it after all. */
static inline __attribute__((always_inline)) void advance(const int rows, struct rows *at) {
#pragma GCC unroll 3
    for (int j = 0; 4 * j < rows; j++) {
        at->four[j] += 4;
        __asm__("" : "+r"(at->four[j]));
    }
}

static inline __attribute__((always_inline)) void tile(
    const int rows, const float *x, long x_stride, const float *w, long depth, float *out, long out_stride, int add,
    long ahead) {
    wide sum[ROWS][2];
    struct rows at = rows_of(rows, x, 4 * x_stride);
    long thrice = 3 * at.stride;
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = (wide){0};
    for (long q = 0; q < depth; q++, w += COLUMNS) {
        wide low = *(const wide *)w, high = *(const wide *)(w + LANES);
        if (ahead) {
            _mm_prefetch((const char *)(w + ahead), NEAR);
            if (LANES > 8) _mm_prefetch((const char *)(w + LANES + ahead), NEAR);
        }
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            wide value = spread(row_of(&at, i, thrice));
            sum[i][0] = fused(value, low, sum[i][0]);
            sum[i][1] = fused(value, high, sum[i][1]);
        }
        advance(rows, &at);
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        wide *to = (wide *)(out + i * out_stride);
        to[0] = add ? to[0] + sum[i][0] : sum[i][0];
        to[1] = add ? to[1] + sum[i][1] : sum[i][1];
    }
}

static void tile_of(
    long rows, const float *x, long x_stride, const float *w, long depth, float *out, long out_stride, int add,
    long ahead) {
    switch (rows) {
    case 1: tile(1, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 2: tile(2, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 3: tile(3, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 4: tile(4, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 5: tile(5, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 6: tile(6, x, x_stride, w, depth, out, out_stride, add, ahead); break;
#if ROWS > 6
    case 7: tile(7, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 8: tile(8, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 9: tile(9, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 10: tile(10, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 11: tile(11, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 12: tile(12, x, x_stride, w, depth, out, out_stride, add, ahead); break;
#endif
#if ROWS > 12
    case 13: tile(13, x, x_stride, w, depth, out, out_stride, add, ahead); break;
    case 14: tile(14, x, x_stride, w, depth, out, out_stride, add, ahead); break;
#endif
    }
}

/* Eight-bit weights are kept as integers from -127 to 127 in the same layout, with one factor for each GROUP inputs of an
 * output: [groups][16] in a panel. They are widened a block at a time, where the next rows find them in the first-level
 * cache. */
#ifdef __AVX512F__
static inline wide widened(const int8_t *from) {
    return (wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
#else
static inline wide widened(const int8_t *from) {
    return (wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}
#endif

static void widen(const int8_t *panel, const float *factors, long first, long depth, float *to) {
    for (long q = first; q < first + depth;) {
        long group = q / GROUP, end = (group + 1) * GROUP < first + depth ? (group + 1) * GROUP : first + depth;
        wide low = *(const wide *)(factors + group * COLUMNS), high = *(const wide *)(factors + group * COLUMNS + LANES);
        for (; q < end; q++, to += COLUMNS) {
            *(wide *)to = widened(panel + q * COLUMNS) * low;
            *(wide *)(to + LANES) = widened(panel + q * COLUMNS + LANES) * high;
        }
    }
}

/* All rows times one panel, of floats or of integers. Sums run over q in order inside blocks of `depth`, then over
 * blocks: the result of a row depends neither on the other rows nor on how many there are. */
static void times_panel(
    const float *x, const float *panel, const int8_t *narrow, const float *factors, float *out, long m, long k,
    long columns, long stride) {
    float widened[NARROW * COLUMNS] __attribute__((aligned(64)));
    long most = narrow ? NARROW : DEPTH, blocks = (k + most - 1) / most, tiles = (m + ROWS - 1) / ROWS;
    float part[ROWS * COLUMNS];
    for (long b = 0, q = 0; b < blocks; b++) {
        long depth = (k - q) / (blocks - b);
        if (narrow) widen(narrow, factors, q, depth, widened);
        for (long t = 0, row = 0; t < tiles; t++) {
            long rows = (m - row) / (tiles - t);
            /* The first tile brings the weights that the next block needs. */
            long ahead = t == 0 && !narrow ? depth * COLUMNS : 0;
            const float *from = x + row * k + q, *w = narrow ? widened : panel + q * COLUMNS;
            float *to = out + row * stride;
            if (columns == COLUMNS) {
                tile_of(rows, from, k, w, depth, to, stride, b > 0, ahead);
            } else {
                if (b)
                    for (long i = 0; i < rows; i++) memcpy(part + i * COLUMNS, to + i * stride, columns * sizeof(float));
                tile_of(rows, from, k, w, depth, part, COLUMNS, b > 0, ahead);
                for (long i = 0; i < rows; i++) memcpy(to + i * stride, part + i * COLUMNS, columns * sizeof(float));
            }
            row += rows;
        }
        q += depth;
    }
}

static void times_all(
    const float *x, const float *packed, const int8_t *narrow, const float *factors, float *out, long m, long n, long k,
    long threads) {
    long panels = (n + COLUMNS - 1) / COLUMNS, groups = (k + GROUP - 1) / GROUP;
    for (long first = 0; first < m; first += CHUNK) {
        long rows = m - first < CHUNK ? m - first : CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (long p = 0; p < panels; p++) {
            long columns = n - p * COLUMNS < COLUMNS ? n - p * COLUMNS : COLUMNS, at = p * COLUMNS * k;
            times_panel(
                x + first * k, narrow ? NULL : packed + at, narrow ? narrow + at : NULL,
                narrow ? factors + p * COLUMNS * groups : NULL, out + first * n + p * COLUMNS, rows, k, columns, n);
        }
    }
}

/* out [m, n] = x [m, k] times W^T; all contiguous. */
void rollmill_linear(const float *x, const float *packed, float *out, long m, long n, long k, long threads) {
    times_all(x, packed, NULL, NULL, out, m, n, k, threads);
}

/* The same with eight-bit weights. */
void rollmill_linear_int8(
    const float *x, const int8_t *packed, const float *factors, float *out, long m, long n, long k, long threads) {
    times_all(x, NULL, packed, factors, out, m, n, k, threads);
}

/* Returns the largest magnitude; `nothing` is 0, or NaN if any number is not finite. */
static float largest(const float *from, long k, float *nothing) {
    __m256 most = _mm256_setzero_ps(), zero = most, sign = _mm256_set1_ps(-0.0f);
    long q = 0;
    for (; q + 8 <= k; q += 8) {
        __m256 some = _mm256_loadu_ps(from + q);
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, some));
        zero = _mm256_fmadd_ps(some, _mm256_setzero_ps(), zero);
    }
    float found = 0.0f, lane[8], rest = 0.0f;
    _mm256_storeu_ps(lane, most);
    for (int i = 0; i < 8; i++) found = fmaxf(found, lane[i]);
    _mm256_storeu_ps(lane, zero);
    for (int i = 0; i < 8; i++) rest += lane[i];
    for (; q < k; q++) {
        found = fmaxf(found, fabsf(from[q]));
        rest += from[q] * 0.0f;
    }
    *nothing = rest;
    return found;
}

static void round_group(const float *from, int8_t *to, long count, float steps) {
    for (long q = 0; q < count; q += 8) {
        int32_t whole[8];
        long some = count - q < 8 ? count - q : 8;
        if (some == 8) {
            __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(from + q), _mm256_set1_ps(steps));
            _mm256_storeu_si256((__m256i *)whole, _mm256_cvtps_epi32(scaled));
        } else {
            for (long i = 0; i < some; i++) whole[i] = _mm_cvtss_si32(_mm_set_ss(from[q + i] * steps));
        }
        for (long i = 0; i < some; i++) to[(q + i) * COLUMNS] = (int8_t)whole[i];
    }
}

/* `packed` must hold whole panels of bytes, and `factors` whole panels of ceil(k / 32) floats. A group with a
 * number that is not finite gets a factor that is none. */
void rollmill_pack_int8(const float *w, int8_t *packed, float *factors, long n, long k, long threads) {
    long panels = (n + COLUMNS - 1) / COLUMNS, groups = (k + GROUP - 1) / GROUP;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long p = 0; p < panels; p++)
        for (long c = 0; c < COLUMNS; c++) {
            long column = p * COLUMNS + c;
            for (long g = 0; g < groups; g++) {
                long first = g * GROUP, count = k - first < GROUP ? k - first : GROUP;
                int8_t *to = packed + (p * k + first) * COLUMNS + c;
                float *factor = factors + (p * groups + g) * COLUMNS + c;
                if (column >= n) {
                    *factor = 0.0f;
                    for (long q = 0; q < count; q++) to[q * COLUMNS] = 0;
                    continue;
                }
                float nothing, most = largest(w + column * k + first, count, &nothing);
                *factor = most / 127.0f + nothing;
                round_group(w + column * k + first, to, count, most > 0.0f ? 127.0f / most : 0.0f);
            }
        }
}

#ifdef __AVX512BF16__

/* ---- the same in bfloat16
 *
 * Two inputs of an output lie side by side: packed by rollmill_pack as one number of 32 bits, [k / 2][columns][2]. One
 * instruction multiplies and adds them for 16 columns, with sums in float32; what is below the normal range counts as 0. */

#define PAIRS 1024 /* of a block */
#define AHEAD 64   /* pairs */

static inline __attribute__((always_inline)) void tile_bf16(
    const int rows, const uint16_t *x, long x_stride, const uint16_t *w, long pairs, float *out, int add, int ahead) {
    __m512 sum[ROWS][2];
    struct rows at = rows_of(rows, x, 2 * x_stride);
    long thrice = 3 * at.stride;
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++)
            sum[i][half] = add ? _mm512_loadu_ps(out + i * COLUMNS + half * LANES) : _mm512_setzero_ps();
    for (long pair = 0; pair < pairs; pair++, w += 2 * COLUMNS) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(w), high = (__m512bh)_mm512_loadu_si512(w + 2 * LANES);
        if (ahead) {
            _mm_prefetch((const char *)(w + AHEAD * 2 * COLUMNS), NEAR);
            _mm_prefetch((const char *)(w + AHEAD * 2 * COLUMNS + 2 * LANES), NEAR);
        }
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int32_t two;
            memcpy(&two, row_of(&at, i, thrice), sizeof two);
            __m512bh value = (__m512bh)_mm512_set1_epi32(two);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], value, low);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], value, high);
        }
        advance(rows, &at);
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(out + i * COLUMNS + half * LANES, sum[i][half]);
}

#define TILE(rows) \
    case rows: tile_bf16(rows, x, x_stride, w, pairs, out, add, ahead); break

static void tile_bf16_of(
    long rows, const uint16_t *x, long x_stride, const uint16_t *w, long pairs, float *out, int add, int ahead) {
    switch (rows) {
        TILE(1); TILE(2); TILE(3); TILE(4); TILE(5); TILE(6); TILE(7); TILE(8); TILE(9); TILE(10); TILE(11); TILE(12);
    }
}

/* Rounds the sums of one row, once. */
static void round_row(const float *sums, uint16_t *to, long columns) {
    for (long c = 0; c < columns; c += LANES) {
        __mmask16 here = columns - c < LANES ? (1 << (columns - c)) - 1 : 0xffff;
        _mm256_mask_storeu_epi16(to + c, here, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sums + c)));
    }
}

/* All rows times one panel: `pairs` of inputs. As with floats, a row's sums have one order. */
static void times_panel_bf16(
    const uint16_t *x, const uint16_t *panel, uint16_t *out, long m, long pairs, long columns, long stride) {
    float sums[CHUNK * COLUMNS];
    long tiles = (m + ROWS - 1) / ROWS;
    for (long pair = 0; pair < pairs; pair += PAIRS) {
        long depth = pairs - pair < PAIRS ? pairs - pair : PAIRS;
        for (long t = 0, row = 0; t < tiles; t++) {
            long rows = (m - row) / (tiles - t);
            const uint16_t *from = x + 2 * (row * pairs + pair), *w = panel + 2 * COLUMNS * pair;
            tile_bf16_of(rows, from, 2 * pairs, w, depth, sums + row * COLUMNS, pair > 0, t == 0);
            row += rows;
        }
    }
    for (long row = 0; row < m; row++) round_row(sums + row * COLUMNS, out + row * stride, columns);
}

/* out [m, n] = x [m, k] times W^T; all contiguous bfloat16; k is even. */
void rollmill_linear_bf16(
    const uint16_t *x, const uint16_t *packed, uint16_t *out, long m, long n, long k, long threads) {
    long panels = (n + COLUMNS - 1) / COLUMNS;
    for (long first = 0; first < m; first += CHUNK) {
        long rows = m - first < CHUNK ? m - first : CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (long p = 0; p < panels; p++) {
            long at = p * COLUMNS, columns = n - at < COLUMNS ? n - at : COLUMNS;
            times_panel_bf16(x + first * k, packed + at * k, out + first * n + at, rows, k / 2, columns, n);
        }
    }
}

#endif

/* ---- attention of decoded tokens over the blocks of their sequences */

#define SHARE 4 /* query heads of one key head that are computed together */

/* e^x for x <= 0, to 2 units in the last place (Cephes); below -87 the result is 0. */
static inline __m256 exp_of(__m256 x) {
    const __m256 lowest = _mm256_set1_ps(-87.0f);
    __m256 gone = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
    x = _mm256_max_ps(x, lowest);
    __m256 n = _mm256_round_ps(
        _mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), x);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(5.0000001201e-1f));
    y = _mm256_add_ps(_mm256_fmadd_ps(y, _mm256_mul_ps(x, x), x), _mm256_set1_ps(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(gone, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}

static inline float sum_of(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

/* Turns `n` scores into weights; returns their sum. `scores` is padded to a multiple of 8. */
static float softmax(float *scores, long n) {
    long padded = (n + 7) / 8 * 8;
    for (long i = n; i < padded; i++) scores[i] = -INFINITY;
    __m256 most = _mm256_set1_ps(-INFINITY), total = _mm256_setzero_ps();
    for (long i = 0; i < padded; i += 8) most = _mm256_max_ps(most, _mm256_loadu_ps(scores + i));
    float top = -INFINITY, lane[8];
    _mm256_storeu_ps(lane, most);
    for (int i = 0; i < 8; i++) top = lane[i] > top ? lane[i] : top;
    for (long i = 0; i < padded; i += 8) {
        __m256 weight = exp_of(_mm256_sub_ps(_mm256_loadu_ps(scores + i), _mm256_set1_ps(top)));
        _mm256_storeu_ps(scores + i, weight);
        total = _mm256_add_ps(total, weight);
    }
    return sum_of(total);
}

/* Where the KV of one key head lies: position p is in block p / size of the table, at `start`, `stride` apart, counted in
 * numbers, which are float32 or bfloat16. `next`, `next_start` and `next_blocks` say the same of what is computed after it. */
struct kv {
    const void *keys, *values;
    const int64_t *table, *next;
    long start, stride, size, next_start, next_blocks;
};

/* The block that is needed next in the place of this one, to be brought nearer a few lines at a time: blocks are as large
 * as pages and lie anywhere, so the processor does not foresee them, and a burst of requests it drops. NULL if it is here. */
static inline __attribute__((always_inline)) const char *soon_of(
    const int half, const void *numbers, const struct kv *kv, long block) {
    if (block >= kv->next_blocks || (kv->next[block] == kv->table[block] && kv->next_start == kv->start)) return NULL;
    return (const char *)numbers + (half ? 2 : 4) * (kv->next[block] * kv->stride + kv->next_start);
}

/* Asks for the lines of `bytes`, at least one; returns what is behind them. */
static inline __attribute__((always_inline)) const char *bring(const char *soon, const int bytes) {
#pragma GCC unroll 2
    for (int at = 0; at < bytes; at += 64) _mm_prefetch(soon + at, _MM_HINT_T1);
    return soon + bytes;
}

/* Eight numbers from the `at`-th on. */
static inline __attribute__((always_inline)) lanes eight_of(const int half, const void *numbers, long at) {
    if (!half) return *(const lanes *)((const float *)numbers + at);
    __m128i upper = _mm_loadu_si128((const __m128i *)((const uint16_t *)numbers + at));
    return (lanes)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(upper), 16));
}

/* Sums of the lanes of four vectors; each sum has one order, whatever the other three are. */
static inline __m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

/* Scores of `heads` query heads at the positions `first` to `last` of one block, `together` at a time: enough sums in
 * flight to keep both multipliers busy, few enough for 16 registers. */
static inline __attribute__((always_inline)) void block_scores(
    const int half, const int heads, const int together, const float *q, long q_stride, const void *keys, long at,
    long first, long last, long dim, float scale, float *scores, long room, const char *soon) {
    for (long p = first; p < last; p += together) {
        long key[4]; /* behind the end the last one is computed again, in vain */
        for (int i = 0; i < together; i++) key[i] = at + ((p + i < last ? p + i : last - 1) - first) * dim;
        lanes sum[SHARE][4];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int i = 0; i < together; i++) sum[h][i] = (lanes){0};
        for (long d = 0; d < dim; d += 8) {
            if (soon) soon = bring(soon, together * (half ? 16 : 32));
            lanes part[4];
#pragma GCC unroll 4
            for (int i = 0; i < together; i++) part[i] = eight_of(half, keys, key[i] + d);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                lanes query = *(const lanes *)(q + h * q_stride + d);
#pragma GCC unroll 4
                for (int i = 0; i < together; i++) sum[h][i] += part[i] * query;
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            __m128 sums = together == 4 ? sums_of(sum[h][0], sum[h][1], sum[h][2], sum[h][3])
                                        : sums_of(sum[h][0], sum[h][1], sum[h][0], sum[h][1]);
            _mm_storeu_ps(scores + h * room + p, _mm_mul_ps(sums, _mm_set1_ps(scale)));
        }
    }
}

/* Adds weighted values of all blocks to `width` vectors of 8, from dimension `d` on, for `heads` query heads. */
static inline __attribute__((always_inline)) void weighted_sum(
    const int half, const int heads, const int width, struct kv kv, long d, float *out, long out_stride, long n, long dim,
    const float *scores, long room, const float *total) {
    lanes sum[SHARE][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++) sum[h][i] = (lanes){0};
    for (long first = 0; first < n; first += kv.size) {
        long value = kv.table[first / kv.size] * kv.stride + kv.start + d;
        long last = n - first < kv.size ? n : first + kv.size;
        const char *soon = soon_of(half, kv.values, &kv, first / kv.size);
        for (long p = first; p < last; p++, value += dim) {
            if (soon) bring(soon + ((p - first) * dim + d) * (half ? 2 : 4), width * (half ? 16 : 32));
            lanes part[4];
#pragma GCC unroll 4
            for (int i = 0; i < width; i++) part[i] = eight_of(half, kv.values, value + 8 * i);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                lanes weight = _mm256_broadcast_ss(scores + h * room + p);
#pragma GCC unroll 4
                for (int i = 0; i < width; i++) sum[h][i] += weight * part[i];
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        lanes whole = _mm256_set1_ps(total[h]);
#pragma GCC unroll 4
        for (int i = 0; i < width; i++) *(lanes *)(out + h * out_stride + d + 8 * i) = sum[h][i] / whole;
    }
}

/* `heads` query heads over the first `n` positions of one key head; `dim` is a multiple of 8. */
static inline __attribute__((always_inline)) void attend(
    const int half, const int heads, const float *q, long q_stride, struct kv kv, float *out, long out_stride, long n, long dim,
    float scale, float *scores, long room) {
    const int together = heads < 4 ? 4 : 2, wide = heads < 4 ? 4 : 2;
    for (long first = 0; first < n; first += kv.size) {
        long at = kv.table[first / kv.size] * kv.stride + kv.start;
        long last = n - first < kv.size ? n : first + kv.size;
        const char *soon = soon_of(half, kv.keys, &kv, first / kv.size);
        block_scores(half, heads, together, q, q_stride, kv.keys, at, first, last, dim, scale, scores, room, soon);
    }
    float total[SHARE];
    for (int h = 0; h < heads; h++) total[h] = softmax(scores + h * room, n);
    long d = 0;
    for (; d + 8 * wide <= dim; d += 8 * wide)
        weighted_sum(half, heads, wide, kv, d, out, out_stride, n, dim, scores, room, total);
    for (; d < dim; d += 8) weighted_sum(half, heads, 1, kv, d, out, out_stride, n, dim, scores, room, total);
}

#define ATTEND(half, heads) attend(half, heads, q, q_stride, kv, out, out_stride, n, dim, scale, scores, room)

static void attend_of(
    long half, long heads, const float *q, long q_stride, struct kv kv, float *out, long out_stride, long n, long dim,
    float scale, float *scores, long room) {
    switch (heads + (half ? SHARE : 0)) {
    case 1: ATTEND(0, 1); break;
    case 2: ATTEND(0, 2); break;
    case 3: ATTEND(0, 3); break;
    case 4: ATTEND(0, 4); break;
    case SHARE + 1: ATTEND(1, 1); break;
    case SHARE + 2: ATTEND(1, 2); break;
    case SHARE + 3: ATTEND(1, 3); break;
    case SHARE + 4: ATTEND(1, 4); break;
    }
}

/* The order in which rows and key heads are computed: of rows that begin with the same block (siblings of a group) one
 * key head after the other, so that what they share is read into the cache once. What a row gives does not depend on it. */
static void arrange(long *order, const int64_t *tables, long width, long batch, long kv_heads) {
    for (long first = 0, end; first < batch; first = end) {
        for (end = first + 1; end < batch && tables[end * width] == tables[first * width]; end++) {}
        for (long kv = 0; kv < kv_heads; kv++)
            for (long b = first; b < end; b++) *order++ = b * kv_heads + kv;
    }
}

/* out [batch, kv_heads * share, dim]; row b looks at the first counts[b] positions of the sequence whose blocks are
 * tables[b * width ...]. Keys and values are [blocks][kv_heads][size][dim], `block` numbers from one block to the next, bfloat16 if
 * `half`, else float32.
 * Returns 0, or 1 if there was no memory for the scores. */
long rollmill_attend(
    const float *q, long q_row, long q_head, const void *keys, const void *values, long half, long block, long size,
    const int64_t *tables, long width, const int64_t *counts, float *out, long batch, long kv_heads, long share,
    long dim, float scale, long threads) {
    long longest = 0, failed = 0;
    for (long b = 0; b < batch; b++) longest = counts[b] > longest ? counts[b] : longest;
    long room = (longest + 7) / 8 * 8 + 8; /* scores are written four at a time, also at the end */
    long *order = malloc(batch * kv_heads * sizeof(long));
    if (!order) return 1;
    arrange(order, tables, width, batch, kv_heads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scores = malloc(SHARE * room * sizeof(float));
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (long job = 0; job < batch * kv_heads; job++) {
            if (!scores) continue;
            long b = order[job] / kv_heads, kv = order[job] % kv_heads;
            struct kv at = {keys, values, tables + b * width, NULL, kv * size * dim, block, size, 0, 0};
            if (job + 1 < batch * kv_heads) {
                long next = order[job + 1] / kv_heads;
                at.next = tables + next * width;
                at.next_start = order[job + 1] % kv_heads * size * dim;
                at.next_blocks = (counts[next] + size - 1) / size;
            }
            for (long first = 0; first < share; first += SHARE) {
                long h = kv * share + first;
                const float *from = q + b * q_row + h * q_head;
                float *to = out + (b * kv_heads * share + h) * dim;
                long heads = share - first < SHARE ? share - first : SHARE;
                attend_of(half, heads, from, q_head, at, to, dim, counts[b], dim, scale, scores, room);
            }
        }
        free(scores);
    }
    free(order);
    return failed;
}
