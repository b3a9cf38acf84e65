/*
 * Requests as the simulation keeps them: what was asked, what was seen of them inside the server, what was
 * answered. A request's id on the wire is its number, so everybody finds it again.
 */
#ifndef TESTS_SIM_REQUEST_H
#define TESTS_SIM_REQUEST_H

#include "core/backend.h"
#include "core/domain.h"
#include "core/number.h"
#include "proto/frame.h"
#include "proto/message.h"
#include "tests/sim/sim.h"

#define SIM_ITEMS_MAX  12u
#define SIM_TOKENS_MAX 192u
#define SIM_Q_LEN_MAX  16u
#define SIM_SLOTS_MAX  40u
#define SIM_LISTED_MAX 4u /* tables of a DECODE_TABLE */
#define SIM_STRIDE     3u /* their entries */

/* Deliberate faults of a frame. Those before SIM_FLAW_KEEPS close the connection. */
enum sim_flaw {
	SIM_FLAW_NONE,
	SIM_FLAW_MAGIC,
	SIM_FLAW_VERSION,
	SIM_FLAW_HEADER_CRC,
	SIM_FLAW_TOO_LARGE,
	SIM_FLAW_ITEM_BYTES,
	SIM_FLAW_RESPONSE,
	SIM_FLAW_BODY_CRC, /* found when the body is complete */
	SIM_FLAW_EARLY,    /* before HELLO */
	SIM_FLAW_KEEPS,
	SIM_FLAW_OPCODE,
	SIM_FLAW_FLAG,
	SIM_FLAW_HANDLE_0,
	SIM_FLAW_HANDLE_TAG,
	SIM_FLAW_HANDLE_GENERATION,
	SIM_FLAW_N_LAYERS, /* from here on row operations only */
	SIM_FLAW_LAYER_RANGE,
	SIM_FLAW_OFFSET,
	SIM_FLAW_TOTAL,
	SIM_FLAW_DUPLICATE,
	SIM_FLAW_FINGERPRINT,
	SIM_FLAW_ROWS_FLAG,
	SIM_FLAW_DTYPE,
	SIM_N_FLAWS
};
enum kv_status sim_flaw_status(enum sim_flaw flaw);

struct sim_item {
	uint64_t sequence, parent; /* parent: FORK */
	uint32_t position, n_tokens, q_len;
	uint16_t flags;
	uint32_t row_counter;        /* of its first token */
	uint32_t bad_layer, bad_row; /* a value that is not finite; KV_ROW_NONE: there is none */
	bool is_bad_v;
	/* Seen inside the server. */
	uint32_t n_planned, n_submitted, n_completed, n_finished;
	struct kv_result result;         /* the backend's */
	bool is_refused;                 /* the result was invented */
	struct kv_item outcome;          /* after planning refused it, or after it finished */
	uint64_t epoch;                  /* the model's, when planned */
	struct sim_sequence *planned_on; /* the model's */
	uint32_t *row_ids;               /* what it sees: [n_row_ids], or [n_layers, n_row_ids] for READ */
	uint32_t n_row_ids;
	uint32_t exact_lo; /* tokens from here on are exact, on every layer of the request */
};

struct sim_request {
	uint64_t id;
	struct sim_peer *peer;
	uint64_t conn_serial; /* which connection of the peer */
	uint16_t opcode;
	uint32_t flags; /* KVP_FLAG_BODY_CRC, KVP_FLAG_TIMINGS */
	enum sim_flaw flaw;
	uint64_t session;
	uint32_t deadline_us;
	const struct kv_pool_spec *spec; /* the session's pool; NULL where there is none */
	uint64_t order;                  /* in which requests were sent */
	uint64_t sent_ns, planned_ns;
	uint64_t planned_seq;     /* struct sim_model.seq; 0: never planned */
	bool is_replied, is_lost; /* lost: its connection is gone */
	uint32_t n_cancels;       /* CANCELs sent for it */
	bool is_dropped;          /* one of them was answered DROPPED */
	/* row operations, READ, TRUNCATE, FREE, FORK */
	uint32_t layer_first, n_layers;
	enum kv_dtype k_dtype, v_dtype, q_dtype, out_dtype;
	uint32_t rows_flags, query_counter;
	uint16_t read_flags;
	float scale;
	uint32_t window;
	uint32_t n_items;
	struct sim_item items[SIM_ITEMS_MAX];
	/* UPDATE_SLOTS and DECODE_TABLE, which have one item here */
	int64_t slots[SIM_SLOTS_MAX];
	uint32_t n_listed, table[SIM_LISTED_MAX * SIM_STRIDE], seen[SIM_LISTED_MAX];
	/* the others */
	uint64_t echo_bytes, echo_payload_bytes;
	bool has_echo;
	uint64_t cancel_id;
	struct kvp_open_req open;
	char pool_name[65], session_name[129];
	struct kvp_hello_req hello;
	struct kvp_tell_req tell;
	struct kvp_prefix_req prefix;
	char prefix_texts[8]; /* adapter and salt, back to back */
	uint32_t tokens[SIM_TOKENS_MAX];
	struct kvp_pool_info_req pool_info;
};

/* The number from which row `row` of an item's queries follows; a request takes SIM_ITEMS_MAX *
 * SIM_Q_LEN_MAX. */
static inline uint32_t sim_query_id(const struct sim_request *request, uint32_t item_idx, uint32_t row)
{
	return request->query_counter + item_idx * SIM_Q_LEN_MAX + row;
}

/* A growing run of bytes. */
struct sim_bytes {
	uint8_t *data;
	uint64_t n, n_max;
};
/* n more bytes, zeroed; returns where they begin. */
uint8_t *sim_bytes_add(struct sim_bytes *bytes, uint64_t n);
void sim_bytes_finish(struct sim_bytes *bytes);

bool sim_request_is_rows(const struct sim_request *request);   /* APPEND, DECODE, APPEND_DECODE */
bool sim_request_is_tables(const struct sim_request *request); /* UPDATE_SLOTS, DECODE_TABLE */
/* The frame, flaw included. */
void sim_request_encode(const struct sim_request *request, uint64_t frame_bytes_max, struct sim_bytes *out);
/* Bytes of the frame of a request without a flaw. */
uint64_t sim_request_bytes(const struct sim_request *request);
uint32_t sim_request_n_tokens(const struct sim_request *request);
uint32_t sim_request_n_q(const struct sim_request *request);

#endif
