/*
 * One decode step (APPEND_DECODE of one token per sequence) against a bare echo of the same number of bytes
 * in and out through the same loop and request slots. Rounds of both alternate, so that a machine that
 * changes its pace in the middle changes it for both. Before each step the sequences are cut back by one
 * token, outside of the measured time, so that every step sees the same context.
 */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/clock.h"
#include "core/memory.h"
#include "server/ctl/bench_rig.h"
#include "server/ctl/table.h"

enum {
	ARG_SEQUENCES,
	ARG_CONTEXT,
	ARG_Q_HEADS,
	ARG_KV_HEADS,
	ARG_HEAD_DIM,
	ARG_K,
	ARG_V,
	ARG_BLOCK_SIZE,
	ARG_IN_DTYPE,
	ARG_COUNT,
	ARG_ROUNDS,
	N_ARGS
};

#define SEQUENCES_MAX 256u /* one frame's items */
#define ROUNDS_MAX    101u
#define ALIGN_BYTES   64u
/* An echo's own structs take one unit in front of its payload, in both directions. */
#define ECHO_STRUCTS_BYTES ALIGN_BYTES
/* Steps before the first round that are not counted: caches and buffers get warm. */
#define WARM_UP_SHARE 10u

#define NUMBER_ARG(idx, text, what, def, lo, hi, about) \
	[idx] = { .name = (text),                       \
		.kind = SRV_ARG_NUMBER,                 \
		.placeholder = (what),                  \
		.number = (def),                        \
		.min = (lo),                            \
		.max = (hi),                            \
		.help = (about) }

static const struct srv_arg args[N_ARGS] = {
	NUMBER_ARG(ARG_SEQUENCES, "sequences", "N", 1, 1, SEQUENCES_MAX, "sequences per step"),
	NUMBER_ARG(ARG_CONTEXT, "context", "TOKENS", 64, 2, 1u << 20, "tokens that each step sees"),
	NUMBER_ARG(ARG_Q_HEADS, "q-heads", "N", 9, 1, 1024, "query heads"),
	NUMBER_ARG(ARG_KV_HEADS, "kv-heads", "N", 3, 1, 1024, "KV heads"),
	NUMBER_ARG(ARG_HEAD_DIM, "head-dim", "N", 64, 1, 256, "channels of K and V"),
	SRV_ARG_FORMAT(ARG_K, "k", "K"),
	SRV_ARG_FORMAT(ARG_V, "v", "V"),
	NUMBER_ARG(ARG_BLOCK_SIZE, "block-size", "TOKENS", 16, 1, 65536, "tokens per block"),
	[ARG_IN_DTYPE] = { .name = "in-dtype",
		.kind = SRV_ARG_TEXT,
		.placeholder = "DTYPE",
		.text = "bf16",
		.help = "send rows as bf16 or f32" },
	[ARG_COUNT] = { .name = "count",
		.letter = 'n',
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 2000,
		.min = 10,
		.max = 1000000,
		.help = "steps and echoes per round" },
	NUMBER_ARG(ARG_ROUNDS, "rounds", "N", 5, 1, ROUNDS_MAX, "rounds of each"),
};

/* Percentiles of one round. */
struct round {
	uint64_t p50_ns, p99_ns;
};

struct bench {
	struct srv_bench_rig rig;
	uint32_t n_sequences, context, n, n_rounds;
	enum kv_dtype in_dtype;
	uint64_t k_bytes, v_bytes, q_bytes; /* of one token of one sequence */
	uint64_t echo_in_bytes, echo_out_bytes;
	uint8_t *rows; /* random: K, V, Q of one step; also what the echo sends */
	uint8_t *reply;
	struct tqkv_item items[SEQUENCES_MAX];
	struct srv_percentile samples;
	struct round echo[ROUNDS_MAX], step[ROUNDS_MAX];
	/* Parts of all steps, summed: the client's way to the first poll, then the daemon's own timings. */
	uint64_t n_steps, submit_ns, took_ns;
	struct tqkv_timings daemon;
};

