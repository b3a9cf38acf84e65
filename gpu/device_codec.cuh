/* Row codecs on the device: encode, decode and check one row, by a warp. See device_rows.cuh. */
#ifndef GPU_DEVICE_CODEC_CUH
#define GPU_DEVICE_CODEC_CUH

#include "gpu/device_rows.cuh"

static __device__ __forceinline__ bool kvg_any(bool is_bad)
{
	return __any_sync(0xFFFFFFFFu, is_bad) != 0;
}

/* The segment's n_channels codes as bytes; codes of padding and trailing bits are 0. */
static __device__ void kvg_pack(const struct kvg_segment *segment, const uint8_t *codes, uint8_t *row)
{
	const uint32_t bits = segment->bits, n = segment->n_channels;

	for (uint32_t at = kvg_lane(); at < segment->payload_bytes; at += 32) {
		uint32_t first = at * 8 / bits, byte = 0;

		for (uint32_t i = first; i < n && i * bits < at * 8 + 8; i++) {
			const int32_t shift = (int32_t)(i * bits) - (int32_t)(at * 8);

			byte |= shift >= 0 ? (uint32_t)codes[i] << shift : (uint32_t)codes[i] >> -shift;
		}
		row[segment->offset + at] = (uint8_t)byte;
	}
	__syncwarp();
}

static __device__ void kvg_pack_signs(
	const struct kvg_segment *segment, const float *values, uint8_t *codes, uint8_t *row)
{
	for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
		codes[i] = values[i] >= 0;
	__syncwarp();
	kvg_pack(segment, codes, row);
}

/* Number of interior boundaries strictly below each value. */
static __device__ void kvg_indices(
	const struct kvg_tables *tables, const struct kvg_segment *segment, const float *y, uint8_t *codes)
{
	const float *boundaries = kvg_floats(tables, segment->boundaries);

	for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32) {
		uint32_t index = 0;

		for (uint32_t step = 1u << (segment->bits - 1); step != 0; step /= 2) {
			if (boundaries[index + step - 1] < y[i])
				index += step;
		}
		codes[i] = (uint8_t)index;
	}
	__syncwarp();
}

/* unit = values / max(len, 1e-12); returns that norm. */
static __device__ float kvg_normalise(const float *values, uint32_t n, double *wide, float *unit)
{
	const float length = kvg_length(values, n, wide);
	const float norm = length > KVG_NORM_MIN ? length : KVG_NORM_MIN;

	for (uint32_t i = kvg_lane(); i < n; i += 32)
		unit[i] = values[i] / norm;
	__syncwarp();
	return norm;
}

static __device__ __forceinline__ void kvg_put(float value, uint32_t number, uint8_t *dst)
{
	if (kvg_lane() == 0)
		kvg_store_number(value, number, dst);
}

/* unit -> turned -> codes; then decoded values of the indices in `unit`, in the basis before the rotation. */
static __device__ void kvg_quantise(const struct kvg_tables *tables, const struct kvg_segment *indices,
	const float *unit, struct kvg_row_scratch *s)
{
	kvg_rotate(tables, tables->rotations + indices->rotation, false, unit, s->turned);
	kvg_indices(tables, indices, s->turned, s->codes);
}

static __device__ void kvg_centroids(
	const struct kvg_tables *tables, const struct kvg_segment *indices, struct kvg_row_scratch *s)
{
	const float *table = kvg_floats(tables, indices->table);

	for (uint32_t i = kvg_lane(); i < indices->n_channels; i += 32)
		s->turned[i] = table[s->codes[i]];
	__syncwarp();
}

static __device__ bool kvg_encode_dense(const struct kvg_codec *codec, struct kvg_row_scratch *s)
{
	const uint32_t number = codec->segments[0].number, bytes = kvg_number_bytes(number);
	bool is_bad = false;

	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32) {
		const float value = s->x[i];

		is_bad |= number == KVG_BF16 && (kvg_f32_to_bf16(value) & 0x7FFFu) == 0x7F80u;
		is_bad |= number == KVG_F16 && fabsf(value) >= KVG_F16_OVERFLOW;
		kvg_store_number(value, number, s->row + i * bytes);
	}
	return !kvg_any(is_bad);
}

