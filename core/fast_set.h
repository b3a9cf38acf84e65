/*
 * What the files that are compiled once per instruction set share: core/fast_kernels.c, fast_sums.c,
 * fast_bits.c, fast_softmax.c.
 */
#ifndef CORE_FAST_SET_H
#define CORE_FAST_SET_H

#include "core/fast_vector.h"

#ifndef KV_FAST_SET
#error "compiled by core/meson.build, once per instruction set"
#endif
/* The name of something that every set has. */
#define OF_SET(name)     JOIN(name, KV_FAST_SET)
#define JOIN(a, b)       JOIN_AGAIN(a, b)
#define JOIN_AGAIN(a, b) a##_##b
#define TEXT(set)        TEXT_AGAIN(set)
#define TEXT_AGAIN(set)  #set

#define TOKENS KV_FAST_BLOCK_TOKENS
#define STEP   KV_FAST_STEP_TOKENS
/* Slots of struct kv_fast_kernels. */
void OF_SET(kv_fast_accumulate)(const struct kv_fast_side *side, const struct kv_fast_rows *rows,
	const float *weights, uint32_t n_queries, float *const *sums, float *const *zeros);
float OF_SET(kv_fast_max)(const float *values, uint32_t n);
float OF_SET(kv_fast_exp2_sum)(float *values, uint32_t n, float max);
void OF_SET(kv_fast_bend)(float *values, uint32_t n, float offset, float cap, float slope, float first);
void OF_SET(kv_fast_scale)(float *values, uint32_t n, float factor);
void OF_SET(kv_fast_add)(double *sums, const float *values, uint32_t n, double factor);

/* core/fast_short_sums.c: weighted sums of a part that has short ones, as kv_fast_accumulate() adds them,
 * with weights times the rows' scales; NULL: these are 1. */
void OF_SET(kv_fast_sum_short)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *weights, const float *scales, uint32_t n_queries, float *const *sums);

/*
 * core/fast_bits.c: scores of all rows as dots[query * STEP + token], weighted sums of all rows as
 * kv_fast_accumulate() adds them, with weights times the rows' scales; NULL: these are 1.
 */
void OF_SET(kv_fast_dot_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, uint32_t n_queries, float *dots);
void OF_SET(kv_fast_sum_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *weights, const float *scales, uint32_t n_queries, float *const *sums);

/* LANES weights times the scales of their rows, NULL: none. */
INLINE f32_lanes scaled_at(const float *values, const float *scales, uint32_t t)
{
	return scales ? load_f32(values + t) * load_f32(scales + t) : load_f32(values + t);
}

/* Places that hold a row. */
INLINE uint32_t n_places(const struct kv_fast_rows *rows)
{
	return (rows->n_rows + TOKENS - 1) / TOKENS * TOKENS;
}

/* ---- what comes next ---- */

/*
 * A processor keeps track of some 20 lines that are under way, and drops or delays what exceeds them: so they
 * are asked for one by one, as evenly as a kernel can.
 */
struct asking {
	const uint8_t *at;
	uint32_t step,
		n_lines; /* of a turn; some lines are asked for twice, as guessing wrong takes longer */
};

/*
 * The share of slots [slot, + n_slots) of the part and the block of rows at `first`, in n_turns steps. Where
 * that is more than one run they mostly lie one after the other; else some of it is not asked for.
 */
INLINE struct asking begin_asking(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	uint32_t first, uint32_t slot, uint32_t n_slots, uint32_t n_turns)
{
	const struct kv_fast_ahead *ahead = &rows->ahead;
	uint64_t at = ahead->from;
	uint32_t run = 0;

	at += ((uint64_t)(part->slot + slot) * (n_places(rows) / TOKENS) +
		      (uint64_t)n_slots * (first / TOKENS)) *
		ahead->slot_bytes / 256;
	for (; run + 1 < STEP / KV_FAST_RUN_TOKENS && at >= ahead->run_bytes; run++)
		at -= ahead->run_bytes;
	if (!ahead->runs[run]) /* no lines, or again and again one that is there */
		return (struct asking){ rows->rows[first], 0, 0 };

	const uint32_t step = (uint32_t)(n_slots * ahead->slot_bytes / 256 / n_turns);

	return (struct asking){ ahead->runs[run] + at, step, (step + 63) / 64 };
}

