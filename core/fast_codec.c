/* Row codecs as parts for the fast kernels, and what lies between prepared queries and slots. */
#include <math.h>
#include <string.h>

#include "core/checked.h"
#include "core/fast.h"

/* E4M3 is read as float16 with another bias of the exponent. */
#define E4M3_FACTOR 256.0f
/* Adding and taking it away rounds to a whole number, as lrintf() does, but for many at once. */
#define ROUNDING 0x1.8p23f

/* Finds the run that a field of float16 is in, or begins one. */
static void join_run(struct kv_fast_side *side, struct kv_fast_field *field)
{
	uint32_t run = 0;

	while (run < side->n_runs &&
		(field->offset < side->run_offsets[run] ||
			field->offset >= side->run_offsets[run] + 2 * KV_FAST_RUN_HALVES))
		run++;
	KV_ASSERT(run < KV_FAST_RUNS_MAX);
	if (run == side->n_runs)
		side->run_offsets[side->n_runs++] = field->offset;
	field->run = (uint8_t)run;
	field->lane = (uint8_t)((field->offset - side->run_offsets[run]) / 2);
	if (side->n_of_run[run] < field->lane + 1u)
		side->n_of_run[run] = field->lane + 1u;
}

static struct kv_fast_field field_at(struct kv_fast_side *side, const struct kv_row_codec *codec,
	bool is_there, uint8_t field_idx, uint32_t i)
{
	const struct kv_field *field = &codec->fields[field_idx];

	if (!is_there)
		return (struct kv_fast_field){ .kind = KV_FAST_FIELD_NONE };

	struct kv_fast_field at = {
		.kind = field->number == KV_DTYPE_F32 ? KV_FAST_FIELD_F32 : KV_FAST_FIELD_F16,
		.offset = field->offset + i * kv_dtype_bytes(field->number),
	};

	if (at.kind == KV_FAST_FIELD_F16)
		join_run(side, &at);
	return at;
}

/*
 * Rounds a segment's table; returns the value of one. The table's own zero stays one. Codebooks are symmetric
 * to 1e-6, a hundredth of a unit, so the lower half becomes the mirror image of the upper one.
 */
static float round_table(const struct kv_segment *segment, int32_t table_max, int16_t table[256])
{
	const uint32_t n = 1u << segment->bits;
	float largest = 0;

	for (uint32_t i = 0; i < n; i++)
		largest = fmaxf(largest, fabsf(segment->table[i]));
	/* Whole numbers (codes of vN, signs) stay what they are. */
	const float unit =
		largest == floorf(largest) && largest <= (float)table_max ? 1 : largest / (float)table_max;

	for (uint32_t i = 0; i < 256; i++) {
		const uint32_t code = i % n;

		table[i] = (int16_t)(segment->codebook && code < n / 2
				? -lrintf(segment->table[n - 1 - code] / unit)
				: lrintf(segment->table[code] / unit));
	}
	return unit;
}

/* E4M3 as multiples of KV_FAST_E4M3_UNIT; what is no number is in no row that was encoded. */
static void round_e4m3(const struct kv_segment *segment, int16_t table[256])
{
	for (uint32_t code = 0; code < 256; code++) {
		const float value = segment->table[code];

		table[code] = (int16_t)(isnan(value) ? 0 : lrintf(value / KV_FAST_E4M3_UNIT));
	}
}

/*
 * Whole numbers of so many bits, counted from the middle, as parts of 2^15; returns the value of one. The
 * greatest is just below 2^15: times a weight, rounded, it is that weight, as if it were 2^15.
 */
static float center_table(uint32_t bits, int16_t table[256], float *center)
{
	const int32_t n = 1 << bits;

	if (bits == 8) {
		/* A word whose bytes are a code and the code less 128: 257 * code - 2^15. */
		*center = 32768.0f / 257;
		return 1.0f / 257;
	}
	for (int32_t i = 0; i < 256; i++) {
		const long part = lrintf((float)(2 * (i % n) - (n - 1)) * 32768.0f / (float)(n - 1));

		table[i] = (int16_t)(part < KV_FAST_SHORT_TABLE_MAX ? part : KV_FAST_SHORT_TABLE_MAX);
	}
	*center = 0.5f * (float)(n - 1);
	return *center / 32768.0f;
}

