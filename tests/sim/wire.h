/*
 * Wire: one direction of a simulated connection. Bytes come out in order, in pieces that become visible at
 * their own times; then perhaps an end.
 */
#ifndef TESTS_SIM_WIRE_H
#define TESTS_SIM_WIRE_H

#include "tests/sim/sim.h"

struct sim_wire_piece {
	uint64_t end; /* offset in the stream behind its last byte */
	uint64_t due_ns;
};

struct sim_wire {
	uint8_t *bytes; /* stream offsets [base, n_written) */
	uint64_t bytes_max, base, n_read, n_written;
	struct sim_wire_piece *pieces; /* [n_pieces], the first may be due already */
	uint32_t n_pieces, pieces_max;
	uint64_t due_last_ns;
	bool has_end;
	uint64_t end_due_ns;
};

void sim_wire_finish(struct sim_wire *wire);
/* Cuts n bytes into up to four pieces, each at most delay_ns_max after the one before. */
void sim_wire_write(struct sim_wire *wire, const void *bytes, uint64_t n, uint64_t now_ns,
	uint64_t delay_ns_max, struct sim_rng *rng);
void sim_wire_end(struct sim_wire *wire, uint64_t now_ns, uint64_t delay_ns_max, struct sim_rng *rng);
/* Bytes that are there now. */
uint64_t sim_wire_available(struct sim_wire *wire, uint64_t now_ns);
void sim_wire_take(struct sim_wire *wire, void *out, uint64_t n);
/* Everything was taken and the end is there. */
bool sim_wire_is_over(const struct sim_wire *wire, uint64_t now_ns);
/* When something new becomes visible; UINT64_MAX: nothing is under way. */
uint64_t sim_wire_next_ns(const struct sim_wire *wire, uint64_t now_ns);
static inline uint64_t sim_wire_n_inside(const struct sim_wire *wire)
{
	return wire->n_written - wire->n_read;
}

#endif
