/*
 * Pool specification from inside: the members of its JSON, shared by the JSON reader and the short form, and
 * the canonical text. Only pool_spec*.c include it.
 */
#ifndef CORE_POOL_SPEC_INTERNAL_H
#define CORE_POOL_SPEC_INTERNAL_H

#include "core/pool_spec.h"

#define KV_MODEL_BYTES_MAX 256u

enum kv_member_kind { KV_MEMBER_TEXT, KV_MEMBER_INTEGER, KV_MEMBER_NUMBER, KV_MEMBER_LIST };

struct kv_pool_member {
	const char *name;
	enum kv_member_kind kind;
};

/* NULL when there is no member of this name. */
const struct kv_pool_member *kv_pool_member_find(const char *name, uint32_t name_bytes);

/*
 * Fills canonical_json (kv_free() it), canonical_json_bytes and fingerprint of a spec that is complete
 * otherwise.
 */
KV_MUST_CHECK enum kv_status kv_pool_spec_canonicalise(
	struct kv_pool_spec *spec, const char *model, struct kv_error *err);

#endif