INLINE void ask(struct asking *asking)
{
	for (uint32_t i = 0; i < asking->n_lines; i++)
		__builtin_prefetch(asking->at + (size_t)i * 64, 0, 2);
	asking->at += asking->step;
}

/* The same where a turn has two lines in most pools: a loop in a kernel's loop takes longer than these. */
INLINE void ask_two(struct asking *asking)
{
	__builtin_prefetch(asking->at, 0, 2);
	__builtin_prefetch(asking->at + 64, 0, 2);
	if (__builtin_expect(asking->n_lines > 2, 0)) {
		for (uint32_t i = 2; i < asking->n_lines; i++)
			__builtin_prefetch(asking->at + (size_t)i * 64, 0, 2);
	}
	asking->at += asking->step;
}

/*
 * Rows of the next call are in the second-level cache, one here and one there: on their way to them, kernels
 * bring them into the first level, as evenly. The line in which a row begins is there: the row before it,
 * which this call works on, ends in it.
 */
struct touching {
	const uint8_t *const *rows;
	uint32_t offset, row_bytes, row, due, step; /* due, step: rows, times 64 */
};

/* Longer rows would not stay there. */
#define TOUCHED_BYTES_MAX 160u

INLINE struct touching begin_touching(
	const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t first, uint32_t n_turns)
{
	const bool is_due = part->slot == 0 && rows->row_bytes > 0 && rows->row_bytes <= TOUCHED_BYTES_MAX;

	return (struct touching){ .rows = rows->rows + first,
		.offset = rows->offset + rows->row_bytes,
		.row_bytes = rows->row_bytes,
		.step = is_due ? TOKENS * 64 / n_turns : 0 };
}

INLINE void touch(struct touching *touching)
{
	touching->due += touching->step;
	for (; touching->row * 64 < touching->due; touching->row++) {
		const uint8_t *row = touching->rows[touching->row] + touching->offset;

		uint32_t at = touching->row_bytes + 63;

		do {
			at -= 64;
			__builtin_prefetch(row + at);
		} while (at >= 128);
	}
}

/* Scales of a step are read before everything else. */
INLINE void touch_field(const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t t)
{
	__builtin_prefetch(rows->rows[t] + rows->row_bytes + part->scale.offset);
}

/* ---- rows ---- */

/* A part as it lies behind the pointers of `rows`. */
INLINE struct kv_fast_part part_of_rows(const struct kv_fast_part *part, const struct kv_fast_rows *rows)
{
	struct kv_fast_part moved = *part;

	moved.offset += rows->offset;
	moved.scale.offset += rows->offset;
	moved.zero.offset += rows->offset;
	moved.outer.offset += rows->offset;
	return moved;
}

/* End of the block at `first`, without places that only hold some row. */
INLINE uint32_t end_of_block(const struct kv_fast_rows *rows, uint32_t first)
{
	return rows->n_rows < first + TOKENS ? rows->n_rows : first + TOKENS;
}

/*
 * Rows whose distance is a multiple of 512 bytes lie in an eighth of the sets of a first-level cache, where
 * those of a step do not fit at once: a side of several parts, which goes over them several times, has them
 * side by side.
 */
#define NEAR_BYTES 64u

struct near_rows {
	_Alignas(64) uint8_t bytes[(STEP + 1) * NEAR_BYTES];
	struct kv_fast_rows rows;
};