static uint64_t argument(const struct bench *bench, uint32_t idx)
{
	return bench->rig.ctl->values[idx].number;
}

static json_t *describe_pool(const struct bench *bench)
{
	const uint32_t block_size = (uint32_t)argument(bench, ARG_BLOCK_SIZE);
	const uint64_t n_blocks = (uint64_t)kv_div_up_u32(bench->context, block_size) * bench->n_sequences;

	return json_pack("{s:i, s:I, s:I, s:I, s:s, s:s, s:I, s:I}", "layers", 1, "q_heads",
		(json_int_t)argument(bench, ARG_Q_HEADS), "kv_heads",
		(json_int_t)argument(bench, ARG_KV_HEADS), "head_dim",
		(json_int_t)argument(bench, ARG_HEAD_DIM), "k", bench->rig.ctl->values[ARG_K].text, "v",
		bench->rig.ctl->values[ARG_V].text, "block_size", (json_int_t)block_size, "blocks",
		(json_int_t)n_blocks);
}

static enum kv_status prepare(struct bench *bench, struct kv_error *err)
{
	const struct srv_ctl *ctl = bench->rig.ctl;
	const char *dtype = ctl->values[ARG_IN_DTYPE].text;

	bench->n_sequences = (uint32_t)argument(bench, ARG_SEQUENCES);
	bench->context = (uint32_t)argument(bench, ARG_CONTEXT);
	bench->n = (uint32_t)argument(bench, ARG_COUNT);
	bench->n_rounds = (uint32_t)argument(bench, ARG_ROUNDS);
	if (strcmp(dtype, "bf16") != 0 && strcmp(dtype, "f32") != 0)
		return kv_fail(err, SRV_CTL_USAGE, "--in-dtype: '%.40s' is not bf16 or f32", dtype);
	bench->in_dtype = strcmp(dtype, "bf16") == 0 ? KV_DTYPE_BF16 : KV_DTYPE_F32;
	return srv_bench_prepare(&bench->rig, ctl, describe_pool(bench), err);
}

/* Sizes of the frames of one step, and of an echo that is as large in both directions. */
static enum kv_status size_frames(void *user, struct kv_error *err)
{
	struct bench *bench = user;
	const uint64_t value_bytes = kv_dtype_bytes(bench->in_dtype);
	const uint64_t kv_values = argument(bench, ARG_KV_HEADS) * argument(bench, ARG_HEAD_DIM);
	const uint64_t q_values = argument(bench, ARG_Q_HEADS) * argument(bench, ARG_HEAD_DIM);
	const uint64_t structs_bytes = kv_round_up_u64(64 + 32 * (uint64_t)bench->n_sequences, ALIGN_BYTES);
	const uint64_t frame_bytes_max = tqkv_server_info(bench->rig.conn)->frame_bytes_max;
	uint64_t in_bytes, out_bytes, rows_bytes;

	bench->k_bytes = bench->v_bytes = kv_values * value_bytes;
	bench->q_bytes = q_values * value_bytes;
	/* Segments begin at multiples of the unit; the last one ends with its bytes. */
	in_bytes = structs_bytes + 2 * kv_round_up_u64(bench->k_bytes * bench->n_sequences, ALIGN_BYTES) +
		bench->q_bytes * bench->n_sequences;
	out_bytes = structs_bytes + q_values * sizeof(float) * bench->n_sequences;
	if (in_bytes > frame_bytes_max || out_bytes > frame_bytes_max)
		return kv_fail(err, SRV_CTL_USAGE,
			"a step takes %llu bytes in and %llu out, a frame holds %llu",
			(unsigned long long)in_bytes, (unsigned long long)out_bytes,
			(unsigned long long)frame_bytes_max);
	bench->echo_in_bytes = in_bytes - ECHO_STRUCTS_BYTES;
	bench->echo_out_bytes = out_bytes - ECHO_STRUCTS_BYTES;
	/* The context's rows are appended from the same memory, token by token. */
	rows_bytes = kv_round_up_u64(in_bytes, ALIGN_BYTES);
	bench->rows = kv_alloc((size_t)rows_bytes, 1);
	bench->reply = kv_alloc((size_t)out_bytes, 1);
	if (!bench->rows || !bench->reply)
		return kv_fail(err, KV_NO_MEMORY, "no memory for rows");
	srv_bench_fill_rows(bench->in_dtype, bench->rows, rows_bytes);
	return srv_percentile_init(&bench->samples, bench->n, err);
}

