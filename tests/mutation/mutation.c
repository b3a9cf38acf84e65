/*
 * The mutation program: scenarios against the whole server, with one function of the product made to do
 * nothing.
 *
 * The linker redirects calls of the listed functions here (-Wl,--wrap; calls between two objects only).
 * Without TQKV_MUTATION they are passed on and the program must end with 0. With TQKV_MUTATION=NAME or its
 * number, that function returns success without effect, and the program must not end with 0. 3: it was never
 * called.
 *
 * --list prints the names.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/domain_internal.h"
#include "core/format.h"
#include "core/plan_internal.h"
#include "core/prefix_internal.h"
#include "server/checkpoint_internal.h"
#include "server/internal.h"
#include "tests/mutation/scenarios.h"

/* Arguments are written twice, as a declaration and as a call. */
#define ARGS(...) (__VA_ARGS__)

/*
 * V(function, parameters, arguments): returns nothing.
 * R(function, type, value, parameters, arguments): returns value instead of working.
 */
#define MUTATIONS(V, R)                                                                                      \
	/* sessions */                                                                                       \
	V(kv_session_close, ARGS(struct kv_domain *a, struct kv_session *b, bool c), ARGS(a, b, c))          \
	V(kv_session_renew, ARGS(struct kv_session *a, uint64_t b), ARGS(a, b))                              \
	V(kv_session_renew_owner, ARGS(struct kv_domain *a, uint64_t b, uint64_t c), ARGS(a, b, c))          \
	V(kv_session_owner_lost, ARGS(struct kv_domain *a, uint64_t b, uint64_t c), ARGS(a, b, c))           \
	R(kv_session_expire, uint32_t, 0, ARGS(struct kv_domain *a, uint64_t b, uint32_t c), ARGS(a, b, c))  \
	R(kv_session_attach, enum kv_status, KV_OK,                                                          \
		ARGS(struct kv_domain *a, const char *b, uint32_t c, uint64_t d, uint64_t e, uint64_t f,     \
			struct kv_session **g),                                                              \
		ARGS(a, b, c, d, e, f, g))                                                                   \
	R(kv_session_by_name, struct kv_session *, NULL,                                                     \
		ARGS(struct kv_domain *a, const char *b, uint32_t c, uint64_t d), ARGS(a, b, c, d))          \
	R(kv_domain_n_owned, uint32_t, 0, ARGS(const struct kv_domain *a), ARGS(a))                          \
	R(kv_session_next_expiry_ns, uint64_t, UINT64_MAX, ARGS(const struct kv_domain *a), ARGS(a))         \
	/* sequences and items */                                                                            \
	R(kv_sequence_truncate, enum kv_status, KV_OK, ARGS(struct kv_session *a, uint64_t b, uint32_t c),   \
		ARGS(a, b, c))                                                                               \
	R(kv_sequence_free, enum kv_status, KV_OK, ARGS(struct kv_session *a, uint64_t b), ARGS(a, b))       \
	R(kv_sequence_fork, enum kv_status, KV_OK,                                                           \
		ARGS(struct kv_session *a, uint64_t b, uint64_t c, uint32_t d, uint64_t e, uint32_t *f),     \
		ARGS(a, b, c, d, e, f))                                                                      \
	R(kv_sequence_count_shared, struct kv_shared_count, (struct kv_shared_count){ 0 },                   \
		ARGS(const struct kv_sequence *a, uint32_t b, uint32_t c, uint32_t d), ARGS(a, b, c, d))     \
	V(kv_sequence_unshare, ARGS(struct kv_sequence *a, uint32_t b, uint32_t c, uint32_t d, uint32_t e),  \
		ARGS(a, b, c, d, e))                                                                         \
	R(kv_prefix_publish, enum kv_status, KV_OK,                                                          \
		ARGS(struct kv_session *a, uint64_t b, const struct kv_prefix_key *c, uint32_t d,            \
			uint64_t e, struct kv_prefix_result *f),                                             \
		ARGS(a, b, c, d, e, f))                                                                      \
	R(kv_prefix_match, enum kv_status, KV_OK,                                                            \
		ARGS(struct kv_session *a, uint64_t b, const struct kv_prefix_key *c, bool d, uint64_t e,    \
			struct kv_prefix_result *f),                                                         \
		ARGS(a, b, c, d, e, f))                                                                      \
	R(kv_prefix_remove, enum kv_status, KV_OK, ARGS(struct kv_domain *a, uint64_t *b, uint32_t c),       \
		ARGS(a, b, c))                                                                               \
	V(kv_prefix_expire, ARGS(struct kv_domain *a, uint64_t b, uint32_t c), ARGS(a, b, c))                \
	R(kv_prefix_evict, bool, false, ARGS(struct kv_pool *a, uint32_t b, uint32_t *c), ARGS(a, b, c))     \
	R(kv_pool_make_room, bool, false, ARGS(struct kv_pool *a, uint32_t b, uint32_t c), ARGS(a, b, c))    \
	V(kv_sequence_evict, ARGS(struct kv_sequence *a), ARGS(a))                                           \
	V(kv_sequence_rest, ARGS(struct kv_sequence *a), ARGS(a))                                            \
	V(kv_sequence_wake, ARGS(struct kv_sequence *a), ARGS(a))                                            \
	R(kv_sequence_pin, enum kv_status, KV_OK, ARGS(struct kv_session *a, uint64_t b), ARGS(a, b))        \
	R(kv_sequence_unpin, enum kv_status, KV_OK, ARGS(struct kv_session *a, uint64_t b), ARGS(a, b))      \
	V(kv_block_pool_keep, ARGS(struct kv_block_pool *a, kv_block_id b), ARGS(a, b))                      \
	V(kv_block_pool_unkeep, ARGS(struct kv_block_pool *a, kv_block_id b), ARGS(a, b))                    \
	V(kv_sequence_spill_begin, ARGS(struct kv_sequence *a, const struct kv_tier_image *b), ARGS(a, b))   \
	V(kv_sequence_spill_end, ARGS(struct kv_sequence *a, bool b), ARGS(a, b))                            \
	R(kv_sequence_fetch_begin, enum kv_status, KV_OK, ARGS(struct kv_sequence *a), ARGS(a))              \
	V(kv_sequence_fetch_end, ARGS(struct kv_sequence *a, bool b), ARGS(a, b))                            \
	V(kv_tier_give, ARGS(struct kv_tier_image *a), ARGS(a))                                              \
	R(kv_sequence_list, uint32_t, 0,                                                                     \
		ARGS(struct kv_session *a, uint64_t b, struct kv_sequence **c, uint32_t d, uint64_t *e),     \
		ARGS(a, b, c, d, e))                                                                         \
	V(kv_item_plan, ARGS(struct kv_session *a, struct kv_item *b, uint32_t c, uint32_t d, uint64_t e),   \
		ARGS(a, b, c, d, e))                                                                         \
	V(kv_item_plan_tables,                                                                               \
		ARGS(struct kv_session *a, struct kv_item *b, const struct kv_frame_rows *c, uint64_t d),    \
		ARGS(a, b, c, d))                                                                            \
	R(kv_plan_add_tables, bool, false,                                                                   \
		ARGS(struct kv_plan *a, const struct kv_frame_rows *b, const struct kv_item *c,              \
			uint32_t *d),                                                                        \
		ARGS(a, b, c, d))                                                                            \
	V(srv_slots_dispatch, ARGS(struct srv_conn *a, struct kv_session *b, const uint8_t *c),              \
		ARGS(a, b, c))                                                                               \
	V(srv_table_dispatch, ARGS(struct srv_conn *a, struct kv_session *b, const uint8_t *c),              \
		ARGS(a, b, c))                                                                               \
	V(kv_sequence_move_windows, ARGS(struct kv_sequence *a), ARGS(a))                                    \
	R(kv_sequence_check_reach, enum kv_status, KV_OK,                                                    \
		ARGS(const struct kv_sequence *a, uint32_t b, uint32_t c, uint32_t d), ARGS(a, b, c, d))     \
	R(kv_sequence_check_cut, enum kv_status, KV_OK, ARGS(const struct kv_sequence *a, uint32_t b),       \
		ARGS(a, b))                                                                                  \
	V(kv_sequence_cut_windows, ARGS(struct kv_sequence *a, uint32_t b), ARGS(a, b))                      \
	V(kv_sequence_plan_exact, ARGS(struct kv_sequence *a, struct kv_item *b, uint32_t c, uint32_t d),    \
		ARGS(a, b, c, d))                                                                            \
	V(kv_sequence_see_exact,                                                                             \
		ARGS(const struct kv_sequence *a, struct kv_item *b, uint32_t c, uint32_t d),                \
		ARGS(a, b, c, d))                                                                            \
	V(kv_sequence_cut_exact, ARGS(struct kv_sequence *a, uint32_t b, uint32_t c), ARGS(a, b, c))         \
	V(kv_sequence_count_exact, ARGS(struct kv_sequence *a, uint64_t b), ARGS(a, b))                      \
	R(kv_plan_add_exact_slots, const int64_t *, NULL, ARGS(struct kv_plan *a, const struct kv_item *b),  \
		ARGS(a, b))                                                                                  \
	V(kv_item_finish, ARGS(struct kv_item *a, uint32_t b, uint32_t c), ARGS(a, b, c))                    \
	R(kv_item_is_stale, bool, false, ARGS(const struct kv_item *a), ARGS(a))                             \
	V(kv_plan_end, ARGS(struct kv_plan *a), ARGS(a))                                                     \
	R(kv_domain_release, uint32_t, 0, ARGS(struct kv_domain *a, uint32_t b), ARGS(a, b))                 \
	/* snapshots */                                                                                      \
	V(kv_capture_take, ARGS(struct kv_capture *a, const struct kv_sequence *b, uint64_t c),              \
		ARGS(a, b, c))                                                                               \
	R(kv_capture_take_prefix, bool, false,                                                               \
		ARGS(struct kv_capture *a, struct kv_pool *b, uint64_t c, uint32_t *d), ARGS(a, b, c, d))    \
	V(kv_capture_sealed, ARGS(struct kv_capture *a), ARGS(a))                                            \
	V(kv_capture_destroy, ARGS(struct kv_capture *a), ARGS(a))                                           \
	R(kv_stage_session, enum kv_status, KV_OK,                                                           \
		ARGS(struct kv_stage *a, const struct kv_staged_session *b, uint64_t c, struct kv_error *d), \
		ARGS(a, b, c, d))                                                                            \
	R(kv_stage_sequence, enum kv_status, KV_OK,                                                          \
		ARGS(struct kv_stage *a, const struct kv_staged_sequence *b, uint64_t c,                     \
			struct kv_error *d),                                                                 \
		ARGS(a, b, c, d))                                                                            \
	R(kv_stage_table, enum kv_status, KV_OK,                                                             \
		ARGS(struct kv_stage *a, uint32_t b, uint32_t c, const uint32_t d[], uint32_t e,             \
			struct kv_error *f),                                                                 \
		ARGS(a, b, c, d, e, f))                                                                      \
	R(kv_stage_prefix, enum kv_status, KV_OK,                                                            \
		ARGS(struct kv_stage *a, struct kv_pool *b, const struct kv_staged_prefix *c,                \
			struct kv_error *d),                                                                 \
		ARGS(a, b, c, d))                                                                            \
	R(kv_stage_commit, enum kv_status, KV_OK,                                                            \
		ARGS(struct kv_stage *a, uint64_t b, uint32_t *c, struct kv_error *d), ARGS(a, b, c, d))     \
	R(kv_stage_settle, bool, true, ARGS(struct kv_stage *a, uint64_t b, uint32_t c), ARGS(a, b, c))      \
	V(kv_session_commit, ARGS(struct kv_domain *a, struct kv_session *b, uint64_t c), ARGS(a, b, c))     \
	V(kv_session_unstage, ARGS(struct kv_domain *a, struct kv_session *b), ARGS(a, b))                   \
	R(kv_prefix_put, uint32_t, KV_PREFIX_NONE,                                                           \
		ARGS(struct kv_pool *a, uint64_t b, const struct kv_prefix_key *c, uint32_t d,               \
			const uint8_t *e, const uint32_t *f, uint64_t g),                                    \
		ARGS(a, b, c, d, e, f, g))                                                                   \
	V(kv_plan_add_exact_move,                                                                            \
		ARGS(struct kv_plan *a, const struct kv_sequence *b, uint32_t c, uint32_t d, uint32_t e,     \
			uint32_t f, bool g, uint8_t *h),                                                     \
		ARGS(a, b, c, d, e, f, g, h))                                                                \
	R(kv_sequence_restore_exact, bool, true,                                                             \
		ARGS(struct kv_sequence *a, uint32_t b, uint32_t c, uint32_t d), ARGS(a, b, c, d))           \
	V(srv_save_finish_chunk, ARGS(struct srv_checkpoint *a), ARGS(a))                                    \
	V(srv_checkpoint_turn, ARGS(struct srv_checkpoint *a), ARGS(a))                                      \
	/* blocks */                                                                                         \
	V(kv_block_pool_disown, ARGS(struct kv_block_pool *a, kv_block_id b), ARGS(a, b))                    \
	V(kv_block_pool_flight_begin, ARGS(struct kv_block_pool *a, kv_block_id b), ARGS(a, b))              \
	V(kv_block_pool_flights_begin, ARGS(struct kv_block_pool *a, const uint32_t b[], uint32_t c),        \
		ARGS(a, b, c))                                                                               \
	V(kv_block_pool_flights_end, ARGS(struct kv_block_pool *a, const uint32_t b[], uint32_t c),          \
		ARGS(a, b, c))                                                                               \
	R(kv_block_pool_reserve, enum kv_status, KV_OK, ARGS(struct kv_block_pool *a, uint32_t b),           \
		ARGS(a, b))                                                                                  \
	V(kv_block_pool_unreserve, ARGS(struct kv_block_pool *a, uint32_t b), ARGS(a, b))                    \
	R(kv_row_codec_encode, enum kv_status, KV_OK,                                                        \
		ARGS(const struct kv_row_codec *a, const float *b, uint8_t *c, struct kv_row_scratch *d),    \
		ARGS(a, b, c, d))                                                                            \
	/* checks of frames */                                                                               \
	R(kvp_header_check_size, enum kv_status, KV_OK,                                                      \
		ARGS(const struct kvp_header *a, uint64_t b, struct kvp_fault *c), ARGS(a, b, c))            \
	R(kvp_check_opcode, enum kv_status, KV_OK,                                                           \
		ARGS(const struct kvp_header *a, const struct kvp_caps *b, struct kvp_fault *c),             \
		ARGS(a, b, c))                                                                               \
	R(kvp_check_request, enum kv_status, KV_OK,                                                          \
		ARGS(const struct kvp_header *a, const uint8_t *b, const struct kvp_caps *c,                 \
			struct kvp_request *d, struct kvp_fault *e),                                         \
		ARGS(a, b, c, d, e))                                                                         \
	R(kvp_check_body_crc, enum kv_status, KV_OK,                                                         \
		ARGS(const struct kvp_header *a, uint32_t b, struct kvp_fault *c), ARGS(a, b, c))            \
	R(kvp_rows_check_payload, enum kv_status, KV_OK,                                                     \
		ARGS(const struct kvp_header *a, const struct kvp_rows_req *b, const struct kvp_geometry *c, \
			struct kvp_segments *d, struct kvp_fault *e),                                        \
		ARGS(a, b, c, d, e))                                                                         \
	R(kvp_read_check, enum kv_status, KV_OK,                                                             \
		ARGS(const struct kvp_header *a, const struct kvp_read_req *b, const struct kvp_geometry *c, \
			uint64_t d, struct kvp_read_reply_layout *e, struct kvp_fault *f),                   \
		ARGS(a, b, c, d, e, f))                                                                      \
	R(kvp_slots_check_payload, enum kv_status, KV_OK,                                                    \
		ARGS(const struct kvp_header *a, const struct kvp_slots_req *b,                              \
			const struct kvp_geometry *c, struct kvp_slots_segments *d, struct kvp_fault *e),    \
		ARGS(a, b, c, d, e))                                                                         \
	R(kvp_table_check_payload, enum kv_status, KV_OK,                                                    \
		ARGS(const struct kvp_header *a, const struct kvp_table_req *b,                              \
			const struct kvp_geometry *c, struct kvp_table_segments *d, struct kvp_fault *e),    \
		ARGS(a, b, c, d, e))                                                                         \
	/* the server */                                                                                     \
	R(srv_find_session, enum kv_status, KV_OK, ARGS(struct srv_conn *a, struct kv_session **b),          \
		ARGS(a, b))                                                                                  \
	V(srv_session_close, ARGS(struct srv_server *a, struct kv_session *b), ARGS(a, b))                   \
	R(srv_control_sessions, bool, true, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))   \
	R(srv_control_tenants, bool, true, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))    \
	R(srv_control_tenant, bool, true, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))     \
	R(srv_control_tenant_set, bool, true, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b)) \
	V(srv_control_tenant_clear, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))           \
	V(srv_control_tenant_gauges, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))          \
	R(kv_tenant_check, enum kv_status, KV_OK,                                                            \
		ARGS(struct kv_tenants *a, uint32_t b, enum kv_quota c, uint64_t d, struct kv_error *e),     \
		ARGS(a, b, c, d, e))                                                                         \
	V(kv_tenant_charge, ARGS(struct kv_tenants *a, uint32_t b, enum kv_quota c, uint64_t d),             \
		ARGS(a, b, c, d))                                                                            \
	V(kv_tenant_refund, ARGS(struct kv_tenants *a, uint32_t b, enum kv_quota c, uint64_t d),             \
		ARGS(a, b, c, d))                                                                            \
	R(kv_payer_evict, bool, false, ARGS(struct kv_pool *a, uint32_t b, uint64_t c), ARGS(a, b, c))       \
	R(kv_payer_check_open, enum kv_status, KV_OK,                                                        \
		ARGS(struct kv_pool *a, uint64_t b, uint32_t c, struct kv_error *d), ARGS(a, b, c, d))       \
	V(kv_session_refund, ARGS(struct kv_session *a), ARGS(a))                                            \
	R(kv_sequence_check_tokens, enum kv_status, KV_OK,                                                   \
		ARGS(const struct kv_session *a, const struct kv_sequence *b, uint32_t c), ARGS(a, b, c))    \
	V(kv_sequence_charge, ARGS(struct kv_sequence *a), ARGS(a))                                          \
	R(srv_control_prefixes, bool, true, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))   \
	R(srv_control_prefix_delete, bool, true, ARGS(struct srv_server *a, struct srv_control *b),          \
		ARGS(a, b))                                                                                  \
	V(srv_control_prefix, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))                 \
	R(srv_control_session_delete, bool, true, ARGS(struct srv_server *a, struct srv_control *b),         \
		ARGS(a, b))                                                                                  \
	V(srv_control_session, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))                \
	V(srv_control_sequence, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))               \
	V(srv_control_connections, ARGS(struct srv_server *a, struct srv_control *b), ARGS(a, b))            \
	R(srv_mailbox_take, struct srv_control *, NULL, ARGS(struct srv_mailbox *a), ARGS(a))                \
	R(srv_pool_remove, enum kv_status, KV_OK,                                                            \
		ARGS(struct srv_server *a, struct kv_pool *b, struct kv_error *c), ARGS(a, b, c))            \
	R(kv_domain_pool_check_remove, enum kv_status, KV_OK,                                                \
		ARGS(const struct kv_pool *a, struct kv_error *b), ARGS(a, b))                               \
	V(kv_domain_pool_remove, ARGS(struct kv_pool *a), ARGS(a))                                           \
	V(kv_arena_return, ARGS(struct kv_arena *a, uint64_t b), ARGS(a, b))                                 \
	V(srv_conns_scan_timed, ARGS(struct srv_server *a), ARGS(a))                                         \
	V(srv_conns_retry_waiting, ARGS(struct srv_server *a), ARGS(a))                                      \
	V(srv_conns_goaway, ARGS(struct srv_server *a), ARGS(a))                                             \
	V(srv_conn_wait, ARGS(struct srv_conn *a, enum srv_wait b, struct kv_list *c), ARGS(a, b, c))        \
	V(srv_request_free, ARGS(struct srv_server *a, struct srv_request *b), ARGS(a, b))                   \
	V(srv_reply_free, ARGS(struct srv_server *a, struct srv_reply *b), ARGS(a, b))                       \
	V(srv_scheduler_lose, ARGS(struct srv_server *a), ARGS(a))                                           \
	V(srv_scheduler_seal, ARGS(struct srv_server *a), ARGS(a))                                           \
	V(srv_probe_turn, ARGS(struct srv_server *a), ARGS(a))                                               \
	V(srv_counters_reject, ARGS(struct srv_counters *a, unsigned b), ARGS(a, b))                         \
	V(srv_histogram_add, ARGS(struct srv_histogram *a, uint64_t b), ARGS(a, b))                          \
	R(kv_selftest_check, enum kv_status, KV_OK, ARGS(const struct kv_batch *a, struct kv_error *b),      \
		ARGS(a, b))                                                                                  \
	V(kv_report_pool, ARGS(const struct kv_pool *a, struct kv_memory_report *b), ARGS(a, b))             \
	V(kv_report_session, ARGS(const struct kv_session *a, struct kv_memory_report *b), ARGS(a, b))

