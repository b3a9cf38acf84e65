/* What fits, and how fast it can be at best: POST /v1/plan by the names of models, or the same worked out
 * here. */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/capacity.h"
#include "server/control.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"
#include "server/http_views.h"
#include "server/models.h"

enum {
	ARG_MODEL,
	ARG_LIST,
	ARG_LAYERS,
	ARG_Q_HEADS,
	ARG_KV_HEADS,
	ARG_HEAD_DIM,
	ARG_K,
	ARG_V,
	ARG_PRESET,
	ARG_BLOCK_SIZE,
	ARG_EXACT_TOKENS,
	ARG_CONTEXT,
	ARG_SESSIONS,
	ARG_MEMORY,
	ARG_LINK,
	ARG_RATE,
	ARG_OFFLINE,
	N_ARGS
};

#define GEOMETRY(option, text)                                                                     \
	{                                                                                          \
		.name = option, .kind = SRV_ARG_NUMBER, .placeholder = "N", .min = 1, .max = 1024, \
		.help = text                                                                       \
	}

static const struct srv_arg args[N_ARGS] = {
	[ARG_MODEL] = { .name = "model",
		.kind = SRV_ARG_TEXT,
		.placeholder = "NAME",
		.help = "geometry of a model, see --list" },
	[ARG_LIST] = { .name = "list", .kind = SRV_ARG_FLAG, .help = "the models that are known by name" },
	[ARG_LAYERS] = GEOMETRY("layers", "of a model without a name here"),
	[ARG_Q_HEADS] = GEOMETRY("q-heads", "query heads"),
	[ARG_KV_HEADS] = GEOMETRY("kv-heads", "heads of K and V"),
	[ARG_HEAD_DIM] = GEOMETRY("head-dim", "numbers of a row"),
	[ARG_K] = { .name = "k",
		.kind = SRV_ARG_TEXT,
		.placeholder = "F",
		.text = "tq4",
		.help = "row format of keys" },
	[ARG_V] = { .name = "v",
		.kind = SRV_ARG_TEXT,
		.placeholder = "F",
		.text = "tq4",
		.help = "row format of values" },
	[ARG_PRESET] = { .name = "preset",
		.kind = SRV_ARG_TEXT,
		.placeholder = "NAME",
		.help = "both formats by one name" },
	[ARG_BLOCK_SIZE] = { .name = "block-size",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 16,
		.min = 16,
		.max = 64,
		.help = "tokens of a block: 16, 32 or 64" },
	[ARG_EXACT_TOKENS] = { .name = "exact-tokens",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.min = 1,
		.max = UINT32_MAX,
		.help = "exact window: so many of the newest tokens as bf16 as well, whole blocks [none]" },
	[ARG_CONTEXT] = { .name = "context",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "TOKENS",
		.number = 8192,
		.min = 1,
		.max = UINT32_MAX,
		.help = "of each session" },
	[ARG_SESSIONS] = { .name = "sessions",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 1,
		.min = 1,
		.max = 1000000,
		.help = "at a time" },
	[ARG_MEMORY] = { .name = "memory",
		.kind = SRV_ARG_BYTES,
		.placeholder = "BYTES",
		.min = 1,
		.max = 1ull << 50,
		.help = "for pages [the daemon's arena]" },
	[ARG_LINK] = { .name = "link-bytes-per-s",
		.kind = SRV_ARG_BYTES,
		.placeholder = "BYTES",
		.number = SRV_CAPACITY_LINK_BYTES_PER_S,
		.min = 1,
		.max = 1ull << 50,
		.help = "rate at which rows arrive" },
	[ARG_RATE] = { .name = "device-bytes-per-s",
		.kind = SRV_ARG_BYTES,
		.placeholder = "BYTES",
		.min = 1,
		.max = 1ull << 50,
		.help = "read bandwidth of the memory [what is known of the daemon's device]" },
	[ARG_OFFLINE] = { .name = "offline",
		.kind = SRV_ARG_FLAG,
		.help = "work it out here; needs --memory" },
};