static __device__ bool kvg_encode_fp8(const struct kvg_codec *codec, struct kvg_row_scratch *s)
{
	float largest = 0;

	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
		largest = fabsf(s->x[i]) > largest ? fabsf(s->x[i]) : largest;
	for (uint32_t half = 16; half >= 1; half /= 2)
		largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, half));

	const float wanted = largest / 448.0f;
	const float scale = wanted > KVG_NORM_MIN ? wanted : KVG_NORM_MIN;

	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
		s->row[i] = (uint8_t)kvg_f32_to_e4m3(s->x[i] / scale);
	kvg_put(scale, KVG_F32, s->row + codec->fields[0].offset);
	return true;
}

static __device__ bool kvg_encode_tq(
	const struct kvg_tables *tables, const struct kvg_codec *codec, struct kvg_row_scratch *s)
{
	const struct kvg_segment *indices = &codec->segments[0];
	float norm = kvg_normalise(s->x, codec->head_dim, s->wide, s->unit);

	if (!kvg_is_finite(norm))
		return false;
	kvg_quantise(tables, indices, s->unit, s);
	if (codec->norm_correction) {
		kvg_centroids(tables, indices, s);

		const float length = kvg_length(s->turned, codec->head_dim, s->wide);

		norm = norm / (length > KVG_NORM_MIN ? length : KVG_NORM_MIN);
		if (!kvg_is_finite(norm))
			return false;
	}
	kvg_pack(indices, s->codes, s->row);
	kvg_put(norm, KVG_F32, s->row + codec->fields[0].offset);
	return true;
}

static __device__ bool kvg_encode_tqp(
	const struct kvg_tables *tables, const struct kvg_codec *codec, struct kvg_row_scratch *s)
{
	const struct kvg_segment *indices = &codec->segments[0], *signs = &codec->segments[1];
	const float norm = kvg_normalise(s->x, codec->head_dim, s->wide, s->unit);

	if (!kvg_is_finite(norm))
		return false;
	kvg_quantise(tables, indices, s->unit, s);
	kvg_centroids(tables, indices, s);
	kvg_rotate(tables, tables->rotations + indices->rotation, true, s->turned, s->unit);
	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32) {
		const float decoded = s->unit[i] * norm;

		s->x[i] = s->x[i] - decoded;
	}
	__syncwarp();

	const float rest_norm = kvg_length(s->x, codec->head_dim, s->wide);

	if (!kvg_is_finite(rest_norm))
		return false;
	kvg_pack(indices, s->codes, s->row);
	kvg_rotate(tables, tables->rotations + signs->rotation, false, s->x, s->turned);
	kvg_pack_signs(signs, s->turned, s->codes, s->row);
	kvg_put(norm, KVG_F32, s->row + codec->fields[0].offset);
	kvg_put(rest_norm, KVG_F32, s->row + codec->fields[1].offset);
	return true;
}

