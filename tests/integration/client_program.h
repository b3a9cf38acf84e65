/*
 * What programs that drive a daemon through libtqkv share: ADDRESS POOL BOUND [SEED [ROUNDS]] as arguments, a
 * check that ends the program with the line and what the library says, random numbers, and attention in
 * float64.
 */
#ifndef TESTS_INTEGRATION_CLIENT_PROGRAM_H
#define TESTS_INTEGRATION_CLIENT_PROGRAM_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/attention.h"
#include "proto/client/tqkv.h"

#define TIMEOUT_MS 60000u
#define N_ROUNDS   40u

struct program {
	struct tqkv_conn *conn;
	struct tqkv_session *session;
	const struct tqkv_session_info *info;
	struct tqkv_error err;
	double bound, worst; /* relative L2 error of an output; the greatest one so far */
	uint64_t seed;
	uint32_t n_rounds;
};

static inline void program_fail(const struct program *program, const char *file, int line, const char *text)
{
	fprintf(stderr, "%s:%d: %s (library: %s, item %u, got %llu)\n", file, line, text,
		program->err.message, program->err.item, (unsigned long long)program->err.got);
	exit(EXIT_FAILURE);
}

#define CHECK(program, condition)                                              \
	do {                                                                   \
		if (!(condition))                                              \
			program_fail(program, __FILE__, __LINE__, #condition); \
	} while (0)

static inline uint32_t program_below(struct program *program, uint32_t n)
{
	program->seed ^= program->seed >> 12;
	program->seed ^= program->seed << 25;
	program->seed ^= program->seed >> 27;
	return (uint32_t)((program->seed * 0x2545F4914F6CDD1Du) >> 32) % n;
}

/* About normal. */
static inline float program_number(struct program *program)
{
	uint32_t sum = 0;

	for (int i = 0; i < 4; i++)
		sum += program_below(program, 65536);
	return ((float)sum - 131070.0f) / 37837.0f;
}

static inline void program_draw(struct program *program, float *numbers, size_t n)
{
	for (size_t i = 0; i < n; i++)
		numbers[i] = program_number(program);
}

static inline void *program_alloc(const struct program *program, size_t n, size_t size)
{
	void *memory = calloc(n ? n : 1, size);

	CHECK(program, memory != NULL);
	return memory;
}

/* Connects and opens a session of the pool. */
static inline void program_begin(
	struct program *program, int argc, char **argv, const struct tqkv_open_params *params)
{
	struct tqkv_open_params own = *params;

	memset(program, 0, sizeof(*program));
	if (argc < 4) {
		fprintf(stderr, "usage: %s ADDRESS POOL BOUND [SEED [ROUNDS]]\n", argv[0]);
		exit(EXIT_FAILURE);
	}
	own.pool = argv[2];
	program->bound = atof(argv[3]);
	program->seed = argc > 4 ? strtoull(argv[4], NULL, 0) : 20260101;
	program->n_rounds = argc > 5 ? (uint32_t)atoi(argv[5]) : N_ROUNDS;
	printf("seed %llu\n", (unsigned long long)program->seed);
	fflush(stdout);
	program->seed = program->seed * 2 + 1;
	CHECK(program, tqkv_connect(argv[1], NULL, &program->conn, &program->err) == TQKV_OK);
	CHECK(program,
		tqkv_open(program->conn, &own, TIMEOUT_MS, &program->session, &program->err) == TQKV_OK);
	program->info = tqkv_session_info(program->session);
}

static inline void program_end(struct program *program)
{
	CHECK(program, tqkv_close(program->session, TIMEOUT_MS, &program->err) == TQKV_OK);
	tqkv_disconnect(program->conn);
	printf("worst relative error %.2e of %.0e\n", program->worst, program->bound);
}

/*
 * One query row that sees rows [0, n) of one layer, [n, kv_heads, dim] each, against what the daemon gave:
 * q, out [q_heads, dim], lse [q_heads] or NULL.
 */
static inline void program_check(struct program *program, const float *q, const float *k, const float *v,
	uint32_t n, uint32_t window, const float *out, const float *lse)
{
	const struct tqkv_session_info *info = program->info;
	const uint32_t k_dim = info->k_head_dim, v_dim = info->v_head_dim;

	for (uint32_t h = 0; h < info->q_heads; h++) {
		const uint32_t head = h / (info->q_heads / info->kv_heads);
		const struct kv_attention_exact_input input = { .q = q + (size_t)h * k_dim,
			.k = k + (size_t)head * k_dim,
			.v = v + (size_t)head * v_dim,
			.k_stride = (uint64_t)info->kv_heads * k_dim,
			.v_stride = (uint64_t)info->kv_heads * v_dim,
			.k_dim = k_dim,
			.v_dim = v_dim,
			.tokens = kv_attention_range(n, 1, 0, window, 0),
			.scale = (double)(1.0f / sqrtf((float)k_dim)) };
		double exact[KV_HEAD_DIM_MAX], exact_lse = 0, error = 0, norm = 0;

		kv_attention_exact(&input, exact, &exact_lse);
		for (uint32_t i = 0; i < v_dim; i++) {
			const double difference = (double)out[(size_t)h * v_dim + i] - exact[i];

			error += difference * difference;
			norm += exact[i] * exact[i];
		}
		error = norm > 0 ? sqrt(error / norm) : sqrt(error);
		program->worst = error > program->worst ? error : program->worst;
		CHECK(program, error <= program->bound);
		if (lse && isinf(exact_lse))
			CHECK(program, isinf(lse[h]) && lse[h] < 0);
		else if (lse)
			CHECK(program,
				fabs((double)lse[h] - exact_lse) <= program->bound * (1 + fabs(exact_lse)));
	}
}

#endif
