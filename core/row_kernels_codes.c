/*
 * Packed codes of one set of row kernels: expanded, or scored and summed up as they are. The lookup in a
 * table of 16 numbers is written per instruction set, since no vector extension describes it.
 */
#include "core/row_kernels.h"

#include <stddef.h>
#include <string.h>

#include "core/error.h"
#include "core/number.h"
#include "core/row_kernels_vector.h"

/*
 * Codes [first, first + 8) of a stream of `bits` bits a code, in the low bits. first is a multiple of 8.
 * Three bytes are put together in a register: a copy would be read back before it is written.
 */
INLINE uint32_t load_eight(const uint8_t *packed, uint32_t first, const uint32_t bits)
{
	const uint8_t *at = packed + (size_t)first / 8 * bits;
	uint32_t codes = 0;

	if (bits == 3)
		return (uint32_t)kv_load_u16(at) | (uint32_t)at[2] << 16;
	memcpy(&codes, at, bits);
	return codes;
}

#define ENTRIES       (1u << KV_ROW_KERNELS_BITS_MAX)
#define ENTRY_VECTORS (ENTRIES / LANES)

/* The table as float64; entries that no code names are 0 or a copy of others. */
INLINE void load_entries(const float *table, const uint32_t bits, f64_vector entries[ENTRY_VECTORS])
{
	const uint32_t n = 1u << bits;
	float padded[LANES] = { 0 };

	if (n < LANES) {
		memcpy(padded, table, n * sizeof(*table));
		table = padded;
	}
	UNROLL
	for (uint32_t v = 0; v < ENTRY_VECTORS; v++)
		entries[v] = load_widened(table + (v * LANES < n ? v * LANES : 0));
}

INLINE void scale_entries(const f64_vector entries[ENTRY_VECTORS], const struct kv_row_scale *scale,
	f64_vector scaled[ENTRY_VECTORS])
{
	UNROLL
	for (uint32_t v = 0; v < ENTRY_VECTORS; v++)
		scaled[v] = (entries[v] * scale->scale + scale->zero) * scale->outer;
}

#if defined(__AVX512F__)
struct table {
	__m512d low, high; /* entries 0 to 7, 8 to 15 */
};

INLINE struct table make_table(const f64_vector entries[ENTRY_VECTORS])
{
	return (struct table){ .low = (__m512d)entries[0], .high = (__m512d)entries[1] };
}

/* The lookup takes the low four bits of each index. */
INLINE f64_vector values_of_eight(const struct table *table, uint32_t codes, const uint32_t bits)
{
	const int64_t b = bits;
	const __m512i places = _mm512_set_epi64(7 * b, 6 * b, 5 * b, 4 * b, 3 * b, 2 * b, b, 0);
	__m512i indices = _mm512_srlv_epi64(_mm512_set1_epi32((int)codes), places);

	if (bits < KV_ROW_KERNELS_BITS_MAX)
		indices = _mm512_and_si512(indices, _mm512_set1_epi64((1 << bits) - 1));
	return (f64_vector)_mm512_permutex2var_pd(table->low, indices, table->high);
}

INLINE void look_up_eight(const struct table *table, uint32_t codes, const uint32_t bits, double *out)
{
	store_f64(values_of_eight(table, codes, bits), out);
}
#elif defined(__AVX2__)
struct table {
	__m256i low[2], high[2]; /* 32-bit halves of the entries; [0]: 0 to 7, [1]: 8 to 15 */
};

/* 32-bit halves of eight float64: the even ones or (is_high) the odd ones, in order. */
INLINE __m256i halves_of(const f64_vector entries[2], const bool is_high)
{
	const __m256 a = _mm256_castpd_ps((__m256d)entries[0]);
	const __m256 b = _mm256_castpd_ps((__m256d)entries[1]);
	const __m256 mixed = is_high ? _mm256_shuffle_ps(a, b, 0xDD) : _mm256_shuffle_ps(a, b, 0x88);

	return _mm256_permute4x64_epi64(_mm256_castps_si256(mixed), 0xD8);
}

INLINE struct table make_table(const f64_vector entries[ENTRY_VECTORS])
{
	return (struct table){
		.low = { halves_of(entries, false), halves_of(entries + 2, false) },
		.high = { halves_of(entries, true), halves_of(entries + 2, true) },
	};
}

/* A lookup in eight entries takes the low three bits of each index; the fourth chooses between two. */
INLINE __m256 look_up_half(const __m256i halves[2], __m256i indices, __m256 is_upper)
{
	return _mm256_blendv_ps(_mm256_castsi256_ps(_mm256_permutevar8x32_epi32(halves[0], indices)),
		_mm256_castsi256_ps(_mm256_permutevar8x32_epi32(halves[1], indices)), is_upper);
}