/* Groups side by side on the lanes, each in the written order; scales in unit[], zeros in turned[]. */
static __device__ bool kvg_encode_vn(const struct kvg_codec *codec, struct kvg_row_scratch *s)
{
	const struct kvg_segment *codes = &codec->segments[0];
	const uint32_t d = codec->head_dim, group = codes->group_channels, n_groups = codec->fields[0].count;
	const float code_max = (float)((1u << codes->bits) - 1);
	bool is_bad = false;

	for (uint32_t g = kvg_lane(); g < n_groups; g += 32) {
		const uint32_t first = g * group, end = first + group < d ? first + group : d;
		float low = s->x[first], high = s->x[first];

		for (uint32_t i = first + 1; i < end; i++) {
			low = s->x[i] < low ? s->x[i] : low;
			high = s->x[i] > high ? s->x[i] : high;
		}
		low += 0.0f;

		const float span = high - low;
		const float scale = span / code_max > KVG_NORM_MIN ? span / code_max : KVG_NORM_MIN;

		is_bad |= !kvg_is_finite(span) || scale >= KVG_F16_OVERFLOW || fabsf(low) >= KVG_F16_OVERFLOW;
		s->unit[g] = scale;
		s->turned[g] = low;
		kvg_store_number(scale, KVG_F16, s->row + codec->fields[0].offset + 2 * g);
		kvg_store_number(low, KVG_F16, s->row + codec->fields[1].offset + 2 * g);
	}
	__syncwarp();
	if (kvg_any(is_bad))
		return false;
	for (uint32_t i = kvg_lane(); i < d; i += 32) {
		const float code = rintf((s->x[i] - s->turned[i / group]) / s->unit[i / group]);

		s->codes[i] = (uint8_t)(code < code_max ? code : code_max);
	}
	__syncwarp();
	kvg_pack(codes, s->codes, s->row);
	return true;
}

static __device__ bool kvg_encode_recipe(
	const struct kvg_tables *tables, const struct kvg_codec *codec, struct kvg_row_scratch *s)
{
	float norms[2];

	/* First both norms: nothing of a refused row is decided before. */
	for (uint32_t g = 0; g < 2; g++) {
		const struct kvg_segment *indices = &codec->segments[2 * g];

		for (uint32_t i = kvg_lane(); i < indices->n_channels; i += 32)
			s->unit[i] = s->x[tables->words[indices->channels + i]];
		__syncwarp();
		norms[g] = kvg_normalise(s->unit, indices->n_channels, s->wide, s->turned);
		if (!(norms[g] < KVG_F16_OVERFLOW))
			return false;
	}
	for (uint32_t g = 0; g < 2; g++) {
		const struct kvg_segment *indices = &codec->segments[2 * g], *signs = indices + 1;
		const uint32_t n = indices->n_channels;

		for (uint32_t i = kvg_lane(); i < n; i += 32)
			s->unit[i] = s->x[tables->words[indices->channels + i]] / norms[g];
		__syncwarp();
		kvg_quantise(tables, indices, s->unit, s);
		kvg_pack(indices, s->codes, s->row);
		kvg_centroids(tables, indices, s);

		/* Decoded values go where the float64 squares are not needed yet. */
		float *decoded = (float *)s->wide;

		kvg_rotate(tables, tables->rotations + indices->rotation, true, s->turned, decoded);
		for (uint32_t i = kvg_lane(); i < n; i += 32)
			s->unit[i] = s->unit[i] - decoded[i];
		__syncwarp();

		const float rest_norm = kvg_length(s->unit, n, s->wide);

		kvg_rotate(tables, tables->rotations + signs->rotation, false, s->unit, s->turned);
		kvg_pack_signs(signs, s->turned, s->codes, s->row);
		kvg_put(norms[g], KVG_F16, s->row + codec->fields[2 * g].offset);
		kvg_put(rest_norm, KVG_F16, s->row + codec->fields[2 * g + 1].offset);
	}
	return true;
}

/* s->x to s->row; false: BAD_VALUE. */
static __device__ bool kvg_encode(
	const struct kvg_tables *tables, const struct kvg_codec *codec, struct kvg_row_scratch *s)
{
	bool is_bad = false, is_ok = false;

	for (uint32_t i = kvg_lane(); i < codec->head_dim; i += 32)
		is_bad |= !kvg_is_finite(s->x[i]);
	if (kvg_any(is_bad))
		return false;
	switch (codec->family) {
	case KVG_DENSE:
		is_ok = kvg_encode_dense(codec, s);
		break;
	case KVG_FP8:
		is_ok = kvg_encode_fp8(codec, s);
		break;
	case KVG_TQ:
		is_ok = kvg_encode_tq(tables, codec, s);
		break;
	case KVG_TQP:
		is_ok = kvg_encode_tqp(tables, codec, s);
		break;
	case KVG_VN:
		is_ok = kvg_encode_vn(codec, s);
		break;
	case KVG_RECIPE:
		is_ok = kvg_encode_recipe(tables, codec, s);
		break;
	default:
		break;
	}
	__syncwarp();
	return is_ok;
}

