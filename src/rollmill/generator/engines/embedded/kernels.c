/* Matrix products for few rows on x86-64 with AVX2 and FMA.
 *
 * Decoding multiplies 8 to 64 rows with weights that do not fit into any cache. General libraries re-order the weights
 * at every call to a layout that their inner loop can stream; here that is done once, when the weights are loaded.
 *
 * Packed layout of W [n, k]: panels of 16 output columns, each [k][16], the last one padded with zeros.
 * A tile of up to 6 rows x 16 columns is kept in 12 registers; each weight is read from memory once per call.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define COLUMNS 16 /* of a panel */
#define ROWS 6     /* of a tile */
#define DEPTH 384  /* products of a panel that stay in the first-level cache: 24 KiB */
#define CHUNK 240  /* rows whose activations stay in the second-level cache */

typedef float lanes __attribute__((vector_size(32), aligned(4)));

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
        transpose_8x8(w + q, k, panel + q * COLUMNS);
        transpose_8x8(w + 8 * k + q, k, panel + q * COLUMNS + 8);
    }
    for (long q = whole; q < k; q++)
        for (long column = 0; column < COLUMNS; column++)
            panel[q * COLUMNS + column] = column < n ? w[column * k + q] : 0.0f;
}

/* `packed` must be aligned to 32 bytes and hold ceil(n / 16) * 16 * k floats. */
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

static inline __attribute__((always_inline)) void tile(
    const int rows, const float *x, long x_stride, const float *w, long depth, float *out, long out_stride, int add,
    long ahead) {
    lanes sum[ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = (lanes){0};
    for (long q = 0; q < depth; q++) {
        lanes low = *(const lanes *)(w + q * COLUMNS), high = *(const lanes *)(w + q * COLUMNS + 8);
        if (ahead) _mm_prefetch((const char *)(w + q * COLUMNS + ahead), _MM_HINT_T0);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            lanes value = _mm256_broadcast_ss(x + i * x_stride + q);
            sum[i][0] = _mm256_fmadd_ps(value, low, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(value, high, sum[i][1]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        lanes *to = (lanes *)(out + i * out_stride);
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
    }
}

/* All rows times one panel. Sums run over q in order inside blocks of `depth`, then over blocks: the result of a row
 * depends neither on the other rows nor on how many there are. */
static void times_panel(const float *x, const float *panel, float *out, long m, long k, long columns, long stride) {
    long blocks = (k + DEPTH - 1) / DEPTH, tiles = (m + ROWS - 1) / ROWS;
    float part[ROWS * COLUMNS];
    for (long b = 0, q = 0; b < blocks; b++) {
        long depth = (k - q) / (blocks - b);
        for (long t = 0, row = 0; t < tiles; t++) {
            long rows = (m - row) / (tiles - t);
            /* The first tile brings the weights that the next block needs. */
            long ahead = t == 0 ? depth * COLUMNS : 0;
            const float *from = x + row * k + q, *w = panel + q * COLUMNS;
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

/* out [m, n] = x [m, k] times W^T; all contiguous. */
void rollmill_linear(const float *x, const float *packed, float *out, long m, long n, long k, long threads) {
    long panels = (n + COLUMNS - 1) / COLUMNS;
    for (long first = 0; first < m; first += CHUNK) {
        long rows = m - first < CHUNK ? m - first : CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (long p = 0; p < panels; p++) {
            long columns = n - p * COLUMNS < COLUMNS ? n - p * COLUMNS : COLUMNS;
            times_panel(
                x + first * k, packed + p * COLUMNS * k, out + first * n + p * COLUMNS, rows, k, columns, n);
        }
    }
}
