/*
 * Encoding loops of one set of row kernels: numbers widened, lengths, divisions, butterflies in float32 and
 * codebook cells. Stored bytes depend on them, so each result has the operations of FORMATS 0 in their order;
 * a set chooses only which results stand side by side.
 */
#include "core/row_kernels.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "core/error.h"
#include "core/number.h"
#include "core/row_kernels_vector.h"

/* ---- numbers ---- */

/* A loop that compilers vectorise. */
void OF_SET(kv_row_widen_bf16)(const uint8_t *from, size_t n, float *to)
{
	for (size_t i = 0; i < n; i++)
		to[i] = kv_bf16_to_f32(kv_load_u16(from + 2 * i));
}

/* ---- lengths ---- */

INLINE f64_vector squares_at(const float *values)
{
	const f64_vector vector = load_widened(values);

	return vector * vector;
}

/* n is a constant wherever this is called, so the sums stay in registers. */
INLINE double sum_squares(const float *values, const uint32_t n)
{
	f64_vector sums[KV_ROW_KERNELS_VALUES_MAX / 2 / LANES];

	UNROLL_ALL
	for (uint32_t i = 0; i < n / 2; i += LANES)
		sums[i / LANES] = squares_at(values + i) + squares_at(values + i + n / 2);
	UNROLL_ALL
	for (uint32_t half = n / 4; half >= SUMS; half /= 2) {
		UNROLL_ALL
		for (uint32_t i = 0; i < half; i += LANES)
			sums[i / LANES] += sums[(i + half) / LANES];
	}
	return add_sums(sums);
}

static double sum_squares_of(const float *values, uint32_t n)
{
	switch (n) {
	case 16:
		return sum_squares(values, 16);
	case 32:
		return sum_squares(values, 32);
	case 64:
		return sum_squares(values, 64);
	case 128:
		return sum_squares(values, 128);
	default:
		return sum_squares(values, KV_ROW_KERNELS_VALUES_MAX);
	}
}

/* A sum with a 0 is exact, so zeros up to a power of two change nothing. */
float OF_SET(kv_row_length)(const float *values, uint32_t n)
{
	float padded[KV_ROW_KERNELS_VALUES_MAX];
	uint32_t n_padded = KV_ROW_KERNELS_STEP;

	KV_ASSERT(n <= KV_ROW_KERNELS_VALUES_MAX);
	while (n_padded < n)
		n_padded *= 2;
	if (n < n_padded) {
		memcpy(padded, values, n * sizeof(*padded));
		memset(padded + n, 0, (n_padded - n) * sizeof(*padded));
		values = padded;
	}
	return (float)sqrt(sum_squares_of(values, n_padded));
}

void OF_SET(kv_row_divide)(const float *values, uint32_t n, float divisor, float *out)
{
	uint32_t i = 0;

	for (; i + NARROW_LANES <= n; i += NARROW_LANES)
		store_f32(load_f32(values + i) / divisor, out + i);
	for (; i < n; i++)
		out[i] = values[i] / divisor;
}

/* ---- butterflies ---- */

INLINE f32_vector butterflies_inside(f32_vector v)
{
#if NARROW_LANES == 4
	v = BUTTERFLY_4(v, 1);
	v = BUTTERFLY_4(v, 2);
#elif NARROW_LANES == 8
	v = BUTTERFLY_8(v, 1);
	v = BUTTERFLY_8(v, 2);
	v = BUTTERFLY_8(v, 4);
#else
	v = BUTTERFLY_16(v, 1);
	v = BUTTERFLY_16(v, 2);
	v = BUTTERFLY_16(v, 4);
	v = BUTTERFLY_16(v, 8);
#endif
	return v;
}

/* Vectors that are transformed in registers: half of them, the others are for what comes up on the way. */
#if VECTOR_BYTES == 64
#define BLOCK_VECTORS 16u
#else
#define BLOCK_VECTORS 8u
#endif
#define BLOCK (BLOCK_VECTORS * NARROW_LANES)

/* H (before * from), unfinished: n numbers, a constant wherever this is called, at most BLOCK. */
INLINE void transform_block(
	const uint32_t n, const float *before, const float *from, f32_vector out[BLOCK_VECTORS])
{
	const uint32_t n_vectors = n / NARROW_LANES;

	UNROLL_ALL
	for (uint32_t v = 0; v < n_vectors; v++) {
		const size_t at = (size_t)v * NARROW_LANES;

		out[v] = butterflies_inside(load_f32(before + at) * load_f32(from + at));
	}
	UNROLL_ALL
	for (uint32_t stride = 1; stride < n_vectors; stride *= 2) {
		UNROLL_ALL
		for (uint32_t v = 0; v < n_vectors; v++) {
			if (v & stride)
				continue;

			const f32_vector a = out[v], b = out[v + stride];

			out[v] = a + b;
			out[v + stride] = a - b;
		}
	}
}

