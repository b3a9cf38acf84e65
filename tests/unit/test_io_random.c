/*
 * Seeded random traffic through both io implementations (loop index 0: io_uring, 1: epoll).
 */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/lib/io_rig.h"
#include "tests/lib/kv_test.h"

enum { N_STREAMS = 24, N_STREAM_BUFFERS = 3, N_STREAM_STEPS = 6000 };

/* One client and what the other end has seen of its bytes. */
struct stream {
	int fd;
	struct rig_conn *conn;
	uint64_t n_written, n_seen;
	int n_seen_events;
	bool is_holding, is_into;
	uint8_t target[700];
};

static void stream_post(struct rig *rig, struct stream *stream, uint64_t random)
{
	stream->is_into = random % 3 == 0;
	if (stream->is_into)
		rig->io->ops->recv_into(
			rig->io, stream->conn->conn, stream->target, 1 + (uint32_t)(random >> 8) % 700);
	else
		rig->io->ops->recv_ahead(rig->io, stream->conn->conn);
}

/* Compares what arrived with the position in the stream. */
static void stream_check(struct stream *stream)
{
	const struct rig_conn *conn = stream->conn;
	const uint8_t *data = stream->is_into ? stream->target : conn->ahead;

	if (conn->n_received == stream->n_seen_events)
		return;
	stream->n_seen_events = conn->n_received;
	ck_assert_int_gt(conn->received, 0);
	for (int64_t i = 0; i < conn->received; i++)
		ck_assert_uint_eq(data[i], rig_byte(stream->n_seen + (uint64_t)i));
	stream->n_seen += (uint64_t)conn->received;
	stream->is_holding = true;
}

static void stream_step(struct rig *rig, struct stream *stream, uint64_t random)
{
	uint8_t chunk[900];

	if (random % 4 == 0) {
		if (!stream->is_holding)
			return;
		stream->is_holding = false;
		if (!stream->is_into)
			rig->io->ops->ahead_return(rig->io, stream->conn->ahead_idx);
		stream_post(rig, stream, random >> 16);
		return;
	}

	const size_t n = 1 + (random >> 8) % sizeof(chunk);

	for (size_t i = 0; i < n; i++)
		chunk[i] = rig_byte(stream->n_written + i);

	const ssize_t rc = send(stream->fd, chunk, n, MSG_DONTWAIT | MSG_NOSIGNAL);

	if (rc > 0)
		stream->n_written += (uint64_t)rc;
}

static void stream_open(struct rig *rig, struct stream *stream, int listener_idx, uint64_t random)
{
	const int conn_idx = rig->n_accepted;

	memset(stream, 0, sizeof(*stream));
	stream->fd = rig_connect(rig, listener_idx);
	stream->conn = rig_accepted(rig, conn_idx);
	stream_post(rig, stream, random);
}

/* Closes at any moment; a buffer that the caller holds goes back as after any other event. */
static void stream_close(struct rig *rig, struct stream *stream)
{
	if (stream->is_holding && !stream->is_into)
		rig->io->ops->ahead_return(rig->io, stream->conn->ahead_idx);
	rig->io->ops->close(rig->io, stream->conn->conn);
	rig_until(rig, stream->conn->n_closed == 1);
	close(stream->fd);
}

/*
 * Seeded random traffic over a few buffers, with connections that come and go: every stream arrives in order
 * and complete.
 */
START_TEST(test_io_random_traffic)
{
	static struct stream streams[N_STREAMS];
	uint64_t seed = 0x9E3779B97F4A7C15u + (uint64_t)_i;
	struct rig rig;

	if (!rig_init(&rig, _i, N_STREAM_BUFFERS, N_STREAMS + 1))
		return;
	printf("seed %llu\n", (unsigned long long)seed);

	const int listener_idx = rig_listen(&rig, false);

	for (int i = 0; i < N_STREAMS; i++)
		stream_open(&rig, &streams[i], listener_idx, kv_test_random(&seed));
	for (int step = 0; step < N_STREAM_STEPS; step++) {
		const uint64_t random = kv_test_random(&seed);
		struct stream *stream = &streams[random % N_STREAMS];

		if (random >> 40 & 1)
			rig_turn(&rig, 0);
		for (int i = 0; i < N_STREAMS; i++)
			stream_check(&streams[i]);
		if ((random >> 44 & 255) == 0) {
			stream_close(&rig, stream);
			for (int i = 0; i < N_STREAMS; i++) {
				if (&streams[i] != stream)
					stream_check(&streams[i]);
			}
			stream_open(&rig, stream, listener_idx, random >> 8);
		} else {
			stream_step(&rig, stream, random >> 8);
		}
	}
	for (int i = 0, n_idle = 0; n_idle < N_STREAMS; i = (i + 1) % N_STREAMS) {
		if (streams[i].is_holding)
			stream_step(&rig, &streams[i], 0);
		rig_turn(&rig, 0);
		for (int k = 0; k < N_STREAMS; k++)
			stream_check(&streams[k]);
		n_idle = streams[i].n_seen == streams[i].n_written ? n_idle + 1 : 0;
	}
	for (int i = 0; i < N_STREAMS; i++)
		stream_close(&rig, &streams[i]);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("io_random");
	TCase *tcase = tcase_create("both");

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, test_io_random_traffic, 0, 2);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
