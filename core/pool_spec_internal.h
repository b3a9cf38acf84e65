/*
 * Pool specification from inside: what the readers of its JSON share, the parts that a spec owns, and the
 * canonical text. Only pool_spec*.c include it.
 *
 * pool_spec.c reads geometry and puts the whole together, pool_spec_read.c words refusals, pool_spec_data.c
 * reads what comes as many numbers or as a file, pool_spec_formats.c reads formats and options,
 * pool_spec_attention.c what attention is asked for on each layer, pool_spec_groups.c groups, blocks and the
 * exact window, pool_spec_codecs.c makes rotations and codecs, pool_spec_canonical.c writes the canonical
 * text, pool_spec_short.c reads the short form.
 */
#ifndef CORE_POOL_SPEC_INTERNAL_H
#define CORE_POOL_SPEC_INTERNAL_H

#include <stddef.h>

#include "core/format.h"
#include "core/pool_spec.h"
#include "core/preset.h"
#include "core/recipe_file.h"

#define KV_TOKENS_MAX       (UINT32_MAX - 1) /* UINT32_MAX is no length: DECODE uses it for "all" */
#define KV_MODEL_BYTES_MAX  256u
#define KV_MEMBER_BYTES_MAX 64u /* "k_center[1023][1023][255]" */
#define KV_QUOTE_BYTES_MAX  72u
#define KV_FOUND_BYTES_MAX  96u
#define KV_CODEBOOKS_MAX    64u /* files of one pool */

enum kv_member_kind { KV_MEMBER_TEXT, KV_MEMBER_INTEGER, KV_MEMBER_NUMBER, KV_MEMBER_FLAG, KV_MEMBER_LIST };

struct kv_pool_member {
	const char *name;
	enum kv_member_kind kind;
};

/* NULL when there is no member of this name. */
const struct kv_pool_member *kv_pool_member_find(const char *name, uint32_t name_bytes);

/* A spec and what it owns. */
struct kv_made_spec {
	struct kv_pool_spec base;
	struct kv_layer_spec *layers;
	/* Formats and options, as asked for. */
	const struct kv_preset *preset;                  /* NULL: k and v */
	const struct kv_format **k_formats, **v_formats; /* [n_layers] */
	struct kv_format_options options;                /* those that are the same for all codecs */
	bool is_per_layer;
	uint32_t seed;
	struct kvcb_codebook *codebooks; /* [n_codebooks] of files */
	const struct kvcb_codebook *codebook_refs[KV_CODEBOOKS_MAX];
	struct kv_recipe_file *recipe;       /* NULL: default channels */
	enum kv_rotation_kind rotation_kind; /* NONE: the default of the dim */
	float *matrix;                       /* rotation file: [head_dim, head_dim] */
	float *k_center;                     /* [n_layers, kv_heads, k_head_dim] */
	float *sinks, *alibi;                /* [n_layers, q_heads] */
	/* What was made. */
	struct kv_rotation **rotations; /* [n_rotations], at most two per layer */
	uint32_t n_rotations;
	struct kv_row_codec **codecs; /* [n_codecs], room for n_codecs_max */
	uint32_t n_codecs, n_codecs_max;
	uint32_t n_lists; /* codecs with channels of their own */
};

/* ---- pool_spec_read.c ---- */

struct kv_spec_reader {
	const json_t *json;
	const struct kv_files *files; /* NULL: members that name files are refused */
	const char *pool;             /* name for messages */
	struct kv_error *err;
};

/* Text from outside as it may stand in a log line: no control characters, not too long. */
void kv_spec_quote(const char *text, char out[static KV_QUOTE_BYTES_MAX]);
/* The value as it stands behind the member's name. */
void kv_spec_describe(const json_t *value, char out[static KV_FOUND_BYTES_MAX]);
/* BAD_CONFIG, `pool "smol": head_dim 20: expected a multiple of 16 from 16 to 256`. */
KV_MUST_CHECK enum kv_status kv_spec_refuse(
	const struct kv_spec_reader *reader, const char *member, const json_t *value, const char *expected);