static void split_table(const int16_t *entries, uint32_t n, uint8_t pieces[KV_FAST_PIECES_BYTES])
{
	for (uint32_t i = 0; i < n; i++) {
		pieces[i] = (uint8_t)entries[i];
		pieces[n + i] = (uint8_t)((uint16_t)entries[i] >> 8);
	}
}

/* The lower half of a codebook, `offset` units below: by a half, an entry's complement is its mirror image.
 */
static void mirror_table(const struct kv_segment *segment, float unit, float offset, int32_t table_max,
	uint8_t pieces[KV_FAST_PIECES_BYTES])
{
	const uint32_t n = 1u << (segment->bits - 1);
	int16_t entries[1u << (KV_FAST_MIRRORED_BITS - 1)];

	for (uint32_t i = 0; i < n; i++) {
		const long entry = lrintf(segment->table[i] / unit - offset);

		entries[i] = (int16_t)(entry > -table_max ? entry : -table_max);
	}
	split_table(entries, n, pieces);
}

/* The lower half of a codebook of 7 or 8 bits, whose values ascend, in steps. */
static void halve_table(
	const struct kv_segment *segment, float unit, bool is_v, uint8_t halved[KV_FAST_PIECES_BYTES])
{
	const float multiple = is_v ? KV_FAST_HALVED_OF_V : KV_FAST_HALVED_OF_K;
	const uint32_t n_of_step = (1u << (segment->bits - 1)) / 16;

	for (uint32_t step = 0; step < 16; step++) {
		const float *values = segment->table + (size_t)step * n_of_step;
		const float base = fminf(255, floorf(-values[n_of_step - 1] / unit / multiple)) * multiple;
		/* Some 40 at most. What a greatest entry is rounded to beyond 16 bits is cut off where it is
		 * looked up. */
		const float factor = fmaxf(1, ceilf((-values[0] / unit - base) / 255));

		KV_ASSERT(factor <= 127);
		halved[KV_FAST_HALVED_BASES + step] = (uint8_t)(base / multiple);
		halved[KV_FAST_HALVED_FACTORS + step] = (uint8_t)(int8_t)-factor;
		for (uint32_t i = 0; i < n_of_step; i++)
			halved[step * n_of_step + i] = (uint8_t)lrintf((-values[i] / unit - base) / factor);
	}
}

static bool is_e4m3(const struct kv_row_codec *codec)
{
	return strcmp(codec->format->name, "fp8") == 0;
}

/* bf16: of the numbers of a register those at even places, then those at odd ones. */
static uint32_t number_of_slot(uint32_t words, uint32_t slot)
{
	return slot / words * words + slot % (words / 2) * 2 + slot / (words / 2) % 2;
}

/* Slots of a part: natural order but for what shifts take out of words. */
static void place_slots(struct kv_fast_side *side, struct kv_fast_part *part,
	const struct kv_segment *segment, uint32_t first, uint32_t unit, bool is_v,
	const struct kv_fast_kernels *kernels)
{
	part->slot = side->n_slots;
	part->n_slots = (part->n + unit - 1) / unit * unit;
	side->n_slots += part->n_slots;
	KV_ASSERT(side->n_slots <= KV_FAST_SLOTS_MAX);
	for (uint32_t s = 0; s < part->n_slots; s++) {
		const uint32_t channel = part->has_short_sums
			? kernels->code_of_short_slot(part->bits, part->n, s)
			: !part->is_shifted             ? s
			: part->kind == KV_FAST_NUMBERS ? number_of_slot(kernels->words, s)
							: kernels->code_of_slot(is_v, part->bits, part->n, s);

		side->prepared_of[part->slot + s] = channel < part->n
			? (uint16_t)(segment->prepared_idx + first + channel)
			: KV_FAST_SLOT_NONE;
		side->factor_of[part->slot + s] =
			segment->factors && channel < part->n ? segment->factors[first + channel] : 1;
	}
}

/*
 * Slots of V's bits. A codebook is antisymmetric, so one of 2 bits is the sum of two numbers, each of which a
 * bit adds or subtracts.
 */