static inline const struct kv_fast_rows *bring_near(
	const struct kv_fast_side *side, const struct kv_fast_rows *rows, struct near_rows *near)
{
	if (side->n_parts == 1 || rows->row_bytes > NEAR_BYTES || (rows->rows[1] - rows->rows[0]) % 512 != 0)
		return rows;
	for (uint32_t t = 0; t < n_places(rows); t++) {
		uint8_t *to = near->bytes + (size_t)t * NEAR_BYTES;

		UNROLL
		for (uint32_t i = 0; i < NEAR_BYTES; i += 32)
			memcpy(to + i, rows->rows[t] + rows->offset + i, 32);
		near->rows.rows[t] = to;
	}
	near->rows.n_rows = rows->n_rows;
	near->rows.offset = 0;
	near->rows.row_bytes = 0;
	near->rows.ahead = rows->ahead;
	return &near->rows;
}

/* LANES numbers from slot i on. */
INLINE f_vector numbers_of(
	const uint8_t *numbers, uint32_t i, const enum kv_dtype number, const bool is_shifted)
{
	if (is_shifted) /* bf16 */
		return bf16_of_words(numbers + (size_t)(i / WORDS) * WORDS * 2, i / LANES % 2);
	if (number == KV_DTYPE_F32)
		return (f_vector)load_f32((const float *)(const void *)numbers + i);
	if (number == KV_DTYPE_F16)
		return f16_to_f32(numbers + (size_t)i * 2);
	if (number == KV_DTYPE_BF16)
		return bf16_to_f32(numbers + (size_t)i * 2);
	return e4m3_to_f32(numbers + i);
}

/* ---- fields of rows ---- */

INLINE float f32_at(const uint8_t *from)
{
	float value;

	memcpy(&value, from, sizeof(value));
	return value;
}

/* Numbers of LANES rows from `first` on. Put together in registers: what is stored in small pieces can be
 * loaded as a whole only later. */
INLINE f32_lanes singles_of_rows(const struct kv_fast_rows *rows, uint32_t first, uint32_t offset)
{
	__m128 quads[LANES / 4];

	UNROLL
	for (uint32_t i = 0; i < LANES / 4; i++) {
		const uint8_t *const *four = rows->rows + first + (size_t)i * 4;

		quads[i] = _mm_setr_ps(f32_at(four[0] + offset), f32_at(four[1] + offset),
			f32_at(four[2] + offset), f32_at(four[3] + offset));
	}
	return (f32_lanes)join_quads(quads);
}

/* Of all places that hold rows. By way of integers: vector units have more to do than others. */
INLINE void load_singles(const struct kv_fast_rows *rows, uint32_t offset, float out[STEP])
{
	const uint32_t n = n_places(rows);

	for (uint32_t t = 0; t < n; t += 8) {
		const uint8_t *const *from = rows->rows + t;

		UNROLL
		for (uint32_t i = 0; i < 8; i++) {
			uint32_t word;

			memcpy(&word, from[i] + offset, sizeof(word));
			FORGET(word);
			memcpy(out + t + i, &word, sizeof(word));
		}
	}
}

INLINE void store_halves(__m128i eight, float *to)
{
	_mm256_storeu_ps(to, _mm256_cvtph_ps(eight));
}

/* A run of fields of float16 of all places that hold rows: eight rows of eight fields are transposed. */
INLINE void load_halves(const struct kv_fast_rows *rows, uint32_t offset, const uint32_t n_halves,
	float out[KV_FAST_RUN_HALVES][STEP])
{
	for (uint32_t t = 0; t < n_places(rows); t += 8) {
		__m128i eight[8], four[8], two[8];

		UNROLL
		for (uint32_t i = 0; i < 8; i++)
			eight[i] =
				_mm_loadu_si128((const __m128i *)(const void *)(rows->rows[t + i] + offset));
		UNROLL
		for (uint32_t i = 0; i < 4; i++) {
			four[i] = _mm_unpacklo_epi16(eight[i], eight[i + 4]);
			four[i + 4] = _mm_unpackhi_epi16(eight[i], eight[i + 4]);
		}
		UNROLL
		for (uint32_t i = 0; i < n_halves; i += 4) {
			UNROLL
			for (uint32_t k = 0; k < 2; k++) {
				two[i + k] = _mm_unpacklo_epi16(four[i + k], four[i + k + 2]);
				two[i + k + 2] = _mm_unpackhi_epi16(four[i + k], four[i + k + 2]);
			}
			UNROLL
			for (uint32_t k = 0; k < 4; k += 2) {
				store_halves(_mm_unpacklo_epi16(two[i + k], two[i + k + 1]), out[i + k] + t);
				store_halves(
					_mm_unpackhi_epi16(two[i + k], two[i + k + 1]), out[i + k + 1] + t);
			}
		}
	}
}

