/*
 * Pool specification: the geometry, formats and options of one pool, fixed when the pool is made.
 *
 * Made from the pool's JSON (the schema of the configuration's `pools` entries and of POST /v1/pools);
 * everything that a backend or a client has to know about rows follows from it. Immutable after creation, so
 * any thread may read it. Creating one computes rotations and codebooks (some 10 ms for each qr matrix): call
 * it where computing is allowed.
 *
 * The canonical JSON (compact, keys sorted, floats as the hex of their float32 bits) holds what decides bytes
 * and results: geometry, groups, formats, options, seeds, model. Not the pool's name, block count or limits.
 * Fingerprint: XXH3-64 of that text (FORMATS, PROTOCOL 3).
 */
#ifndef CORE_POOL_SPEC_H
#define CORE_POOL_SPEC_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

#define KV_POOL_NAME_BYTES_MAX 64u
#define KV_GROUPS_MAX          8u
#define KV_TABLES_MAX          (KV_GROUPS_MAX + 1) /* block tables of a sequence: groups, and the exact window */
#define KV_LAYERS_MAX          1024u
#define KV_HEADS_MAX           1024u
#define KV_HEAD_DIM_MAX        256u
#define KV_BLOCKS_MAX          (1u << 30)
#define KV_Q_LEN_MAX           16u        /* query rows of one decode */
#define KV_BLOCK_NONE          UINT32_MAX /* entry of a block table whose block was freed */
/* A reply of POOL_INFO holds it; pools of hundreds of layers with a format each may come near. */
#define KV_POOL_JSON_BYTES_MAX 32000u
/* Lists of channels that pools of recipes may have, beside the default: 80 layers of 256 KV heads, K and V.
 */
#define KV_CHANNEL_LISTS_MAX 40960u
/*
 * Work for matrices of `qr` with per_layer, in head_dim^3: 256 matrices of 256 channels, some 10 s. Nobody
 * waits longer for a pool, and the control API answers nobody else meanwhile.
 */
#define KV_QR_WORK_MAX        (1ull << 32)
#define KV_K_CENTER_BYTES_MAX (64u << 20) /* of the text of a file */

struct kv_files;
struct kv_rotation;
struct kv_row_codec;

/*
 * One layer: what its rows look like and how attention is taken over them. All KV heads have the same layout;
 * only the channels of recipes may differ between them, so whoever touches rows asks kv_layer_k() and
 * kv_layer_v(), and whoever counts bytes looks at k and v.
 */
struct kv_layer_spec {
	const struct kv_row_codec *k, *v; /* of KV head 0 */
	/* [kv_heads], where recipes have other channels on other heads; NULL: every head is like head 0. */
	const struct kv_row_codec *const *k_heads, *const *v_heads;
	/*
	 * [kv_heads, k_head_dim]: subtracted from every K row before it is stored, added to every K row that
	 * is read as numbers; packed rows are relative to it. NULL: nothing.
	 */
	const float *k_center;
	uint32_t group_idx;
	/* Attention: core/attention.h says how a logit is made. */
	uint32_t window;      /* tokens; 0 = none */
	uint32_t sink_tokens; /* of the sequence's first tokens stay in the window; 0 without one */
	float scale;          /* softmax scale; 1/sqrt(k_head_dim) unless declared */
	float softcap;        /* 0 = none */
	const float *sinks;   /* [q_heads] learned logits; NULL: none */
	const float *alibi;   /* [q_heads] slopes; NULL: none */
};

static inline const struct kv_row_codec *kv_layer_k(const struct kv_layer_spec *layer, uint32_t head)
{
	return layer->k_heads ? layer->k_heads[head] : layer->k;
}
static inline const struct kv_row_codec *kv_layer_v(const struct kv_layer_spec *layer, uint32_t head)
{
	return layer->v_heads ? layer->v_heads[head] : layer->v;
}

struct kv_pool_spec {
	char name[KV_POOL_NAME_BYTES_MAX + 1];
	uint32_t n_layers, q_heads, kv_heads, k_head_dim, v_head_dim;
	uint32_t block_size; /* tokens: 16, 32 or 64 */
	uint32_t n_groups;
	/*
	 * Kinds of blocks, each with a block pool and a table per sequence: the groups, and behind them,
	 * where exact_tokens is not 0, the ring blocks of the exact window, which hold all layers.
	 */
	uint32_t n_tables;
	uint32_t n_blocks[KV_TABLES_MAX]; /* per kind */
	uint32_t tokens_max; /* per sequence; at most what the smallest group without a window holds */
	const struct kv_layer_spec *layers; /* [n_layers] */
	bool has_k_center;                  /* some layer has one: all have */
	bool has_head_codecs;               /* some layer has k_heads or v_heads */
	uint64_t rotation_bytes,
		codebook_bytes; /* of what the codecs use, each once; k_center with the former */
	uint64_t fingerprint;
	const char *canonical_json; /* zero-terminated */
	uint32_t canonical_json_bytes;
	/*
	 * What windows still reach, per group: the widest window of its layers, 0 where one has none, and the
	 * blocks at the beginning that stay for the sake of sink_tokens.
	 */
	uint32_t group_window[KV_GROUPS_MAX], group_sink_blocks[KV_GROUPS_MAX];
	/* Row bytes of one token, summed over kv_heads and over the layers of a kind of blocks, K and V. */
	uint64_t token_bytes[KV_TABLES_MAX];
	/*
	 * The newest exact_tokens tokens of a sequence are kept as bf16 beside their pages (FORMATS 5.5); a
	 * multiple of block_size, 0: none. exact_k and exact_v are the codecs of these rows, NULL without.
	 */
	uint32_t exact_tokens;
	const struct kv_row_codec *exact_k, *exact_v;
};

