/*
 * What the codec commands share: a row codec from the options of a command line, and what is said about rows
 * that it refuses. One thread.
 */
#ifndef SERVER_CTL_CODEC_H
#define SERVER_CTL_CODEC_H

#include "core/format.h"
#include "server/ctl/ctl.h"
#include "server/ctl/row_file.h"

enum srv_codec_arg {
	SRV_CODEC_FORMAT,
	SRV_CODEC_HEAD_DIM,
	SRV_CODEC_ROTATION,
	SRV_CODEC_SEED,
	SRV_CODEC_GROUP,
	SRV_CODEC_HIGH_CHANNELS,
	SRV_CODEC_PROJECTION,
	SRV_CODEC_NORM_CORRECTION,
	SRV_CODEC_RECIPE_SCALE,
	SRV_CODEC_CODEBOOK,
	SRV_CODEC_N_ARGS,
};

/* clang-format off */
/* The first entries of the options of a command that makes a codec. */
#define SRV_CODEC_HEAD_DIM_ARG                                                                            \
	{ .name = "head-dim", .kind = SRV_ARG_NUMBER, .placeholder = "D", .min = KV_HEAD_DIM_MIN,         \
		.max = KV_HEAD_DIM_MAX, .help = "numbers of a row: a multiple of 16 from 16 to 256" }
#define SRV_CODEC_SEED_ARG                                                                                \
	{ .name = "seed", .kind = SRV_ARG_NUMBER, .placeholder = "S", .number = KV_ROTATION_SEED_BASE,    \
		.max = UINT32_MAX, .help = "of the rotation" }
#define SRV_CODEC_ARGS                                                                                    \
	[SRV_CODEC_FORMAT] = { .name = "format", .kind = SRV_ARG_TEXT, .placeholder = "F",                \
		.help = "row format: tq4, v4, fp8, .." },                                                 \
	[SRV_CODEC_HEAD_DIM] = SRV_CODEC_HEAD_DIM_ARG,                                                    \
	[SRV_CODEC_ROTATION] = { .name = "rotation", .kind = SRV_ARG_TEXT, .placeholder = "R",            \
		.help = "rht, qr or file:MATRIX.f32 [rht at powers of two, else qr]" },                   \
	[SRV_CODEC_SEED] = SRV_CODEC_SEED_ARG,                                                            \
	[SRV_CODEC_GROUP] = { .name = "group", .kind = SRV_ARG_NUMBER, .placeholder = "N", .min = 1,      \
		.max = KV_HEAD_DIM_MAX, .help = "vN: channels of a group [32]" },                         \
	[SRV_CODEC_HIGH_CHANNELS] = { .name = "high-channels", .kind = SRV_ARG_TEXT,                      \
		.placeholder = "FILE", .help = "recipes: ascending channel numbers [the first ones]" },   \
	[SRV_CODEC_PROJECTION] = { .name = "projection", .kind = SRV_ARG_TEXT,                            \
		.placeholder = "file:S.f32", .help = "tqpN: the matrix of the signs [from the seed]" },   \
	[SRV_CODEC_NORM_CORRECTION] = { .name = "norm-correction", .kind = SRV_ARG_FLAG,                  \
		.help = "tqN: decoded rows have the original length" },                                   \
	[SRV_CODEC_RECIPE_SCALE] = { .name = "recipe-scale", .kind = SRV_ARG_TEXT,                        \
		.placeholder = "SCALE", .help = "recipes, decoding: exact or published [exact]" },        \
	[SRV_CODEC_CODEBOOK] = { .name = "codebook", .kind = SRV_ARG_TEXT, .placeholder = "FILE",         \
		.help = "tqN, tqpN, recipes: a codebook in place of the exact one" }
/* clang-format on */

/* A codec and what it stands on. Zeroed memory is a valid empty one. */
struct srv_codec {
	struct kv_rotation *rotation, *projection;
	struct kvcb_codebook *codebook;
	struct kv_row_codec *codec;
	/* Files that it was made from, for srv_out_file_open(); NULL where there are none. Borrowed. */
	const char *files[4];
};

/* The value of --head-dim: USAGE when it is missing or no valid one. */
KV_MUST_CHECK enum kv_status srv_codec_head_dim(
	const struct srv_arg_value *value, uint32_t *head_dim, struct kv_error *err);
/*
 * "rht", "qr", "block", "file:PATH", or NULL for the default of the dimension. For "file:" *path becomes the
 * file's.
 */
KV_MUST_CHECK enum kv_status srv_codec_make_rotation(const char *text, uint32_t head_dim, uint64_t seed,
	struct kv_rotation **rotation, const char **path, struct kv_error *err);
/*
 * The codec of `format`, a name of the command line, or of --format when it is NULL. With is_lenient options
 * that the format does not take are left out; else they are USAGE. srv_codec_finish() it, also on failure.
 */
KV_MUST_CHECK enum kv_status srv_codec_init(struct srv_codec *codec, const struct srv_ctl *ctl,
	const char *format, bool is_lenient, struct kv_error *err);
void srv_codec_finish(struct srv_codec *codec);

/*
 * Squared error of a decoded row over its squared length for random rows, as the theory has it (tqN, tqpN,
 * recipes); 0 where there is none.
 */
double srv_codec_theory(const struct kv_row_codec *codec);

#define SRV_ROW_FAULT_BYTES 160u
/*
 * Why a row of numbers cannot be stored, or a packed row is none: what, where in the file. `offset` is that
 * of the row.
 */
void srv_codec_explain_row(const struct kv_row_codec *codec, const float *row, uint64_t offset,
	char text[static SRV_ROW_FAULT_BYTES]);
void srv_codec_explain_packed(const struct kv_row_codec *codec, const uint8_t *row, uint64_t offset,
	char text[static SRV_ROW_FAULT_BYTES]);

#endif