INLINE void finish_vector(f32_vector v, const float *after, float factor, float *to)
{
	store_f32(load_f32(after) * (v * factor), to);
}

INLINE void transform_whole(
	const uint32_t n, const float *before, const float *after, float factor, const float *from, float *to)
{
	f32_vector block[BLOCK_VECTORS];

	transform_block(n, before, from, block);
	UNROLL_ALL
	for (uint32_t v = 0; v < n / NARROW_LANES; v++)
		finish_vector(
			block[v], after + (size_t)v * NARROW_LANES, factor, to + (size_t)v * NARROW_LANES);
}

#if BLOCK < KV_ROW_KERNELS_VALUES_MAX
/* n is above BLOCK: blocks, then the other strides over memory, the last with factors and signs. */
static void transform_blocks(
	uint32_t n, const float *before, const float *after, float factor, const float *from, float *to)
{
	const uint32_t last = n / 2;

	for (uint32_t first = 0; first < n; first += BLOCK) {
		f32_vector block[BLOCK_VECTORS];

		transform_block(BLOCK, before + first, from + first, block);
		UNROLL
		for (uint32_t v = 0; v < BLOCK_VECTORS; v++)
			store_f32(block[v], to + first + (size_t)v * NARROW_LANES);
	}
	for (uint32_t stride = BLOCK; stride < last; stride *= 2) {
		for (uint32_t first = 0; first < n; first += 2 * stride) {
			for (uint32_t i = first; i < first + stride; i += NARROW_LANES) {
				const f32_vector a = load_f32(to + i), b = load_f32(to + i + stride);

				store_f32(a + b, to + i);
				store_f32(a - b, to + i + stride);
			}
		}
	}
	for (uint32_t i = 0; i < last; i += NARROW_LANES) {
		const f32_vector a = load_f32(to + i), b = load_f32(to + i + last);

		finish_vector(a + b, after + i, factor, to + i);
		finish_vector(a - b, after + i + last, factor, to + i + last);
	}
}
#endif

void OF_SET(kv_row_hadamard_f32)(
	uint32_t n, const float *before, const float *after, float factor, const float *from, float *to)
{
	KV_ASSERT(n >= KV_ROW_KERNELS_STEP && n <= KV_ROW_KERNELS_VALUES_MAX && (n & (n - 1)) == 0);
	if (n == 16)
		transform_whole(16, before, after, factor, from, to);
	else if (n == 32)
		transform_whole(32, before, after, factor, from, to);
#if BLOCK >= 64
	else if (n == 64)
		transform_whole(64, before, after, factor, from, to);
#endif
#if BLOCK >= 256
	else if (n == 128)
		transform_whole(128, before, after, factor, from, to);
	else
		transform_whole(256, before, after, factor, from, to);
#else
	else
		transform_blocks(n, before, after, factor, from, to);
#endif
}

/* ---- codebook cells ---- */

/* counts + 1 where values > boundaries. */
INLINE i32_vector count_where_above(i32_vector counts, f32_vector values, f32_vector boundaries)
{
#if VECTOR_BYTES == 64
	return (i32_vector)_mm512_mask_add_epi32((__m512i)counts,
		_mm512_cmp_ps_mask((__m512)values, (__m512)boundaries, _CMP_GT_OQ), (__m512i)counts,
		_mm512_set1_epi32(1));
#else
	return counts - (values > boundaries); /* a comparison that holds is -1 */
#endif
}

INLINE f32_vector repeat(float value)
{
	return value - (f32_vector){ 0 };
}

INLINE void store_cells(i32_vector counts, uint8_t *cells)
{
	const u8_vector bytes = __builtin_convertvector(counts, u8_vector);

	memcpy(cells, &bytes, sizeof(bytes));
}

#if VECTOR_BYTES == 32
/* Packing works on halves of registers: groups of four cells come out as 0 2 4 6 1 3 5 7. */
INLINE void store_four_cells(const i32_vector counts[4], uint8_t *cells)
{
	const __m256i low = _mm256_packs_epi32((__m256i)counts[0], (__m256i)counts[1]);
	const __m256i high = _mm256_packs_epi32((__m256i)counts[2], (__m256i)counts[3]);
	const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);

	_mm256_storeu_si256(
		(__m256i *)(void *)cells, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
}
#endif

#define COUNTS_AT_ONCE 4u
#define COUNT_MAX      64u /* with more boundaries a search takes less time, though it is no vector */