/*
 * JSON members. Unknown ones are refused, and so is an option that none of the pool's formats takes.
 *
 *	name, layers, q_heads, kv_heads, block_size
 *	blocks                      per group: one number for all groups, or an array with one each
 *	head_dim                    or k_head_dim and v_head_dim
 *	k, v                        the name of a row format, or an array with one name per layer
 *	preset                      in place of k and v: a name of core/preset.h
 *	exact_layers    0           the first and the last n layers are bf16, K and V; not beside an array
 *	model, tokens_max
 *	groups                      which layers share blocks (default: those with the same window)
 *	exact_tokens    0           newest tokens of a sequence that are kept as bf16, too
 *	exact_blocks                their ring blocks, exact_tokens / block_size per sequence; a sequence that
 *	                            finds none has no exact tokens (default: a sixteenth of the first group's)
 *	scale                       of the softmax, above 0 (default 1/sqrt(k_head_dim))
 *	window          0           tokens that a query sees, its own included; 0: all
 *	sink_tokens     0           that many first tokens of a sequence stay in the window; not without one
 *	softcap         0           c > 0: logits become c * tanh(logit / c); 0: not
 *	sinks                       [q_heads] learned logits that join the denominator
 *	alibi                       [q_heads] slopes
 *	                            scale to softcap: one number, or an array with one per layer; sinks and
 *	                            alibi: one array for all layers, or an array with one (or null) per layer;
 *	                            no number of them is above 1e38, a slope 1e28
 *	rotation                    rht (default at powers of two), qr (default elsewhere), file
 *	seed            42          of the rotations
 *	per_layer       false       every layer has a rotation of its own, of seed + 1000003 * layer
 *	rotation_matrix             rotation file: an array of head_dim rows of head_dim numbers
 *	rotation_file               the same as little-endian float32, row-major, and nothing else
 *	norm_correction false       tqN
 *	group           32          channels of a group of vN
 *	recipe_scale    exact       or published: recipes
 *	recipe                      recipes: an object in the schema of turboquant_kv.json
 *	recipe_file                 the same as a file
 *	codebook_files              an array of files in the schema of codebooks/, each in place of a built-in
 *	                            one
 *	k_center                    an array [layers][kv_heads][k_head_dim] of numbers
 *	k_center_file               a file with an object {"version": 1, "k_center": that array}
 *
 * BAD_CONFIG names the member, the layer where there is one, and what was expected; UNSUPPORTED a combination
 * that is not served.
 *
 * Members that name files are the operator's: they are read through `files`, from the daemon's configuration
 * and command line only. Whoever passes on a pool from the network passes NULL, and they are refused: a
 * client must not make the daemon open files. Relative paths are those of the process.
 */
KV_MUST_CHECK enum kv_status kv_pool_spec_create_with(
	const json_t *json, const struct kv_files *files, struct kv_pool_spec **out, struct kv_error *err);
static inline KV_MUST_CHECK enum kv_status kv_pool_spec_create(
	const json_t *json, struct kv_pool_spec **out, struct kv_error *err)
{
	return kv_pool_spec_create_with(json, NULL, out, err);
}
void kv_pool_spec_destroy(struct kv_pool_spec *spec);
/*
 * "name=smol,layers=30,..." to the same JSON; BAD_CONFIG names the part that is wrong. json_decref() the
 * result.
 */
KV_MUST_CHECK enum kv_status kv_pool_spec_parse_short(const char *text, json_t **out, struct kv_error *err);

/*
 * Blocks before the returned one are reached by no window of the group's layers, for no request that may come
 * at this length or above, except the group's sink blocks. 0: all are reached.
 */
uint32_t kv_pool_spec_gone(const struct kv_pool_spec *spec, uint32_t group_idx, uint32_t length);

/* Some group gives blocks back. */
static inline bool kv_pool_spec_has_windows(const struct kv_pool_spec *spec)
{
	uint32_t greatest = 0;

	for (uint32_t g = 0; g < spec->n_groups; g++)
		greatest |= spec->group_window[g];
	return greatest != 0;
}

/* Name of the K or V format, "mixed" where layers differ. */
const char *kv_pool_spec_format_name(const struct kv_pool_spec *spec, bool is_v);

/*
 * Bytes of all row payload of the pool: what the page tensors take in the row layout of FORMATS 6. False on
 * overflow.
 */
bool kv_pool_spec_page_bytes(const struct kv_pool_spec *spec, uint64_t *n_bytes);

#endif