static enum kv_status fail_items(
	const char *what, const struct tqkv_item_result *items, uint32_t n_items, struct kv_error *err)
{
	for (uint32_t i = 0; i < n_items; i++)
		if (items[i].status != TQKV_OK)
			return kv_fail(err, (enum kv_status)items[i].status, "%s, sequence %llu: %s: %s",
				what, (unsigned long long)items[i].sequence,
				tqkv_status_name((unsigned)items[i].status),
				tqkv_status_text((unsigned)items[i].status));
	return kv_fail(err, KV_CORRUPT, "%s: the reply counts a failed item and shows none", what);
}

/* Sets every item up; positions and lengths are the caller's. */
static void set_items(struct bench *bench, uint32_t position, uint32_t n_tokens, uint32_t q_len)
{
	for (uint32_t i = 0; i < bench->n_sequences; i++)
		bench->items[i] = (struct tqkv_item){
			.sequence = i + 1,
			.position = position,
			.n_tokens = n_tokens,
			.q_len = q_len,
			.flags = position == 0 && n_tokens > 0 ? TQKV_CREATE : 0,
		};
}

static struct tqkv_rows step_rows(const struct bench *bench)
{
	struct tqkv_rows rows = {
		.items = bench->items,
		.n_items = bench->n_sequences,
		.n_layers = 1,
		.k_dtype = (uint8_t)bench->in_dtype,
		.v_dtype = (uint8_t)bench->in_dtype,
		.k_bytes = bench->k_bytes * bench->n_sequences,
		.v_bytes = bench->v_bytes * bench->n_sequences,
	};

	rows.k = bench->rows;
	rows.v = bench->rows + rows.k_bytes;
	return rows;
}

/* One token less than the context, in every sequence. */
static enum kv_status fill_context(struct bench *bench, struct kv_error *err)
{
	struct tqkv_item_result items[SEQUENCES_MAX];
	struct tqkv_error failure;

	for (uint32_t t = 0; t + 1 < bench->context; t++) {
		struct tqkv_rows_result result = { .items = items };
		struct tqkv_rows rows;

		if (srv_interrupt_seen())
			return kv_fail(err, KV_CANCELLED, "interrupted");
		set_items(bench, t, 1, 0);
		rows = step_rows(bench);
		if (tqkv_append(bench->rig.session, &rows, bench->rig.ctl->timeout_ms, &result, &failure) !=
			TQKV_OK)
			return srv_client_fail(err, &failure, "append, position %u", t);
		if (result.n_failed > 0)
			return fail_items("append", items, bench->n_sequences, err);
	}
	return KV_OK;
}

static void add_timings(struct tqkv_timings *sum, const struct tqkv_timings *step)
{
	sum->recv_us += step->recv_us;
	sum->queue_us += step->queue_us;
	sum->copy_in_us += step->copy_in_us;
	sum->kernel_us += step->kernel_us;
	sum->copy_out_us += step->copy_out_us;
	sum->total_us += step->total_us;
}

static enum kv_status one_step(struct bench *bench, uint64_t *took_ns, struct kv_error *err)
{
	struct tqkv_error failure;
	struct tqkv_reply reply;
	struct tqkv_rows rows;
	uint64_t request_id, start_ns, submitted_ns;