/* n_vectors is a constant wherever this is called: several counts at once, since one waits for itself. */
INLINE void count_vectors(const float *boundaries, uint32_t n_boundaries, const float *y,
	const uint32_t n_vectors, uint8_t *cells)
{
	f32_vector values[COUNTS_AT_ONCE];
	i32_vector counts[COUNTS_AT_ONCE];

	UNROLL
	for (uint32_t v = 0; v < n_vectors; v++) {
		values[v] = load_f32(y + (size_t)v * NARROW_LANES);
		counts[v] = (i32_vector){ 0 };
	}
	for (uint32_t b = 0; b < n_boundaries; b++) {
		UNROLL
		for (uint32_t v = 0; v < n_vectors; v++)
			counts[v] = count_where_above(counts[v], values[v], repeat(boundaries[b]));
	}
#if VECTOR_BYTES == 32
	if (n_vectors == 4) {
		store_four_cells(counts, cells);
		return;
	}
#endif
	UNROLL
	for (uint32_t v = 0; v < n_vectors; v++)
		store_cells(counts[v], cells + (size_t)v * NARROW_LANES);
}

/* Values are compared with all boundaries. */
static uint32_t count_whole_vectors(
	const float *boundaries, uint32_t n_boundaries, const float *y, uint32_t n, uint8_t *cells)
{
	uint32_t i = 0;

	for (; i + COUNTS_AT_ONCE * NARROW_LANES <= n; i += COUNTS_AT_ONCE * NARROW_LANES)
		count_vectors(boundaries, n_boundaries, y + i, COUNTS_AT_ONCE, cells + i);
	for (; i + NARROW_LANES <= n; i += NARROW_LANES)
		count_vectors(boundaries, n_boundaries, y + i, 1, cells + i);
	return i;
}

#if VECTOR_BYTES >= 32
/*
 * Sixteen cells: boundaries 3, 7 and 11 say in which four cells a value is, and what remains are three
 * comparisons with boundaries out of a table: 6 in place of 15.
 */
#define SIXTEEN_BOUNDARIES 15u

struct sixteen {
	f32_vector every_fourth[3];
	f32_vector within[3];
};

#if VECTOR_BYTES == 64
/* within[k]: boundary 4 f + k at 4 f. */
INLINE struct sixteen load_sixteen(const float *boundaries)
{
	const __m512 all = _mm512_maskz_loadu_ps(0x7FFF, boundaries);
	const __m512i first = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
	struct sixteen sixteen;

	UNROLL
	for (uint32_t k = 0; k < 3; k++) {
		sixteen.every_fourth[k] = (f32_vector)_mm512_set1_ps(boundaries[4 * k + 3]);
		sixteen.within[k] = (f32_vector)_mm512_permutexvar_ps(
			_mm512_add_epi32(first, _mm512_set1_epi32((int)k)), all);
	}
	return sixteen;
}

INLINE i32_vector cells_of(const struct sixteen *sixteen, f32_vector values)
{
	const __m512 y = (__m512)values;
	__m512i four = _mm512_setzero_si512(), cells;

	UNROLL
	for (uint32_t k = 0; k < 3; k++)
		four = _mm512_mask_add_epi32(four,
			_mm512_cmp_ps_mask(y, (__m512)sixteen->every_fourth[k], _CMP_GT_OQ), four,
			_mm512_set1_epi32(4));
	cells = four;
	UNROLL
	for (uint32_t k = 0; k < 3; k++)
		cells = _mm512_mask_add_epi32(cells,
			_mm512_cmp_ps_mask(
				y, _mm512_permutexvar_ps(four, (__m512)sixteen->within[k]), _CMP_GT_OQ),
			cells, _mm512_set1_epi32(1));
	return (i32_vector)cells;
}
#else
/* within[k]: boundary 4 f + k at f, in both halves. */
INLINE struct sixteen load_sixteen(const float *boundaries)
{
	struct sixteen sixteen;

	UNROLL
	for (uint32_t k = 0; k < 3; k++) {
		const float *b = boundaries + k;

		sixteen.every_fourth[k] = (f32_vector)_mm256_set1_ps(boundaries[4 * k + 3]);
		sixteen.within[k] =
			(f32_vector)_mm256_setr_ps(b[0], b[4], b[8], b[12], b[0], b[4], b[8], b[12]);
	}
	return sixteen;
}

INLINE i32_vector cells_of(const struct sixteen *sixteen, f32_vector values)
{
	i32_vector four = { 0 }, cells;

	UNROLL
	for (uint32_t k = 0; k < 3; k++)
		four -= values > sixteen->every_fourth[k];
	cells = four << 2;
	UNROLL
	for (uint32_t k = 0; k < 3; k++)
		cells -= values > (f32_vector)_mm256_permutevar_ps((__m256)sixteen->within[k], (__m256i)four);
	return cells;
}
#endif

