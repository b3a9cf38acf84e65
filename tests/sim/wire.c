#include "tests/sim/wire.h"

#include <stdlib.h>
#include <string.h>

void sim_wire_finish(struct sim_wire *wire)
{
	free(wire->bytes);
	free(wire->pieces);
	memset(wire, 0, sizeof(*wire));
}

static void make_room(struct sim_wire *wire, uint64_t n)
{
	const uint64_t n_inside = sim_wire_n_inside(wire);

	if (wire->n_written + n - wire->base > wire->bytes_max) {
		const uint64_t bytes_max = 2 * (n_inside + n) + 256;
		uint8_t *bytes = malloc(bytes_max);

		SIM_CHECK(bytes, "no memory for a wire");
		if (n_inside > 0)
			memcpy(bytes, wire->bytes + (wire->n_read - wire->base), n_inside);
		free(wire->bytes);
		wire->bytes = bytes;
		wire->bytes_max = bytes_max;
		wire->base = wire->n_read;
	}
	if (wire->n_pieces + 4 > wire->pieces_max) {
		wire->pieces_max = 2 * wire->pieces_max + 16;
		wire->pieces = realloc(wire->pieces, wire->pieces_max * sizeof(*wire->pieces));
		SIM_CHECK(wire->pieces, "no memory for a wire");
	}
}

/* Times never go back: what was written later does not overtake. */
static uint64_t next_due(struct sim_wire *wire, uint64_t now_ns, uint64_t delay_ns_max, struct sim_rng *rng)
{
	const uint64_t due_ns = now_ns + (delay_ns_max ? sim_rng_next(rng) % delay_ns_max : 0);

	if (due_ns > wire->due_last_ns)
		wire->due_last_ns = due_ns;
	return wire->due_last_ns;
}

void sim_wire_write(struct sim_wire *wire, const void *bytes, uint64_t n, uint64_t now_ns,
	uint64_t delay_ns_max, struct sim_rng *rng)
{
	SIM_CHECK(!wire->has_end, "bytes behind the end of a wire");
	if (n == 0)
		return;
	make_room(wire, n);
	memcpy(wire->bytes + (wire->n_written - wire->base), bytes, n);
	const uint64_t end = wire->n_written + n;

	for (uint32_t i = 0; i < 3 && wire->n_written + 1 < end && sim_chance(rng, 400); i++) {
		wire->n_written += 1 + sim_rng_next(rng) % (end - wire->n_written - 1);
		wire->pieces[wire->n_pieces++] =
			(struct sim_wire_piece){ wire->n_written, next_due(wire, now_ns, delay_ns_max, rng) };
	}
	wire->n_written = end;
	wire->pieces[wire->n_pieces++] =
		(struct sim_wire_piece){ end, next_due(wire, now_ns, delay_ns_max, rng) };
}

void sim_wire_end(struct sim_wire *wire, uint64_t now_ns, uint64_t delay_ns_max, struct sim_rng *rng)
{
	if (wire->has_end)
		return;
	wire->has_end = true;
	wire->end_due_ns = next_due(wire, now_ns, delay_ns_max, rng);
}

uint64_t sim_wire_available(struct sim_wire *wire, uint64_t now_ns)
{
	uint32_t n_due = 0;

	while (n_due + 1 < wire->n_pieces && wire->pieces[n_due + 1].due_ns <= now_ns)
		n_due++;
	/* All but the last of the due ones say nothing any more. */
	if (n_due > 0) {
		wire->n_pieces -= n_due;
		memmove(wire->pieces, wire->pieces + n_due, wire->n_pieces * sizeof(*wire->pieces));
	}
	if (wire->n_pieces == 0 || wire->pieces[0].due_ns > now_ns)
		return 0;
	return wire->pieces[0].end - wire->n_read;
}

void sim_wire_take(struct sim_wire *wire, void *out, uint64_t n)
{
	SIM_CHECK(n <= sim_wire_n_inside(wire), "a wire gives more than it has");
	memcpy(out, wire->bytes + (wire->n_read - wire->base), n);
	wire->n_read += n;
	if (wire->n_pieces > 0 && wire->pieces[0].end == wire->n_read) {
		wire->n_pieces--;
		memmove(wire->pieces, wire->pieces + 1, wire->n_pieces * sizeof(*wire->pieces));
	}
}

bool sim_wire_is_over(const struct sim_wire *wire, uint64_t now_ns)
{
	return wire->has_end && wire->end_due_ns <= now_ns && sim_wire_n_inside(wire) == 0;
}

uint64_t sim_wire_next_ns(const struct sim_wire *wire, uint64_t now_ns)
{
	for (uint32_t i = 0; i < wire->n_pieces; i++) {
		if (wire->pieces[i].due_ns > now_ns)
			return wire->pieces[i].due_ns;
	}
	return wire->has_end && wire->end_due_ns > now_ns ? wire->end_due_ns : UINT64_MAX;
}