/* In an order of the codes in which joining the halves puts the results into theirs. */
INLINE void look_up_eight(const struct table *table, uint32_t codes, const uint32_t bits, double *out)
{
	const int b = (int)bits;
	const __m256i places = _mm256_set_epi32(7 * b, 6 * b, 3 * b, 2 * b, 5 * b, 4 * b, b, 0);
	__m256i indices = _mm256_srlv_epi32(_mm256_set1_epi32((int)codes), places);

	if (bits < KV_ROW_KERNELS_BITS_MAX)
		indices = _mm256_and_si256(indices, _mm256_set1_epi32((1 << bits) - 1));

	const __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(indices, 28));
	const __m256 low = look_up_half(table->low, indices, is_upper);
	const __m256 high = look_up_half(table->high, indices, is_upper);

	_mm256_storeu_pd(out, _mm256_castps_pd(_mm256_unpacklo_ps(low, high)));
	_mm256_storeu_pd(out + 4, _mm256_castps_pd(_mm256_unpackhi_ps(low, high)));
}
#else
struct table {
	double entries[ENTRIES];
};

INLINE struct table make_table(const f64_vector entries[ENTRY_VECTORS])
{
	struct table table;

	memcpy(table.entries, entries, sizeof(table.entries));
	return table;
}

INLINE void look_up_eight(const struct table *table, uint32_t codes, const uint32_t bits, double *out)
{
	UNROLL
	for (uint32_t i = 0; i < 8; i++)
		out[i] = table->entries[codes >> i * bits & ((1u << bits) - 1)];
}
#endif

/* Codes [first, n), fewer than eight. */
static void look_up_rest(const f64_vector entries[ENTRY_VECTORS], const uint8_t *packed, uint32_t first,
	uint32_t n, uint32_t bits, double *out)
{
	double table[ENTRIES];

	memcpy(table, entries, sizeof(table));
	for (uint32_t i = first; i < n; i++) {
		const uint32_t rest = i * bits % 8;
		uint32_t code = (uint32_t)packed[i * bits / 8] >> rest;

		if (rest + bits > 8)
			code |= (uint32_t)packed[i * bits / 8 + 1] << (8 - rest);
		out[i] = table[code & ((1u << bits) - 1)];
	}
}

/* bits is a constant wherever this is called. */
INLINE void expand_rows(const struct kv_row_codes *codes, const uint32_t bits, double *out, size_t out_stride)
{
	const uint32_t n_whole = codes->n - codes->n % 8;
	f64_vector entries[ENTRY_VECTORS], scaled[ENTRY_VECTORS];

	load_entries(codes->table, bits, entries);
	for (uint32_t r = 0; r < codes->n_rows; r++, out += out_stride) {
		const uint8_t *packed = codes->rows[r] + codes->offset;

		scale_entries(entries, &codes->scales[r], scaled);

		const struct table table = make_table(scaled);

		for (uint32_t i = 0; i < n_whole; i += 8)
			look_up_eight(&table, load_eight(packed, i, bits), bits, out + i);
		if (n_whole < codes->n)
			look_up_rest(scaled, packed, n_whole, codes->n, bits, out);
	}
}

void OF_SET(kv_row_expand_codes)(const struct kv_row_codes *codes, double *out, uint32_t out_stride)
{
	KV_ASSERT(codes->bits >= 1 && codes->bits <= KV_ROW_KERNELS_BITS_MAX);
	if (codes->bits == 4)
		expand_rows(codes, 4, out, out_stride);
	else if (codes->bits == 3)
		expand_rows(codes, 3, out, out_stride);
	else if (codes->bits == 2)
		expand_rows(codes, 2, out, out_stride);
	else
		expand_rows(codes, 1, out, out_stride);
}

#if defined(__AVX512F__)
/* ---- codes of four bits as they are ---- */

/*
 * Values stay in registers: storing them would take longer than looking them up twice. Of 32 registers a
 * score needs 12 for sums and 8 for tables, a weighted sum 12 for sums.
 */
#define CODES_QUERIES 3u
#define CODES_ROWS    4u
#define CODES_COLUMNS 32u

static void make_tables(const struct kv_row_codes *codes, struct table tables[KV_ROW_KERNELS_ROWS_MAX])
{
	f64_vector entries[ENTRY_VECTORS], scaled[ENTRY_VECTORS];

	KV_ASSERT(codes->bits == 4 && codes->n % KV_ROW_KERNELS_STEP == 0);
	KV_ASSERT(codes->n_rows <= KV_ROW_KERNELS_ROWS_MAX);
	load_entries(codes->table, 4, entries);
	for (uint32_t r = 0; r < codes->n_rows; r++) {
		scale_entries(entries, &codes->scales[r], scaled);
		tables[r] = make_table(scaled);
	}
}