/* The same of two fields, which are a register's lane each. */
INLINE void load_two_halves(
	const struct kv_fast_rows *rows, uint32_t offset, float out[KV_FAST_RUN_HALVES][STEP])
{
	const __m128i apart = _mm_set_epi64x(0x0F0E0B0A07060302, 0x0D0C090805040100);

	for (uint32_t t = 0; t < n_places(rows); t += 8) {
		__m128i fours[2];

		UNROLL
		for (uint32_t i = 0; i < 2; i++) {
			const uint8_t *const *from = rows->rows + t + (size_t)i * 4;
			__m128i pairs[2];

			UNROLL
			for (uint32_t k = 0; k < 2; k++)
				pairs[k] = _mm_unpacklo_epi32(_mm_loadu_si32(from[2 * k] + offset),
					_mm_loadu_si32(from[2 * k + 1] + offset));
			fours[i] = _mm_shuffle_epi8(_mm_unpacklo_epi64(pairs[0], pairs[1]), apart);
		}
		store_halves(_mm_unpacklo_epi64(fours[0], fours[1]), out[0] + t);
		store_halves(_mm_unpackhi_epi64(fours[0], fours[1]), out[1] + t);
	}
}

/* Scales and zeros of a side's rows. */
struct fields {
	_Alignas(64) float halves[KV_FAST_RUNS_MAX][KV_FAST_RUN_HALVES][STEP]; /* of every run */
	_Alignas(64) float scales[STEP], zeros[STEP], outers[STEP];
	/* Of one part, both times the outer scale; NULL: none. */
	const float *scale, *zero;
};

/* What all parts share: first of all. */
static inline void begin_fields(
	const struct kv_fast_side *side, const struct kv_fast_rows *rows, struct fields *fields)
{
	for (uint32_t run = 0; run < side->n_runs; run++) {
		const uint32_t offset = side->run_offsets[run] + rows->offset;

		if (side->n_of_run[run] > 4)
			load_halves(rows, offset, 8, fields->halves[run]);
		else if (side->n_of_run[run] > 2)
			load_halves(rows, offset, 4, fields->halves[run]);
		else
			load_two_halves(rows, offset, fields->halves[run]);
	}
}

INLINE const float *field_values(const struct kv_fast_field *field, const struct kv_fast_rows *rows,
	const struct fields *fields, float singles[STEP])
{
	if (field->kind == KV_FAST_FIELD_NONE)
		return NULL;
	if (field->kind == KV_FAST_FIELD_F16)
		return fields->halves[field->run][field->lane];
	load_singles(rows, field->offset, singles);
	return singles;
}

INLINE const float *multiply(const float *values, const float *factors, uint32_t n, float *to)
{
	for (uint32_t t = 0; t < n; t += LANES)
		store_f32(load_f32(values + t) * load_f32(factors + t), to + t);
	return to;
}

static inline void load_fields(
	const struct kv_fast_part *part, const struct kv_fast_rows *rows, struct fields *fields)
{
	const float *outer = field_values(&part->outer, rows, fields, fields->outers);

	fields->scale = field_values(&part->scale, rows, fields, fields->scales);
	fields->zero = field_values(&part->zero, rows, fields, fields->zeros);
	if (!outer)
		return;
	fields->scale =
		fields->scale ? multiply(fields->scale, outer, n_places(rows), fields->scales) : outer;
	if (fields->zero)
		fields->zero = multiply(fields->zero, outer, n_places(rows), fields->zeros);
}

#endif