static void place_bits(struct kv_fast_side *side, struct kv_fast_part *part, const struct kv_segment *segment,
	uint32_t first, const struct kv_fast_kernels *kernels)
{
	const uint32_t n_bits = part->n * part->bits;
	const float *table = segment->table + (part->bits == 1 ? 0 : 2);
	const float added[2] = { part->bits == 1 ? table[1] : (table[1] - table[0]) / 2,
		(table[1] + table[0]) / 2 };

	part->table_scale = 1;
	part->is_shifted = kernels->takes_shifted(true, 1, n_bits);
	part->slot = side->n_slots;
	part->n_slots = (n_bits + KV_FAST_BITS_SUMS - 1) / KV_FAST_BITS_SUMS * KV_FAST_BITS_SUMS;
	side->n_slots += part->n_slots;
	KV_ASSERT(side->n_slots <= KV_FAST_SLOTS_MAX);
	for (uint32_t s = 0; s < part->n_slots; s++) {
		const uint32_t bit = part->is_shifted ? kernels->code_of_slot(true, 1, n_bits, s) : s;
		const uint32_t channel = first + bit / part->bits;

		side->prepared_of[part->slot + s] =
			bit < n_bits ? (uint16_t)(segment->prepared_idx + channel) : KV_FAST_SLOT_NONE;
		side->factor_of[part->slot + s] = added[bit % part->bits] *
			(segment->factors && bit < n_bits ? segment->factors[channel] : 1);
	}
}

/* The table of codes, in every form that kernels look it up in. Parts of a segment make the same one. */
static void make_table(struct kv_fast_side *side, struct kv_fast_part *part, const struct kv_row_codec *codec,
	uint32_t segment_idx, bool is_v, const struct kv_fast_kernels *kernels)
{
	const struct kv_segment *segment = &codec->segments[segment_idx];
	int16_t *table = side->tables[segment_idx];
	uint8_t *pieces = side->pieces[segment_idx];
	const int32_t table_max = is_e4m3(codec)                     ? KV_FAST_E4M3_TABLE_MAX
		: part->kind == KV_FAST_BITS || part->has_short_sums ? KV_FAST_SHORT_TABLE_MAX
		: is_v                                               ? KV_FAST_V_TABLE_MAX
								     : KV_FAST_K_TABLE_MAX;

	part->sum_max = KV_FAST_SUM_MAX(table_max);
	if (is_e4m3(codec)) {
		part->is_e4m3 = true;
		round_e4m3(segment, table);
		part->table_scale = KV_FAST_E4M3_UNIT;
		return;
	}
	part->table_scale = round_table(segment, table_max, table);
	part->is_value = !segment->codebook && segment->table[0] == 0; /* affine codes */
	if (part->bits > 4 && segment->codebook && kernels->has_split_tables) {
		part->pieces = pieces;
		if (part->bits > KV_FAST_MIRRORED_BITS) {
			part->is_smooth = kv_fast_smooth_init(
				segment->table, part->bits, is_v, &part->table_scale, pieces);
			if (!part->is_smooth)
				halve_table(segment, part->table_scale, is_v, pieces);
			else if (!is_v)
				part->sum_max = KV_FAST_SUM_MAX(KV_FAST_SMOOTH_MAX_OF_K);
		} else if (part->bits == KV_FAST_MIRRORED_BITS) {
			const float offset = is_v ? 0 : KV_FAST_MIRRORED_OFFSET;

			mirror_table(segment, part->table_scale, offset, table_max, pieces);
			part->entry_offset = offset * part->table_scale;
		} else {
			split_table(table, 1u << part->bits, pieces);
		}
	}
	if (part->has_short_sums) {
		if (part->is_value)
			part->table_scale = center_table(part->bits, table, &part->center);
		part->table_scale *= 1u << 15; /* products are rounded to multiples of it */
	}
}