/*
 * `pool "smol": <what>: <cause>`. Wrong is wrong in a configuration: BAD_CONFIG, except that UNSUPPORTED and
 * NO_MEMORY stay what they are.
 */
KV_MUST_CHECK enum kv_status kv_spec_pass_on(const struct kv_spec_reader *reader, const char *what,
	enum kv_status status, const struct kv_error *cause);
KV_MUST_CHECK enum kv_status kv_spec_no_memory(const struct kv_spec_reader *reader, const char *what);

static inline bool kv_spec_has(const struct kv_spec_reader *reader, const char *member)
{
	return json_object_get(reader->json, member) != NULL;
}
/* A missing member is refused. */
KV_MUST_CHECK enum kv_status kv_spec_read_u32(
	const struct kv_spec_reader *reader, const char *member, uint32_t min, uint32_t max, uint32_t *out);
/* A missing member leaves *out alone. */
KV_MUST_CHECK enum kv_status kv_spec_read_flag(
	const struct kv_spec_reader *reader, const char *member, bool *out);
/* NULL when it is missing. */
KV_MUST_CHECK enum kv_status kv_spec_read_text(
	const struct kv_spec_reader *reader, const char *member, const char *expected, const char **out);
/* At most one of the two may be there. */
KV_MUST_CHECK enum kv_status kv_spec_read_either(
	const struct kv_spec_reader *reader, const char *member, const char *other);

/* ---- pool_spec_attention.c: the layers' attention options ---- */

KV_MUST_CHECK enum kv_status kv_spec_read_attention(
	const struct kv_spec_reader *reader, struct kv_made_spec *made);

/* ---- pool_spec_data.c: k_center, matrix, recipe, codebooks into `made` ---- */

KV_MUST_CHECK enum kv_status kv_spec_read_k_center(
	const struct kv_spec_reader *reader, struct kv_made_spec *made);
/* [head_dim, head_dim] of rotation_matrix or rotation_file. */
KV_MUST_CHECK enum kv_status kv_spec_read_matrix(
	const struct kv_spec_reader *reader, uint32_t head_dim, struct kv_made_spec *made);
KV_MUST_CHECK enum kv_status kv_spec_read_recipe(
	const struct kv_spec_reader *reader, struct kv_made_spec *made);
KV_MUST_CHECK enum kv_status kv_spec_read_codebooks(
	const struct kv_spec_reader *reader, struct kv_made_spec *made);

/* ---- pool_spec_formats.c: geometry is read ---- */

KV_MUST_CHECK enum kv_status kv_spec_read_formats(
	const struct kv_spec_reader *reader, struct kv_made_spec *made);
/* Those of the pool's options that the format takes; `like` and channels are the caller's. */
struct kv_format_options kv_spec_options_for(const struct kv_made_spec *made, const struct kv_format *format);

/* ---- pool_spec_groups.c: attention is read ---- */

KV_MUST_CHECK enum kv_status kv_spec_read_groups(
	const struct kv_spec_reader *reader, struct kv_made_spec *made);
/* block_size, blocks, tokens_max, exact_tokens, exact_blocks. */
KV_MUST_CHECK enum kv_status kv_spec_read_blocks(
	const struct kv_spec_reader *reader, struct kv_made_spec *made);
/* Codecs of the exact window's rows, where the pool has one. */
KV_MUST_CHECK enum kv_status kv_spec_make_exact(
	const struct kv_spec_reader *reader, struct kv_made_spec *made);

/* ---- pool_spec_codecs.c ---- */

/* Rotations and codecs of all layers. */
KV_MUST_CHECK enum kv_status kv_spec_make_codecs(
	const struct kv_spec_reader *reader, struct kv_made_spec *made);

/* ---- pool_spec_canonical.c ---- */

/*
 * Fills canonical_json (kv_free() it), canonical_json_bytes and fingerprint of a spec that is complete
 * otherwise.
 */
KV_MUST_CHECK enum kv_status kv_pool_spec_canonicalise(
	struct kv_made_spec *made, const char *model, struct kv_error *err);
/* Text of a JSON value with a zero byte behind it, kv_free() it; NULL without memory. */
char *kv_spec_dump(const json_t *json, size_t *n_bytes);

#endif
