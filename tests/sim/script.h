/*
 * Scripts: short words for tests that play one scenario. Every reply is still held against the model.
 */
#ifndef TESTS_SIM_SCRIPT_H
#define TESTS_SIM_SCRIPT_H

#include "tests/sim/peer.h"
#include "tests/sim/world.h"

/* Connects peer idx and waits for HELLO's answer. */
struct sim_peer *sim_script_connect(struct sim_world *world, uint32_t peer_idx);
/* OPEN on a pool; name NULL: none. Returns the handle. */
uint64_t sim_script_open(struct sim_peer *peer, uint32_t pool_idx, const char *name);
/* A request on a session, not sent. Rows are bf16, queries and outputs f32. */
struct sim_request *sim_script_new(struct sim_peer *peer, uint16_t opcode, uint64_t handle);
/* Rows on layers [first, first + n); the default is all layers for APPEND and READ, else layer 0. */
void sim_script_layers(struct sim_request *request, uint32_t layer_first, uint32_t n_layers);
/* Adds an item; an append at position 0 creates. Returns its index. */
uint32_t sim_script_item(
	struct sim_request *request, uint64_t sequence, uint32_t position, uint32_t n_tokens);

void sim_script_send(struct sim_request *request);
/* Runs until the request is answered, and returns the frame's status; fails after five simulated seconds. */
enum kv_status sim_script_wait(struct sim_request *request);
enum kv_status sim_script_call(struct sim_request *request);
/* One item, sent and answered; returns the item's status (or the frame's). */
enum kv_status sim_script_append(
	struct sim_peer *peer, uint64_t handle, uint64_t sequence, uint32_t position, uint32_t n_tokens);
enum kv_status sim_script_decode(
	struct sim_peer *peer, uint64_t handle, uint64_t sequence, uint32_t position);
enum kv_status sim_script_close(struct sim_peer *peer, uint64_t handle);
/* Steps for so much simulated time, whether something is under way or not. */
void sim_script_pass(struct sim_world *world, uint64_t for_ns);
/* Committed length of a sequence on a layer, from the server's own structures. */
uint32_t sim_script_length(struct sim_world *world, uint64_t handle, uint64_t sequence, uint32_t layer);
const struct kv_block_counts *sim_script_blocks(const struct sim_world *world, uint32_t pool_idx);
/* Everybody leaves, leases end; everything must be given back. Destroys the world. */
void sim_script_end(struct sim_world *world);

#endif
