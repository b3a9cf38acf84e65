/*
 * A naive model of sessions and sequences that keeps lengths in plain arrays, beside a domain: random
 * operations on both, and what the domain has to answer. Batches are made of plans without a backend: up to
 * two are in flight, items of them are refused at random, others are cancelled before they are sealed.
 */
#ifndef TESTS_UNIT_SEQUENCE_WORLD_H
#define TESTS_UNIT_SEQUENCE_WORLD_H

#include "core/backend.h"
#include "core/domain.h"
#include "core/domain_internal.h"
#include "core/number.h"
#include "core/tally.h"
#include "tests/lib/kv_core_test.h"

enum {
	N_LAYERS = 3,
	N_SESSIONS = 3,
	N_IDS = 9,
	N_SEQUENCES = 14, /* bound of the domain: below what the sessions could have */
	N_ENTRIES = 256,
	N_FLIGHTS = 2,
	N_MODELS = 4096, /* sequences ever made in one run */
};
#define NO_RESULT UINT32_MAX

struct model_sequence {
	uint64_t id;
	uint32_t planned[N_LAYERS], committed[N_LAYERS];
	uint32_t gone_end[N_LAYERS]; /* tokens from the sinks up to here are gone; the same within a group */
	uint32_t epoch;
	uint32_t n_items; /* planned and not finished */
	bool is_live, is_born;
};

struct model_session {
	struct kv_session *session;                  /* NULL: not open */
	struct model_sequence *sequences[N_IDS + 1]; /* by id */
	uint32_t n_queued, n_outstanding;
};

/* One planned item on its way. */
struct entry {
	struct kv_item item;
	uint32_t layer_first, n_layers;
	struct model_sequence *model;
	struct model_session *owner; /* NULL once its session is closed */
	uint32_t epoch;
	uint32_t result_idx;
};

struct flight {
	struct kv_plan plan;
	uint8_t *area;
	uint32_t n_entries;
};

struct world {
	uint64_t seed;
	bool is_long; /* sequences become long before they end: windows move */
	struct kv_test_domain test;
	uint64_t area_bytes;
	struct model_session sessions[N_SESSIONS];
	struct model_sequence models[N_MODELS];
	uint32_t n_models;
	struct entry entries[N_ENTRIES]; /* ring, in order of planning */
	uint32_t entry_first, n_entries, n_sealed;
	struct flight flights[N_FLIGHTS]; /* ring, in order of submission */
	uint32_t flight_first, n_flights;
	uint64_t now_ns;
	uint32_t n_by_status[1000]; /* of finished and refused items */
	struct kv_tally *tally;
	uint32_t n_tallies; /* that came to their end */
	bool is_leaky;
	uint32_t leak_kind;
	struct kv_block_pool *leak_blocks;
	kv_block_id leak_id;
	struct kv_finding finding; /* of a leaky world */
};

static inline uint32_t below(struct world *world, uint32_t n)
{
	return (uint32_t)(kv_test_random(&world->seed) >> 32) % n;
}

static inline uint32_t least(const uint32_t *lengths, uint32_t first, uint32_t n)
{
	uint32_t result = lengths[first];

	for (uint32_t l = first; l < first + n; l++)
		result = lengths[l] < result ? lengths[l] : result;
	return result;
}

static inline struct entry *entry_at(struct world *world, uint32_t i)
{
	return &world->entries[(world->entry_first + i) % N_ENTRIES];
}

/* ---- windows (sequence_world_expect.c) ---- */

uint32_t world_sinks_end(const struct world *world, uint32_t layer);
/* Whether all of tokens [first, end) are held at the planned lengths. */
bool world_is_reached(const struct world *world, const struct model_sequence *model, uint32_t layer,
	uint32_t first, uint32_t end);
/* Rows were committed: what no window reaches any more is gone. */
void world_move_windows(const struct world *world, struct model_sequence *model);
uint32_t world_n_held(const struct world *world, const struct model_sequence *model, uint32_t layer);

/* ---- what planning the item has to answer; *length only on POSITION ---- */

enum kv_status world_expect_plan(struct world *world, const struct model_session *owner,
	const struct kv_item *item, uint32_t layer_first, uint32_t n_layers, uint32_t *length);

/* ---- steps (sequence_world_steps.c) ---- */

void world_step_plan(struct world *world);
/* Seals everything that waits into one batch, as far as the area goes. */
void world_step_seal(struct world *world);
void world_step_reap(struct world *world);
/* FREE or TRUNCATE. */
void world_step_change(struct world *world);
/* Opens a session, or closes one that has nothing queued although batches of it may be in flight. */
void world_step_session(struct world *world);

/* ---- a run (sequence_world.c) ---- */

void world_begin(struct world *world, uint64_t seed, const char *options, const char *groups);
/* One random operation; in a world that is not leaky the domain is audited and compared after it. */
void world_step(struct world *world);
/* Everything comes to its end, and nothing is left behind. */
void world_wind_up(struct world *world);
void world_end(struct world *world);

#endif