static uint32_t find_sixteen(const float *boundaries, const float *y, uint32_t n, uint8_t *cells)
{
	const struct sixteen sixteen = load_sixteen(boundaries);
	uint32_t i = 0;

#if VECTOR_BYTES == 32
	for (; i + 4 * NARROW_LANES <= n; i += 4 * NARROW_LANES) {
		i32_vector four[4];

		UNROLL
		for (uint32_t v = 0; v < 4; v++)
			four[v] = cells_of(&sixteen, load_f32(y + i + (size_t)v * NARROW_LANES));
		store_four_cells(four, cells + i);
	}
#endif
	for (; i + NARROW_LANES <= n; i += NARROW_LANES)
		store_cells(cells_of(&sixteen, load_f32(y + i)), cells + i);
	return i;
}

/*
 * More cells, the same way: seven boundaries say in which eighth of the cells a value is, and those within
 * come out of a table each: 7 + 3, 7, 15 and 31 comparisons for 5, 6, 7 and 8 bits.
 */
#define EIGHTHS    8u
#define WITHIN_MAX 31u

/* Lane e of within[k]: boundary k of eighth e. */
static void fill_eighths(const float *boundaries, uint32_t n_each, float within[WITHIN_MAX][NARROW_LANES])
{
	for (uint32_t k = 0; k + 1 < n_each; k++) {
		for (uint32_t lane = 0; lane < NARROW_LANES; lane++)
			within[k][lane] = boundaries[lane % EIGHTHS * n_each + k];
	}
}

INLINE f32_vector look_up(f32_vector table, i32_vector idx)
{
#if VECTOR_BYTES == 64
	return (f32_vector)_mm512_permutexvar_ps((__m512i)idx, (__m512)table);
#else
	return (f32_vector)_mm256_permutevar8x32_ps((__m256)table, (__m256i)idx);
#endif
}

static uint32_t find_eighths(
	const float *boundaries, uint32_t n_each, const float *y, uint32_t n, uint8_t *cells)
{
	float within[WITHIN_MAX][NARROW_LANES];
	uint32_t i = 0;

	fill_eighths(boundaries, n_each, within);
	for (; i + NARROW_LANES <= n; i += NARROW_LANES) {
		const f32_vector values = load_f32(y + i);
		i32_vector eighths = { 0 }, counts;

		UNROLL
		for (uint32_t e = 1; e < EIGHTHS; e++)
			eighths = count_where_above(eighths, values, repeat(boundaries[e * n_each - 1]));
		counts = eighths * (int32_t)n_each;
		for (uint32_t k = 0; k + 1 < n_each; k++)
			counts = count_where_above(counts, values, look_up(load_f32(within[k]), eighths));
		store_cells(counts, cells + i);
	}
	return i;
}
#endif

/* What whole vectors do; returns how many values are done. */
static uint32_t find_cells(
	const float *boundaries, uint32_t n_boundaries, const float *y, uint32_t n, uint8_t *cells)
{
#if VECTOR_BYTES >= 32
	if (n_boundaries == SIXTEEN_BOUNDARIES)
		return find_sixteen(boundaries, y, n, cells);
	if (n_boundaries > SIXTEEN_BOUNDARIES && (n_boundaries + 1) % EIGHTHS == 0)
		return find_eighths(boundaries, (n_boundaries + 1) / EIGHTHS, y, n, cells);
#endif
	return n_boundaries < COUNT_MAX ? count_whole_vectors(boundaries, n_boundaries, y, n, cells) : 0;
}

#define SEARCHES_AT_ONCE 8u

/*
 * The same number of steps for every value, and no branch that depends on it. n_values is a constant where it
 * is SEARCHES_AT_ONCE: several searches, since one waits for itself.
 */
INLINE void search(const float *boundaries, uint32_t n_boundaries, const float *y, const uint32_t n_values,
	uint8_t *cells)
{
	uint32_t first[SEARCHES_AT_ONCE] = { 0 };

	for (uint32_t left = n_boundaries; left > 0; left /= 2) {
		const uint32_t half = (left + 1) / 2;

		UNROLL
		for (uint32_t v = 0; v < n_values; v++)
			first[v] += half & -(uint32_t)(boundaries[first[v] + half - 1] < y[v]);
	}
	for (uint32_t v = 0; v < n_values; v++)
		cells[v] = (uint8_t)first[v];
}

void OF_SET(kv_row_count_below)(
	const float *boundaries, uint32_t n_boundaries, const float *y, uint32_t n, uint8_t *cells)
{
	uint32_t i = find_cells(boundaries, n_boundaries, y, n, cells);

	for (; i + SEARCHES_AT_ONCE <= n; i += SEARCHES_AT_ONCE)
		search(boundaries, n_boundaries, y + i, SEARCHES_AT_ONCE, cells + i);
	for (; i < n; i++)
		search(boundaries, n_boundaries, y + i, 1, cells + i);
}