	set_items(bench, bench->context - 1, 1, 1);
	rows = step_rows(bench);
	rows.q = bench->rows + rows.k_bytes + rows.v_bytes;
	rows.q_bytes = bench->q_bytes * bench->n_sequences;
	rows.q_dtype = (uint8_t)bench->in_dtype;
	rows.out_dtype = TQKV_F32;
	start_ns = kv_clock_now_ns(kv_clock_system());
	if (tqkv_submit_append_decode(
		    bench->rig.session, &rows, bench->rig.ctl->timeout_ms, &request_id, &failure) != TQKV_OK)
		return srv_client_fail(err, &failure, "append and decode");
	submitted_ns = kv_clock_now_ns(kv_clock_system());
	if (tqkv_wait(bench->rig.conn, request_id, bench->rig.ctl->timeout_ms, &reply, &failure) != TQKV_OK)
		return srv_client_fail(err, &failure, "append and decode");
	*took_ns = kv_clock_now_ns(kv_clock_system()) - start_ns;
	if (reply.n_failed > 0)
		return fail_items("append and decode", reply.items, reply.n_items, err);
	bench->n_steps++;
	bench->submit_ns += submitted_ns - start_ns;
	bench->took_ns += *took_ns;
	add_timings(&bench->daemon, &reply.timings);
	return KV_OK;
}

static enum kv_status cut_back(struct bench *bench, struct kv_error *err)
{
	struct tqkv_item_result items[SEQUENCES_MAX];
	struct tqkv_rows_result result = { .items = items };
	struct tqkv_error failure;

	set_items(bench, bench->context - 1, 0, 0);
	if (tqkv_truncate(bench->rig.session, bench->items, bench->n_sequences, bench->rig.ctl->timeout_ms,
		    &result, &failure) != TQKV_OK)
		return srv_client_fail(err, &failure, "truncate");
	return result.n_failed > 0 ? fail_items("truncate", items, bench->n_sequences, err) : KV_OK;
}

static enum kv_status run_steps(struct bench *bench, uint32_t n, struct kv_error *err)
{
	enum kv_status status = KV_OK;

	srv_percentile_clear(&bench->samples);
	for (uint32_t i = 0; status == KV_OK && i < n; i++) {
		uint64_t took_ns = 0;

		status = srv_interrupt_seen() ? kv_fail(err, KV_CANCELLED, "interrupted")
					      : one_step(bench, &took_ns, err);
		if (status == KV_OK)
			status = cut_back(bench, err);
		srv_percentile_add(&bench->samples, took_ns);
	}
	return status;
}

static enum kv_status run_echoes(struct bench *bench, uint32_t n, struct kv_error *err)
{
	srv_percentile_clear(&bench->samples);
	return srv_bench_echo(&bench->rig, bench->rows, bench->echo_in_bytes, bench->reply,
		bench->echo_out_bytes, n, &bench->samples, err);
}

static struct round take_round(struct bench *bench)
{
	return (struct round){ .p50_ns = srv_percentile_get(&bench->samples, 50),
		.p99_ns = srv_percentile_get(&bench->samples, 99) };
}

static enum kv_status measure(void *user, struct kv_error *err)
{
	struct bench *bench = user;
	enum kv_status status = fill_context(bench, err);

	if (status == KV_OK)
		status = run_echoes(bench, bench->n / WARM_UP_SHARE, err);
	if (status == KV_OK)
		status = run_steps(bench, bench->n / WARM_UP_SHARE, err);
	for (uint32_t i = 0; status == KV_OK && i < bench->n_rounds; i++) {
		status = run_echoes(bench, bench->n, err);
		bench->echo[i] = take_round(bench);
		if (status == KV_OK)
			status = run_steps(bench, bench->n, err);
		bench->step[i] = take_round(bench);
	}
	return status;
}

/* Medians over the rounds. */
struct summary {
	double echo_p50_ns, step_p50_ns, echo_p99_ns, step_p99_ns, ratio;
};

/* Means over all steps. */
struct parts {
	double step_us, submit_us;
	double daemon_us, recv_us, queue_us, copy_us, kernel_us;
	double else_us; /* planning, submitting, noticing the end, writing the reply */
};

static struct parts parts_of(const struct bench *bench)
{
	const double n = bench->n_steps == 0 ? 1.0 : (double)bench->n_steps;
	const struct tqkv_timings *sum = &bench->daemon;
	const uint64_t known_us =
		sum->recv_us + sum->queue_us + sum->copy_in_us + sum->kernel_us + sum->copy_out_us;

