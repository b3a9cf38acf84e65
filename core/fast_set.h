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
/* Sixteen registers do not hold sums beside what taking these codes apart needs: their values go to memory.
 */
#define TAKES_CODES_APART_FIRST (LANES == 8)

/* Slots of struct kv_fast_kernels. */
void OF_SET(kv_fast_accumulate)(const struct kv_fast_side *side, const struct kv_fast_rows *rows,
	const float *weights, uint32_t stride, uint32_t n_queries, float *const *sums, float *const *zeros);
float OF_SET(kv_fast_max)(const float *values, uint32_t n);
float OF_SET(kv_fast_exp_sum)(float *values, uint32_t n, float max);
void OF_SET(kv_fast_bend)(float *values, uint32_t n, float offset, float cap, float slope, float first);
void OF_SET(kv_fast_scale)(float *values, uint32_t n, float factor);

/* core/fast_short_sums.c: weighted sums of a part that has short ones, as kv_fast_accumulate() adds them. */
void OF_SET(kv_fast_sum_short)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *scaled, uint32_t n_queries, float *const *sums);

/* core/fast_bits.c: scores as dots[query * TOKENS + token], weighted sums as kv_fast_accumulate() adds them.
 */
void OF_SET(kv_fast_dot_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const struct kv_fast_query *queries, uint32_t n_queries, float *dots);
void OF_SET(kv_fast_sum_bits)(const struct kv_fast_part *part, const struct kv_fast_rows *rows,
	const float *scaled, uint32_t n_queries, float *const *sums);

/* ---- what comes next ---- */

/*
 * A processor keeps track of some 20 lines that are under way, and drops or delays what exceeds them: so they
 * are asked for one by one, as evenly as a kernel can.
 */
struct asking {
	const uint8_t *at, *until;
	uint64_t step;
};

/* The part's share of it, in n_turns steps, from the turn on that begins with the part's slot `slot`. */
INLINE struct asking begin_asking(
	const struct kv_fast_part *part, const struct kv_fast_rows *rows, uint32_t slot, uint32_t n_turns)
{
	const struct kv_fast_ahead *ahead = &rows->ahead;
	struct asking asking = { ahead->from, ahead->from, 0 };

	if (ahead->n_bytes == 0)
		return asking;
	asking.step = ahead->n_bytes * part->n_slots / (ahead->n_slots * (uint64_t)n_turns);
	if (part->slot + slot > 0)
		asking.at = asking.until =
			ahead->from + ahead->n_bytes * (part->slot + slot) / ahead->n_slots;
	return asking;
}

INLINE void ask(struct asking *asking)
{
	asking->until += asking->step;
	for (; asking->at < asking->until; asking->at += 64)
		__builtin_prefetch(asking->at, 0, 2);
}

/* ---- rows ---- */

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

INLINE void load_field(const struct kv_fast_rows *rows, const struct kv_fast_field *field, float out[TOKENS])
{
	if (field->kind == KV_FAST_FIELD_F32) {
		/* Put together in registers: what is stored in small pieces can be loaded as a whole only
		 * later. */
		UNROLL
		for (uint32_t t = 0; t < TOKENS; t += LANES) {
			__m128 quads[LANES / 4];

			UNROLL
			for (uint32_t i = 0; i < LANES / 4; i++) {
				const uint8_t *const *four = rows->rows + t + (size_t)i * 4;

				quads[i] = _mm_setr_ps(f32_at(four[0] + field->offset),
					f32_at(four[1] + field->offset), f32_at(four[2] + field->offset),
					f32_at(four[3] + field->offset));
			}
			store_f32((f32_lanes)join_quads(quads), out + t);
		}
	} else {
		uint16_t halves[TOKENS];

		for (uint32_t t = 0; t < TOKENS; t++)
			memcpy(&halves[t], rows->rows[t] + field->offset, sizeof(halves[t]));
		for (uint32_t t = 0; t < TOKENS; t += LANES)
			store_f32((f32_lanes)f16_to_f32(halves + t), out + t);
	}
}

/* A part's scale and zero of every row, both times the outer scale. */
struct fields {
	_Alignas(64) float scale[TOKENS], zero[TOKENS];
	bool has_scale, has_zero;
};

INLINE void multiply(float *values, const float *factors)
{
	for (uint32_t t = 0; t < TOKENS; t += LANES)
		store_f32(load_f32(values + t) * load_f32(factors + t), values + t);
}

static inline void load_fields(
	const struct kv_fast_part *part, const struct kv_fast_rows *rows, struct fields *fields)
{
	float outer[TOKENS];

	fields->has_scale = part->scale.kind != KV_FAST_FIELD_NONE;
	fields->has_zero = part->zero.kind != KV_FAST_FIELD_NONE;
	if (fields->has_scale)
		load_field(rows, &part->scale, fields->scale);
	if (fields->has_zero)
		load_field(rows, &part->zero, fields->zero);
	if (part->outer.kind == KV_FAST_FIELD_NONE)
		return;
	load_field(rows, &part->outer, outer);
	if (fields->has_scale)
		multiply(fields->scale, outer);
	else
		memcpy(fields->scale, outer, sizeof(outer));
	if (fields->has_zero)
		multiply(fields->zero, outer);
	fields->has_scale = true;
}

#endif