static void list_models(const struct srv_ctl *ctl)
{
	static const char *const titles[] = { "<model", "layers", "query heads", "KV heads", "head dim" };
	struct srv_table table;

	if (ctl->is_json) {
		json_t *all = json_array();

		for (uint32_t i = 0; i < srv_models_length; i++) {
			const struct srv_model *model = &srv_models[i];

			(void)json_array_append_new(all,
				json_pack("{s:s, s:i, s:i, s:i, s:i}", "name", model->name, "layers",
					model->n_layers, "q_heads", model->q_heads, "kv_heads",
					model->kv_heads, "head_dim", model->head_dim));
		}
		srv_ctl_print_json(all);
		json_decref(all);
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t i = 0; i < srv_models_length; i++) {
		srv_table_cell(&table, "%s", srv_models[i].name);
		srv_table_cell(&table, "%u", srv_models[i].n_layers);
		srv_table_cell(&table, "%u", srv_models[i].q_heads);
		srv_table_cell(&table, "%u", srv_models[i].kv_heads);
		srv_table_cell(&table, "%u", srv_models[i].head_dim);
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

/* The pool of the plan: a model's geometry, in which given numbers replace its own. */
static enum kv_status make_pool(const struct srv_ctl *ctl, json_t **out, struct kv_error *err)
{
	static const char *const names[] = { "layers", "q_heads", "kv_heads", "head_dim" };
	const char *model_name = ctl->values[ARG_MODEL].text;
	const struct srv_model *model = model_name ? srv_model_find(model_name) : NULL;
	const uint32_t known[] = { model ? model->n_layers : 0, model ? model->q_heads : 0,
		model ? model->kv_heads : 0, model ? model->head_dim : 0 };

	if (model_name && !model)
		return kv_fail(err, SRV_CTL_USAGE,
			"--model %.40s: not known by that name; 'tqkvctl plan --list' has the names, or give "
			"--layers, "
			"--q-heads, --kv-heads and --head-dim",
			model_name);
	json_t *pool = json_object();
	int failed = pool ? 0 : -1;

	for (uint32_t i = 0; i < KV_LENGTH(names); i++) {
		const struct srv_arg_value *given = &ctl->values[ARG_LAYERS + i];

		if (!given->is_given && !model) {
			json_decref(pool);
			return kv_fail(err, SRV_CTL_USAGE,
				"--%s is missing: give it, or --model (see --list)",
				args[ARG_LAYERS + i].name);
		}
		failed |= json_object_set_new(
			pool, names[i], json_integer(given->is_given ? (json_int_t)given->number : known[i]));
	}
	failed |= json_object_set_new(
		pool, "block_size", json_integer((json_int_t)ctl->values[ARG_BLOCK_SIZE].number));
	if (ctl->values[ARG_EXACT_TOKENS].is_given)
		failed |= json_object_set_new(
			pool, "exact_tokens", json_integer((json_int_t)ctl->values[ARG_EXACT_TOKENS].number));
	if (ctl->values[ARG_PRESET].is_given) {
		failed |= json_object_set_new(pool, "preset", json_string(ctl->values[ARG_PRESET].text));
	} else {
		failed |= json_object_set_new(pool, "k", json_string(ctl->values[ARG_K].text));
		failed |= json_object_set_new(pool, "v", json_string(ctl->values[ARG_V].text));
	}
	if (failed) {
		json_decref(pool);
		return kv_fail(err, KV_NO_MEMORY, "no memory for a plan");
	}
	*out = pool;
	return KV_OK;
}

static enum kv_status make_ask(const struct srv_ctl *ctl, json_t **out, struct kv_error *err)
{
	static const struct {
		uint32_t arg;
		const char *member;
	} members[] = {
		{ ARG_CONTEXT, "context_tokens" },
		{ ARG_SESSIONS, "sessions" },
		{ ARG_MEMORY, "memory_bytes" },
		{ ARG_LINK, "link_bytes_per_s" },
		{ ARG_RATE, "device_bytes_per_s" },
	};
	json_t *pool = NULL, *ask = json_object();
	enum kv_status status =
		ask ? make_pool(ctl, &pool, err) : kv_fail(err, KV_NO_MEMORY, "no memory for a plan");
	int failed = 0;

	if (status == KV_OK)
		failed = json_object_set_new(ask, "pool", pool);
	for (size_t i = 0; status == KV_OK && i < KV_LENGTH(members); i++) {
		const struct srv_arg_value *value = &ctl->values[members[i].arg];

		if (value->number > 0)
			failed |= json_object_set_new(
				ask, members[i].member, json_integer((json_int_t)value->number));
	}
	if (failed)
		status = kv_fail(err, KV_NO_MEMORY, "no memory for a plan");
	if (status == KV_OK)
		*out = ask;
	else
		json_decref(ask);
	return status;
}

/* The same answer as the daemon's, by the same functions. */
static enum kv_status work_out_here(const json_t *ask, json_t **plan, struct kv_error *err)
{
	struct srv_control *control = kv_alloc(1, sizeof(*control));
	struct srv_capacity unused;
	struct srv_text text = { 0 };

	if (!control)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a plan");
	enum kv_status status = srv_capacity_read(ask, &control->plan, err);

	if (status == KV_OK)
		status = srv_capacity_work_out(&control->plan, 0, 0, &unused, err);
	if (status == KV_OK) {
		srv_view_plan(control, &text);
		*plan = text.is_failed ? NULL : json_loadb(text.bytes, text.n_bytes, 0, NULL);
		if (!*plan)
			status = kv_fail(err, KV_NO_MEMORY, "no memory for a plan");
		srv_text_finish(&text);
	}
	kv_free(control);
	return status;
}

/* The pool that holds what was asked, as --pool and 'tqkvctl pools create' take it. */
static void print_pool(const json_t *pool, uint64_t n_blocks)
{
	static const char *const members[] = { "layers", "q_heads", "kv_heads", "head_dim", "preset", "k",
		"v", "exact_tokens", "block_size" };

	printf("pool        name=NAME");
	for (size_t i = 0; i < KV_LENGTH(members); i++) {
		const json_t *member = json_object_get(pool, members[i]);

		if (json_is_string(member))
			printf(",%s=%s", members[i], json_string_value(member));
		else if (member)
			printf(",%s=%llu", members[i], (unsigned long long)json_integer_value(member));
	}
	printf(",blocks=%llu\n"
	       "            with scale, window, softcap, sinks and alibi as the model has them\n",
		(unsigned long long)n_blocks);
}

static void print_plan(const struct srv_ctl *ctl, const json_t *ask, const json_t *plan)
{
	char a[SRV_HUMAN_BYTES], b[SRV_HUMAN_BYTES], c[SRV_HUMAN_BYTES];
	const uint64_t n_sessions = srv_json_u64(plan, "asked.n_sessions");
	const uint64_t context_tokens = srv_json_u64(plan, "context_tokens");

	if (ctl->values[ARG_MODEL].text)
		printf("model       %s\n", ctl->values[ARG_MODEL].text);
	printf("formats     K %s, V %s: %llu bytes a token, bf16 takes %llu (%.2f times as much)\n",
		srv_json_text(plan, "k"), srv_json_text(plan, "v"),
		(unsigned long long)srv_json_u64(plan, "token_bytes"),
		(unsigned long long)srv_json_u64(plan, "token_dense_bytes"),
		srv_json_real(plan, "compression"));
	printf("block       %llu tokens, %s\n", (unsigned long long)srv_json_u64(plan, "block_size"),
		srv_human_bytes(srv_json_u64(plan, "block_bytes"), a));
	if (ctl->values[ARG_EXACT_TOKENS].is_given)
		printf("exact       the newest %llu tokens of a session, as bf16 beside their blocks\n",
			(unsigned long long)ctl->values[ARG_EXACT_TOKENS].number);
	printf("asked       %llu sessions of %llu tokens: %s each, %s in all\n",
		(unsigned long long)n_sessions, (unsigned long long)context_tokens,
		srv_human_bytes(srv_json_u64(plan, "context_bytes"), a),
		srv_human_bytes(srv_json_u64(plan, "asked.bytes"), b));
	printf("fits        %s: %llu sessions of that length into %s, or %llu tokens\n",
		json_is_true(json_object_get(json_object_get(plan, "asked"), "does_fit")) ? "yes" : "NO",
		(unsigned long long)srv_json_u64(plan, "fits.n_sessions"),
		srv_human_bytes(srv_json_u64(plan, "fits.memory_bytes"), a),
		(unsigned long long)srv_json_u64(plan, "fits.n_tokens"));
	if (srv_json_u64(plan, "decode.device_bytes_per_s") == 0)
		printf("decode      reads %s a step; give --device-bytes-per-s for the time\n",
			srv_human_bytes(srv_json_u64(plan, "decode.read_bytes"), a));
	else
		printf("decode      reads %s a step: at least %s at %s/s, at most %.0f tokens/s\n",
			srv_human_bytes(srv_json_u64(plan, "decode.read_bytes"), a),
			srv_human_ns(srv_json_u64(plan, "decode.floor_us") * 1000, b),
			srv_human_bytes(srv_json_u64(plan, "decode.device_bytes_per_s"), c),
			srv_json_real(plan, "decode.tokens_per_s"));
	printf("ingest      one context takes %s at %s/s, all of them",
		srv_human_ns(srv_json_u64(plan, "ingest.context_us") * 1000, a),
		srv_human_bytes(srv_json_u64(plan, "ingest.link_bytes_per_s"), b));
	printf(" %s\n", srv_human_ns(srv_json_u64(plan, "ingest.all_us") * 1000, a));
	print_pool(json_object_get(ask, "pool"), n_sessions * srv_json_u64(plan, "context_blocks"));
}

static enum kv_status run_plan(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *ask = NULL, *plan = NULL;

	if (ctl->values[ARG_LIST].is_given) {
		list_models(ctl);
		return KV_OK;
	}
	if (ctl->values[ARG_OFFLINE].is_given && !ctl->values[ARG_MEMORY].is_given)
		return kv_fail(err, SRV_CTL_USAGE,
			"--offline needs --memory: there is no daemon whose arena counts");
	if (ctl->values[ARG_PRESET].is_given && (ctl->values[ARG_K].is_given || ctl->values[ARG_V].is_given))
		return kv_fail(err, SRV_CTL_USAGE,
			"--preset stands for both formats: give it, or --k and --v, as for a pool");
	enum kv_status status = make_ask(ctl, &ask, err);

	if (status == KV_OK && ctl->values[ARG_OFFLINE].is_given)
		status = work_out_here(ask, &plan, err);
	else if (status == KV_OK)
		status = srv_ctl_api(ctl, "POST", "/v1/plan", ask, &plan, err);
	if (status == KV_OK && ctl->is_json)
		srv_ctl_print_json(plan);
	else if (status == KV_OK)
		print_plan(ctl, ask, plan);
	json_decref(plan);
	json_decref(ask);
	return status;
}

const struct srv_command srv_cmd_plan = {
	.name = "plan",
	.summary = "what fits into memory, and how fast decoding and ingest can be at best",
	.details = "Asks the daemon, so that its memory and its device count; --offline works it out here. "
		   "Times are bounds\n"
		   "from below: bytes over bandwidth, without arithmetic, launches and round trips. The last "
		   "lines are the\n"
		   "pool that holds what was asked, for tqkvd --pool and 'tqkvctl pools create'.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_plan,
};