	return (struct parts){
		.step_us = (double)bench->took_ns / n / 1e3,
		.submit_us = (double)bench->submit_ns / n / 1e3,
		.daemon_us = (double)sum->total_us / n,
		.recv_us = (double)sum->recv_us / n,
		.queue_us = (double)sum->queue_us / n,
		.copy_us = (double)(sum->copy_in_us + sum->copy_out_us) / n,
		.kernel_us = (double)sum->kernel_us / n,
		.else_us = ((double)sum->total_us - (double)known_us) / n,
	};
}

static struct summary summarise(const struct bench *bench)
{
	double values[5][ROUNDS_MAX];

	for (uint32_t i = 0; i < bench->n_rounds; i++) {
		values[0][i] = (double)bench->echo[i].p50_ns;
		values[1][i] = (double)bench->step[i].p50_ns;
		values[2][i] = (double)bench->echo[i].p99_ns;
		values[3][i] = (double)bench->step[i].p99_ns;
		values[4][i] = (double)bench->step[i].p50_ns / (double)bench->echo[i].p50_ns;
	}
	return (struct summary){
		.echo_p50_ns = srv_median(values[0], bench->n_rounds),
		.step_p50_ns = srv_median(values[1], bench->n_rounds),
		.echo_p99_ns = srv_median(values[2], bench->n_rounds),
		.step_p99_ns = srv_median(values[3], bench->n_rounds),
		.ratio = srv_median(values[4], bench->n_rounds),
	};
}

static void print_text(const struct bench *bench)
{
	static const char *const titles[] = { "<round", "echo p50", "echo p99", "step p50", "step p99",
		"ratio of p50" };
	const struct summary summary = summarise(bench);
	struct srv_table table;
	char text[SRV_HUMAN_BYTES];

	printf("step: APPEND_DECODE, %u sequence%s of %u tokens, %llu query heads, %llu KV heads, head_dim "
	       "%llu, K %s, V %s, "
	       "rows in %s\n",
		bench->n_sequences, bench->n_sequences == 1 ? "" : "s", bench->context,
		(unsigned long long)argument(bench, ARG_Q_HEADS),
		(unsigned long long)argument(bench, ARG_KV_HEADS),
		(unsigned long long)argument(bench, ARG_HEAD_DIM), bench->rig.ctl->values[ARG_K].text,
		bench->rig.ctl->values[ARG_V].text, kv_dtype_name(bench->in_dtype));
	printf("echo: as many bytes, %llu in and %llu out; %u of each per round\n\n",
		(unsigned long long)(bench->echo_in_bytes + ECHO_STRUCTS_BYTES),
		(unsigned long long)(bench->echo_out_bytes + ECHO_STRUCTS_BYTES), bench->n);
	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t i = 0; i < bench->n_rounds; i++) {
		srv_table_cell(&table, "%u", i + 1);
		srv_table_cell(&table, "%s", srv_human_ns(bench->echo[i].p50_ns, text));
		srv_table_cell(&table, "%s", srv_human_ns(bench->echo[i].p99_ns, text));
		srv_table_cell(&table, "%s", srv_human_ns(bench->step[i].p50_ns, text));
		srv_table_cell(&table, "%s", srv_human_ns(bench->step[i].p99_ns, text));
		srv_table_cell(&table, "%.2f", (double)bench->step[i].p50_ns / (double)bench->echo[i].p50_ns);
	}
	srv_table_cell(&table, "median");
	srv_table_cell(&table, "%s", srv_human_ns((uint64_t)summary.echo_p50_ns, text));
	srv_table_cell(&table, "%s", srv_human_ns((uint64_t)summary.echo_p99_ns, text));
	srv_table_cell(&table, "%s", srv_human_ns((uint64_t)summary.step_p50_ns, text));
	srv_table_cell(&table, "%s", srv_human_ns((uint64_t)summary.step_p99_ns, text));
	srv_table_cell(&table, "%.2f", summary.ratio);
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
	const struct parts parts = parts_of(bench);

	printf("a step, mean: %.1f us; in the daemon %.1f us: receiving %.1f, waiting %.1f, copies %.1f, "
	       "kernels "
	       "%.1f, else %.1f;\noutside %.1f us, of it %.1f before the client waits\n",
		parts.step_us, parts.daemon_us, parts.recv_us, parts.queue_us, parts.copy_us, parts.kernel_us,
		parts.else_us, parts.step_us - parts.daemon_us, parts.submit_us);
}