static void add_part(struct kv_fast_side *side, const struct kv_row_codec *codec, uint32_t segment_idx,
	uint32_t first, bool is_v, const struct kv_fast_kernels *kernels)
{
	const struct kv_segment *segment = &codec->segments[segment_idx];
	const uint32_t group = segment->group_channels, left = segment->n_channels - first;
	struct kv_fast_part *part = &side->parts[side->n_parts++];

	part->n = left < group ? left : group;
	part->scale = field_at(side, codec, segment->has_scale, segment->scale_field, first / group);
	part->zero = field_at(side, codec, segment->has_zero, segment->zero_field, first / group);
	part->outer = field_at(side, codec, segment->has_outer, segment->outer_field, 0);
	if (segment->code == KV_CODE_NUMBER || (is_e4m3(codec) && is_v && kernels->code_of_short_slot)) {
		part->kind = KV_FAST_NUMBERS;
		part->number = segment->code == KV_CODE_NUMBER ? segment->number : KV_DTYPE_NONE;
		part->table_scale = part->number == KV_DTYPE_NONE ? E4M3_FACTOR : 1;
		part->offset = segment->offset;
		part->is_shifted = part->number == KV_DTYPE_BF16 && part->n % kernels->words == 0;
		place_slots(side, part, segment, first, KV_HEAD_DIM_STEP, is_v, kernels);
		return;
	}
	part->kind = KV_FAST_CODES;
	part->bits = segment->bits;
	part->offset = segment->offset + first * segment->bits / 8;
	part->table = side->tables[segment_idx];
	part->is_shifted = kernels->takes_shifted(is_v, part->bits, part->n);
	/* Of V 2 bits gain from it where products are the alternative that takes 16 bits. */
	if (part->bits == 1 ||
		(part->bits == 2 && segment->codebook && (!is_v || kernels->code_of_short_slot)))
		part->kind = KV_FAST_BITS;
	part->has_short_sums = is_v && kernels->code_of_short_slot && part->kind == KV_FAST_CODES;
	make_table(side, part, codec, segment_idx, is_v, kernels);
	if (part->kind == KV_FAST_BITS) {
		KV_ASSERT(part->table[0] == -part->table[(1u << part->bits) - 1]);
		if (is_v) {
			place_bits(side, part, segment, first, kernels);
			return;
		}
		/* Channel i in slot i, as far as there are channels: kv_fast_prepare() makes tables. */
		part->has_split_tables = kernels->has_split_tables;
		part->is_shifted = false;
		place_slots(side, part, segment, first, 4 * part->bits * part->n, is_v, kernels);
		return;
	}
	place_slots(side, part, segment, first, KV_FAST_CODES_STEP, is_v, kernels);
}

bool kv_fast_side_init(struct kv_fast_side *side, const struct kv_row_codec *codec, bool is_v,
	const struct kv_fast_kernels *kernels)
{
	memset(side, 0, sizeof(*side));
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kv_segment *segment = &codec->segments[s];

		if (segment->group_channels < segment->n_channels && segment->group_channels % 32 != 0)
			return false;
		for (uint32_t first = 0; first < segment->n_channels; first += segment->group_channels)
			add_part(side, codec, s, first, is_v, kernels);
	}
	side->has_numbers = side->parts[0].kind == KV_FAST_NUMBERS;
	return true;
}

/* Sums of which none waits for the one before. */
#define CHAINS 8u

/* Rounds the slots of one part to integers whose magnitudes and their sum are bounded. */
static float round_slots(const float *values, uint32_t n, int32_t sum_max, int16_t *codes)
{
	float largests[CHAINS] = { 0 }, sums[CHAINS] = { 0 }, largest = 0, sum = 0;

	for (uint32_t s = 0; s < n; s++) {
		const float size = fabsf(values[s]), before = largests[s % CHAINS];

		largests[s % CHAINS] = size > before ? size : before;
		sums[s % CHAINS] += size;
	}
	for (uint32_t i = 0; i < CHAINS; i++) {
		largest = largests[i] > largest ? largests[i] : largest;
		sum += sums[i];
	}
	if (!(largest > 0)) {
		memset(codes, 0, n * sizeof(*codes));
		return 0;
	}
	/* Rounding adds at most a half for each slot. */
	const float by_sum = sum / ((float)sum_max - (float)n), by_largest = largest / 32767.0f;
	const float unit = by_sum > by_largest ? by_sum : by_largest;

	for (uint32_t s = 0; s < n; s++) {
		float value = values[s] / unit;

		value = value < -32767.0f ? -32767.0f : value > 32767.0f ? 32767.0f : value;
		value = isnan(value) ? 0 : value; /* an infinite unit says it; NaN is no integer */
		codes[s] = (int16_t)(int32_t)((value + ROUNDING) - ROUNDING);
	}
	return unit;
}

/*
 * Slots of codes that are looked up four bits at a time become tables: of every four bits what their channels
 * add up to, rounded. Magnitudes stay below 2^15 however KV_FAST_BITS_STEP of the bits are added up.
 */