/* ---- reading ---- */

/* Value i of a segment in its own basis, before scales and zeros. */
static __device__ __forceinline__ float kvg_value_at(
	const struct kvg_tables *tables, const struct kvg_segment *segment, const uint8_t *row, uint32_t i)
{
	const uint8_t *payload = row + segment->offset;

	if (!segment->is_table)
		return kvg_load_number(payload + i * kvg_number_bytes(segment->number), segment->number);
	return kvg_floats(tables, segment->table)[kvg_code_at(payload, segment->bits, i)];
}

/* Packed rows from outside: FORMATS 4, last sentence. */
static __device__ bool kvg_validate(
	const struct kvg_tables *tables, const struct kvg_codec *codec, const uint8_t *row)
{
	bool is_bad = false;

	for (uint32_t k = 0; k < codec->n_segments; k++) {
		const struct kvg_segment *segment = &codec->segments[k];

		for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
			is_bad |= !kvg_is_finite(kvg_value_at(tables, segment, row, i));
		if (!segment->is_table)
			continue;

		const uint32_t used = segment->n_channels * segment->bits;

		for (uint32_t at = used / 8 + kvg_lane(); at < segment->payload_bytes; at += 32) {
			const uint32_t byte = row[segment->offset + at];

			is_bad |= (at == used / 8 ? byte >> (used & 7u) : byte) != 0;
		}
	}
	for (uint32_t f = 0; f < codec->n_fields; f++) {
		const struct kvg_field *field = &codec->fields[f];

		for (uint32_t i = kvg_lane(); i < field->count; i += 32) {
			const float value = kvg_load_number(
				row + field->offset + i * kvg_number_bytes(field->number), field->number);

			is_bad |= !kvg_is_finite(value) || (!field->may_be_negative && value < 0);
		}
	}
	return !kvg_any(is_bad);
}

/* s->row to s->x, float32 in the written order: rotate back, scale, zero, add, outer scale. */
static __device__ void kvg_decode(
	const struct kvg_tables *tables, const struct kvg_codec *codec, struct kvg_row_scratch *s)
{
	for (uint32_t k = 0; k < codec->n_segments; k++) {
		const struct kvg_segment *segment = &codec->segments[k];
		const bool is_last = k + 1 == codec->n_segments ||
			codec->segments[k + 1].outer_offset != segment->outer_offset;
		const float *values = s->unit;

		for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32)
			s->unit[i] = kvg_value_at(tables, segment, s->row, i);
		__syncwarp();
		if (segment->rotation != KVG_NONE) {
			kvg_rotate(tables, tables->rotations + segment->rotation, true, s->unit, s->turned);
			values = s->turned;
		}
		for (uint32_t i = kvg_lane(); i < segment->n_channels; i += 32) {
			const uint32_t g = i / segment->group_channels;
			const uint32_t channel =
				segment->channels == KVG_NONE ? i : tables->words[segment->channels + i];
			float value = values[i];

			if (segment->scale_offset != KVG_NONE) {
				const uint32_t bytes = kvg_number_bytes(segment->scale_number);
				const float scale = kvg_load_number(
					s->row + segment->scale_offset + g * bytes, segment->scale_number);

				value *= segment->factors != KVG_NONE
					? kvg_floats(tables, segment->factors)[i] * scale
					: scale;
			}
			if (segment->zero_offset != KVG_NONE) {
				const uint32_t bytes = kvg_number_bytes(segment->zero_number);

				value += kvg_load_number(
					s->row + segment->zero_offset + g * bytes, segment->zero_number);
			}
			value = segment->is_added ? s->x[channel] + value : value;
			if (segment->outer_offset != KVG_NONE && is_last)
				value *= kvg_load_number(
					s->row + segment->outer_offset, segment->outer_number);
			s->x[channel] = value;
		}
		__syncwarp();
	}
}

#endif