static json_t *round_json(const struct round *round)
{
	return json_pack(
		"{s:I, s:I}", "p50_ns", (json_int_t)round->p50_ns, "p99_ns", (json_int_t)round->p99_ns);
}

static void print_json(const struct bench *bench)
{
	const struct summary summary = summarise(bench);
	const struct parts parts = parts_of(bench);
	json_t *rounds = json_array(), *json;

	for (uint32_t i = 0; i < bench->n_rounds; i++)
		json_array_append_new(rounds,
			json_pack("{s:o, s:o}", "echo", round_json(&bench->echo[i]), "step",
				round_json(&bench->step[i])));
	json = json_pack("{s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:s, s:I, s:I, s:I, s:o, s:f, s:f, s:f, s:f, "
			 "s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}",
		"sequences", (json_int_t)bench->n_sequences, "context", (json_int_t)bench->context, "q_heads",
		(json_int_t)argument(bench, ARG_Q_HEADS), "kv_heads",
		(json_int_t)argument(bench, ARG_KV_HEADS), "head_dim",
		(json_int_t)argument(bench, ARG_HEAD_DIM), "k", bench->rig.ctl->values[ARG_K].text, "v",
		bench->rig.ctl->values[ARG_V].text, "in_dtype", kv_dtype_name(bench->in_dtype),
		"body_in_bytes", (json_int_t)(bench->echo_in_bytes + ECHO_STRUCTS_BYTES), "body_out_bytes",
		(json_int_t)(bench->echo_out_bytes + ECHO_STRUCTS_BYTES), "n", (json_int_t)bench->n, "rounds",
		rounds, "echo_p50_ns", summary.echo_p50_ns, "step_p50_ns", summary.step_p50_ns, "echo_p99_ns",
		summary.echo_p99_ns, "step_p99_ns", summary.step_p99_ns, "ratio_p50", summary.ratio,
		"server_mean_us", parts.daemon_us, "queue_mean_us", parts.queue_us, "kernel_mean_us",
		parts.kernel_us, "recv_mean_us", parts.recv_us, "copy_mean_us", parts.copy_us, "else_mean_us",
		parts.else_us, "step_mean_us", parts.step_us, "submit_mean_us", parts.submit_us);
	srv_ctl_print_json(json);
	json_decref(json);
}

static enum kv_status run_bench_step(struct srv_ctl *ctl, struct kv_error *err)
{
	struct bench *bench = kv_alloc(1, sizeof(*bench));
	enum kv_status status;

	if (!bench)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a measurement");
	bench->rig.ctl = ctl;
	srv_interrupt_catch();
	status = prepare(bench, err);
	if (status == KV_OK)
		status = srv_bench_run(&bench->rig, TQKV_OPTION_TIMINGS, size_frames, measure, bench, err);
	if (status == KV_OK && ctl->is_json)
		print_json(bench);
	else if (status == KV_OK)
		print_text(bench);
	srv_percentile_finish(&bench->samples);
	srv_temp_pool_finish(&bench->rig.pool);
	kv_free(bench->rows);
	kv_free(bench->reply);
	kv_free(bench);
	return status;
}

const struct srv_command srv_cmd_bench_step = {
	.name = "bench step",
	.summary = "round trips of a decode step, beside an echo of the same bytes",
	.details = "Makes a pool of one layer, fills the sequences with random rows, and measures rounds of "
		   "echoes and of steps\n"
		   "in turn. Prints each round's percentiles and the medians. Deletes the pool.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_bench_step,
};
