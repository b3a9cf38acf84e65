/*
 * Watched calls: what record*.c share.
 */
#ifndef TESTS_SIM_RECORD_H
#define TESTS_SIM_RECORD_H

#include "tests/sim/model.h"

/* The body that follows is called in place of the function, which is __real_<name>. */
#define WRAPPED(type, name, ...)         \
	type __real_##name(__VA_ARGS__); \
	type __wrap_##name(__VA_ARGS__); \
	type __wrap_##name(__VA_ARGS__)

/* The domain is the server's; counts the call. */
bool sim_is_watched(const struct kv_domain *domain);

/* The item that is being planned, and what must come out of it. */
struct sim_planning {
	const struct sim_session *known;
	struct kv_session *session;
	struct kv_item *item;
	uint32_t layer_first, n_layers;
	struct sim_expected *expected; /* NULL: none is */
};
extern struct sim_planning sim_planning;

/* quotas.c: what the session's tenant has; taken before a call, and compared after it. */
struct kv_tenant sim_tenant_of(const struct kv_session *session);
void sim_check_quotas(const struct kv_session *session, const struct kv_tenant *before);
bool sim_tokens_are_short(
	const struct kv_session *session, const struct kv_tenant *before, uint64_t n_tokens);
/* The item was refused with QUOTA: it had to be. That is what is expected from now on. */
void sim_check_refused(const struct kv_session *session, const struct kv_tenant *before,
	const struct sim_session *ours, const struct kv_item *item, struct sim_expected *expected);

#endif