/* n_rows and n_queries are constants wherever this is called. */
INLINE void score_block(const struct kv_row_codes *codes, const struct table *tables, uint32_t row_first,
	const uint32_t n_rows, const double *q, size_t q_stride, const uint32_t n_queries, double *products,
	size_t products_stride)
{
	const uint8_t *const *rows = codes->rows + row_first;
	f64_vector sums[CODES_QUERIES][CODES_ROWS];

	UNROLL
	for (uint32_t a = 0; a < n_queries; a++) {
		UNROLL
		for (uint32_t r = 0; r < n_rows; r++)
			sums[a][r] = (f64_vector){ 0 };
	}
	for (uint32_t i = 0; i < codes->n; i += SUMS) {
		UNROLL
		for (uint32_t r = 0; r < n_rows; r++) {
			const f64_vector values = values_of_eight(
				&tables[row_first + r], load_eight(rows[r] + codes->offset, i, 4), 4);

			UNROLL
			for (uint32_t a = 0; a < n_queries; a++)
				sums[a][r] += load_f64(q + a * q_stride + i) * values;
		}
	}
	UNROLL
	for (uint32_t a = 0; a < n_queries; a++) {
		UNROLL
		for (uint32_t r = 0; r < n_rows; r++)
			products[a * products_stride + row_first + r] = add_sums(&sums[a][r]);
	}
}

INLINE void score_queries(const struct kv_row_codes *codes, const struct table *tables, const double *q,
	size_t q_stride, const uint32_t n_queries, double *products, size_t products_stride)
{
	uint32_t row = 0;

	for (; row + CODES_ROWS <= codes->n_rows; row += CODES_ROWS)
		score_block(
			codes, tables, row, CODES_ROWS, q, q_stride, n_queries, products, products_stride);
	for (; row < codes->n_rows; row++)
		score_block(codes, tables, row, 1, q, q_stride, n_queries, products, products_stride);
}

void OF_SET(kv_row_score_codes)(const struct kv_row_codes *codes, const double *q, uint32_t q_stride,
	uint32_t n_queries, double *products, uint32_t products_stride)
{
	struct table tables[KV_ROW_KERNELS_ROWS_MAX];

	make_tables(codes, tables);
	for (; n_queries >= CODES_QUERIES; n_queries -= CODES_QUERIES) {
		score_queries(codes, tables, q, q_stride, CODES_QUERIES, products, products_stride);
		q += (size_t)CODES_QUERIES * q_stride;
		products += (size_t)CODES_QUERIES * products_stride;
	}
	if (n_queries == 2)
		score_queries(codes, tables, q, q_stride, 2, products, products_stride);
	else if (n_queries == 1)
		score_queries(codes, tables, q, q_stride, 1, products, products_stride);
}

/* n_columns and n_queries are constants wherever this is called. */
INLINE void accumulate_columns(const struct kv_row_codes *codes, const struct table *tables, uint32_t first,
	const uint32_t n_columns, const double *weights, size_t weights_stride, const uint32_t n_queries,
	double *acc, size_t acc_stride)
{
	f64_vector sums[CODES_QUERIES][CODES_COLUMNS / LANES];

	UNROLL
	for (uint32_t a = 0; a < n_queries; a++) {
		UNROLL
		for (uint32_t p = 0; p < n_columns / LANES; p++)
			sums[a][p] = load_f64(acc + a * acc_stride + first + (size_t)p * LANES);
	}
	for (uint32_t r = 0; r < codes->n_rows; r++) {
		const uint8_t *packed = codes->rows[r] + codes->offset;

		UNROLL
		for (uint32_t p = 0; p < n_columns / LANES; p++) {
			const f64_vector values =
				values_of_eight(&tables[r], load_eight(packed, first + p * LANES, 4), 4);

			UNROLL
			for (uint32_t a = 0; a < n_queries; a++)
				sums[a][p] += weights[a * weights_stride + r] * values;
		}
	}
	UNROLL
	for (uint32_t a = 0; a < n_queries; a++) {
		UNROLL
		for (uint32_t p = 0; p < n_columns / LANES; p++)
			store_f64(sums[a][p], acc + a * acc_stride + first + (size_t)p * LANES);
	}
}

INLINE void accumulate_queries(const struct kv_row_codes *codes, const struct table *tables,
	const double *weights, size_t weights_stride, const uint32_t n_queries, double *acc,
	size_t acc_stride)
{
	uint32_t i = 0;

	for (; i + CODES_COLUMNS <= codes->n; i += CODES_COLUMNS)
		accumulate_columns(
			codes, tables, i, CODES_COLUMNS, weights, weights_stride, n_queries, acc, acc_stride);
	if (i < codes->n)
		accumulate_columns(codes, tables, i, KV_ROW_KERNELS_STEP, weights, weights_stride, n_queries,
			acc, acc_stride);
}

void OF_SET(kv_row_accumulate_codes)(const struct kv_row_codes *codes, const double *weights,
	uint32_t weights_stride, uint32_t n_queries, double *acc, uint32_t acc_stride)
{
	struct table tables[KV_ROW_KERNELS_ROWS_MAX];

	make_tables(codes, tables);
	for (; n_queries >= CODES_QUERIES; n_queries -= CODES_QUERIES) {
		accumulate_queries(codes, tables, weights, weights_stride, CODES_QUERIES, acc, acc_stride);
		weights += (size_t)CODES_QUERIES * weights_stride;
		acc += (size_t)CODES_QUERIES * acc_stride;
	}
	if (n_queries == 2)
		accumulate_queries(codes, tables, weights, weights_stride, 2, acc, acc_stride);
	else if (n_queries == 1)
		accumulate_queries(codes, tables, weights, weights_stride, 1, acc, acc_stride);
}
#endif