enum mutation {
#define MUTATION_ENUM(name, ...) MUTATION_##name,
	MUTATIONS(MUTATION_ENUM, MUTATION_ENUM)
#undef MUTATION_ENUM
		N_MUTATIONS
};

static const char *const names[] = {
#define MUTATION_NAME(name, ...) #name,
	MUTATIONS(MUTATION_NAME, MUTATION_NAME)
#undef MUTATION_NAME
};

static unsigned mutation = N_MUTATIONS;
static unsigned long n_calls; /* of the mutated function */

static bool is_mutated(unsigned number)
{
	n_calls += number == mutation;
	return number == mutation;
}

#define WRAP_VOID(name, parameters, arguments)    \
	void __real_##name parameters;            \
	void __wrap_##name parameters;            \
	void __wrap_##name parameters             \
	{                                         \
		if (!is_mutated(MUTATION_##name)) \
			__real_##name arguments;  \
	}
#define WRAP_VALUE(name, type, value, parameters, arguments) \
	type __real_##name parameters;                       \
	type __wrap_##name parameters;                       \
	type __wrap_##name parameters                        \
	{                                                    \
		if (is_mutated(MUTATION_##name))             \
			return value;                        \
		return __real_##name arguments;              \
	}
MUTATIONS(WRAP_VOID, WRAP_VALUE)

static void choose(const char *text)
{
	char *end;

	if (!text || *text == '\0')
		return;
	const unsigned long number = strtoul(text, &end, 10);

	if (*end == '\0' && number < N_MUTATIONS)
		mutation = (unsigned)number;
	for (unsigned i = 0; i < N_MUTATIONS; i++) {
		if (strcmp(text, names[i]) == 0)
			mutation = i;
	}
	if (mutation == N_MUTATIONS) {
		fprintf(stderr, "mutation: there is none called '%s'\n", text);
		exit(2);
	}
}

int main(int argc, char **argv)
{
	if (argc == 2 && strcmp(argv[1], "--list") == 0) {
		for (unsigned i = 0; i < N_MUTATIONS; i++)
			puts(names[i]);
		return 0;
	}
	choose(getenv("TQKV_MUTATION"));
	scenario_sessions();
	scenario_rows();
	scenario_tables();
	scenario_snapshots();
	return mutation < N_MUTATIONS && n_calls == 0 ? 3 : 0;
}