static float make_tables(const struct kv_fast_part *part, const float *values, int16_t *tables)
{
	const uint32_t n_of_step = KV_FAST_BITS_STEP / part->bits, n_of_table = 4 / part->bits;
	const uint32_t mask = (1u << part->bits) - 1;
	const float largest = part->table[mask];
	float most = 0;

	for (uint32_t first = 0; first < part->n; first += n_of_step) {
		float sum = 0;

		for (uint32_t i = first; i < part->n && i < first + n_of_step; i++)
			sum += fabsf(values[i]);
		most = fmaxf(most, sum * largest);
	}

	/* Rounding adds at most a half for each table. */
	const float unit = most / (float)(INT16_MAX - (int32_t)KV_FAST_BITS_STEP / 8);
	float entries[4][16];

	for (uint32_t i = 0; i < n_of_table; i++) {
		for (uint32_t bits = 0; bits < 16; bits++)
			entries[i][bits] = (float)part->table[bits >> i * part->bits & mask];
	}
	for (uint32_t first = 0; first < part->n; first += n_of_table) {
		uint8_t *table = (uint8_t *)(tables + (size_t)first / n_of_table * 16);
		float sums[16] = { 0 };

		for (uint32_t i = 0; i < n_of_table; i++) {
			const float value = unit > 0x1p-120f ? values[first + i] / unit : 0;

			/* An infinite unit says it; NaN is no integer. */
			for (uint32_t bits = 0; bits < 16; bits++)
				sums[bits] += (isnan(value) ? 0 : value) * entries[i][bits];
		}
		for (uint32_t bits = 0; bits < 16; bits++) {
			const uint16_t word = (uint16_t)(int32_t)((sums[bits] + ROUNDING) - ROUNDING);

			if (part->has_split_tables) {
				table[bits] = (uint8_t)word;
				table[16 + bits] = (uint8_t)(word >> 8);
			} else {
				memcpy(table + (size_t)bits * 2, &word, sizeof(word));
			}
		}
	}
	return unit;
}

/*
 * Where the largest number of a scaled query may be. Units of codes are some 2^-30 of it, and have to be
 * normal numbers: below, numbers lose their digits, which large keys would show. Above, float32 may not hold
 * it.
 */
#define SCALED_QUERY_MIN 0x1p-80
#define SCALED_QUERY_MAX 0x1p100

bool kv_fast_prepare(const struct kv_fast_side *side, const double *q_prepared, double scale, int16_t *codes,
	float *numbers, float *units, float *sums)
{
	float values[KV_FAST_SLOTS_MAX];
	double mosts[CHAINS] = { 0 }, most = 0;

	for (uint32_t p = 0; p < side->n_parts; p++) {
		const struct kv_fast_part *part = &side->parts[p];
		/* Of bits the slots that tables will take are more than there are channels. */
		const uint32_t n = part->kind == KV_FAST_BITS ? part->n : part->n_slots;
		double chains[CHAINS] = { 0 }, sum = 0;

		for (uint32_t i = 0; i < n; i++) {
			const uint32_t s = part->slot + i, at = side->prepared_of[s];
			const double value = at == KV_FAST_SLOT_NONE ? 0 : q_prepared[at] * scale;
			const double size = fabs(value), before = mosts[i % CHAINS];

			values[i] = (float)value * side->factor_of[s];
			chains[i % CHAINS] += (double)values[i];
			mosts[i % CHAINS] = size > before ? size : before;
		}
		for (uint32_t i = 0; i < CHAINS; i++)
			sum += chains[i];
		sums[p] = (float)sum;
		if (part->kind == KV_FAST_NUMBERS) {
			memcpy(numbers + part->slot, values, n * sizeof(*numbers));
			units[p] = part->table_scale;
		} else if (part->kind == KV_FAST_BITS) {
			units[p] = part->table_scale * make_tables(part, values, codes + part->slot);
		} else {
			units[p] =
				part->table_scale * round_slots(values, n, part->sum_max, codes + part->slot);
		}
	}
	for (uint32_t i = 0; i < CHAINS; i++)
		most = mosts[i] > most ? mosts[i] : most;
	return most == 0 || (most >= SCALED_QUERY_MIN && most <= SCALED_QUERY_MAX);
}

void kv_fast_collect(const struct kv_fast_side *side, const double *sums, const double *zeros, double *acc)
{
	for (uint32_t p = 0; p < side->n_parts; p++) {
		const struct kv_fast_part *part = &side->parts[p];
		const double zero = part->zero.kind != KV_FAST_FIELD_NONE ? zeros[p] : 0;

		for (uint32_t s = part->slot; s < part->slot + part->n_slots; s++) {
			const uint32_t at = side->prepared_of[s];

			if (at != KV_FAST_SLOT_NONE)
				acc[at] += sums[s] * (double)(part->table_scale * side->factor_of[s]) + zero;
		}
	}
}
