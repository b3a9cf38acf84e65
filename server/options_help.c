/* --help and --version: written to be read by people, made from the table so that it cannot drift. */
#include <ctype.h>
#include <jansson.h>
#include <microhttpd.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "server/control.h"
#include "server/options_internal.h"

#define IDX(name) SRV_OPTION_IDX_##name
#define GROUP_MAX 12u

/* The build says with which CUDA Toolkit the backend was built, if it was. */
#ifdef SRV_CUDA_VERSION
#define CUDA_TEXT SRV_CUDA_VERSION
#else
#define CUDA_TEXT "not built in"
#endif

/* Every option stands in exactly one group (a test counts). */
static const struct {
	const char *title;
	size_t n;
	enum srv_option_idx members[GROUP_MAX];
} groups[] = {
	{ "Addresses", 4, { IDX(http), IDX(http_name), IDX(metrics_listen), IDX(socket_mode) } },
	{ "Who may connect", 6,
		{ IDX(tokens_file), IDX(unix_uids), IDX(http_certificate_file), IDX(http_key_file),
			IDX(http_client_ca_file), IDX(insecure) } },
	{ "Backend and memory", 5, { IDX(backend), IDX(memory), IDX(threads), IDX(io), IDX(busy_poll_us) } },
	{ "Limits", 8,
		{ IDX(frame_bytes_max), IDX(connections_max), IDX(sessions_max), IDX(sequences_max),
			IDX(inflight_requests_max), IDX(inflight_bytes_max), IDX(evict_high_percent),
			IDX(evict_low_percent) } },
	{ "Buffers, all taken at start", 4,
		{ IDX(large_slots), IDX(small_slots), IDX(read_ahead_buffers), IDX(reply_buffers) } },
	{ "Time", 9,
		{ IDX(lease_ms), IDX(alloc_timeout_ms), IDX(hello_timeout_ms), IDX(io_timeout_ms),
			IDX(send_timeout_ms), IDX(min_rate_bytes_per_s), IDX(drain_timeout_ms),
			IDX(self_test_interval_ms), IDX(audit_interval_ms) } },
	{ "Tiers", 5,
		{ IDX(host_tier_bytes), IDX(file_tier_dir), IDX(file_tier_bytes), IDX(spill_idle_ms),
			IDX(spill_above_percent) } },
	{ "Snapshots", 4,
		{ IDX(snapshot_dir), IDX(restore), IDX(snapshot_on_drain), IDX(restored_lease_ms) } },
	{ "Messages", 1, { IDX(log_level) } },
};

static bool has_suffix(const char *text, const char *suffix)
{
	const size_t n_bytes = strlen(text), n_suffix = strlen(suffix);

	return n_bytes >= n_suffix && strcmp(text + n_bytes - n_suffix, suffix) == 0;
}

static const char *text_word(const struct srv_option_row *row)
{
	if (row == &srv_option_rows[IDX(http)] || row == &srv_option_rows[IDX(metrics_listen)])
		return "HOST:PORT";
	if (has_suffix(row->name, "_name"))
		return "NAME";
	if (has_suffix(row->name, "_uids"))
		return "NUMBERS";
	if (has_suffix(row->name, "_dir"))
		return "FOLDER";
	if (row == &srv_option_rows[IDX(restore)])
		return "NAME";
	return has_suffix(row->name, "_file") ? "FILE" : "SIZE";
}

static const char *value_word(const struct srv_option_row *row)
{
	if (row->kind == SRV_OPTION_BYTES)
		return has_suffix(row->name, "_per_s") ? "BYTES PER SECOND" : "BYTES";
	if (has_suffix(row->name, "_ms"))
		return "MILLISECONDS";
	if (has_suffix(row->name, "_us"))
		return "MICROSECONDS";
	if (row->kind == SRV_OPTION_TEXT)
		return text_word(row);
	return "NUMBER";
}

/* The table's help as a sentence. */
static void print_sentence(const char *help)
{
	printf("      %c%s.\n", toupper((unsigned char)help[0]), help + 1);
}

/* "  --io-timeout-ms MILLISECONDS", and below it help, default and range as sentences. */
static void print_option(const struct srv_option_row *row)
{
	char flag[SRV_OPTION_NAME_BYTES_MAX], def[32], min[32], max[32];

	srv_option_flag_name(row, flag);
	if (row->kind == SRV_OPTION_FLAG) {
		printf("  --%s\n", flag);
		print_sentence(row->help);
		return;
	}
	if (row->kind == SRV_OPTION_ENUM)
		printf("  --%s %s\n", flag, row->values);
	else
		printf("  --%s %s\n", flag, value_word(row));
	print_sentence(row->help);
	switch (row->kind) {
	case SRV_OPTION_NUMBER:
		printf("      Default %llu; from %llu to %llu.\n", (unsigned long long)row->default_number,
			(unsigned long long)row->min, (unsigned long long)row->max);
		break;
	case SRV_OPTION_BYTES:
		srv_option_bytes_text(row->default_number, def);
		srv_option_bytes_text(row->min, min);
		srv_option_bytes_text(row->max, max);
		printf("      Default %s; from %s to %s.\n", def, min, max);
		break;
	case SRV_OPTION_TEXT:
	case SRV_OPTION_ENUM:
	case SRV_OPTION_FLAG:
		printf("      Default %s.\n", row->default_text);
		break;
	}
}

void srv_options_print_help(void)
{
	fputs("tqkvd keeps compressed K/V caches of token sequences and answers decode queries over them.\n"
	      "\n"
	      "Usage: tqkvd [--config FILE] [--listen ADDRESS]... [--pool MEMBERS]... [options]\n"
	      "\n"
	      "What to read and where to listen\n"
	      "  --config FILE\n"
	      "      Configuration file, one JSON object. Its members are the options below with '_' for "
	      "'-',\n"
	      "      plus \"listen\" (array of addresses), \"pools\" (array of pool objects) and \"tenants\" "
	      "(array of\n"
	      "      {\"tenant\": \"7\", \"bytes\": \"1GiB\", \"tokens\": N, \"sessions\": N, \"requests\": "
	      "N,\n"
	      "      \"tier_bytes\": \"1GiB\", \"weight\": N}; \"tcp\" and\n"
	      "      \"_default\" are names, too; what is left out is not limited).\n"
	      "  --check-config\n"
	      "      Read and check everything, pools included, start nothing. Exit code 0 or 2.\n"
	      "  --listen unix:PATH or tcp:HOST:PORT\n"
	      "      Address for clients; may be given up to 8 times. Port 0 picks a free port.\n"
	      "      Default unix:/run/tqkv/tqkvd.sock and tcp:127.0.0.1:7870.\n"
	      "  --pool "
	      "name=NAME,layers=N,q_heads=N,kv_heads=N,head_dim=N,k=FORMAT,v=FORMAT,block_size=N,blocks=N\n"
	      "      A pool to make at start; may be given many times.\n"
	      "  --version\n"
	      "      Version, commit, CUDA and libraries.\n"
	      "  -h, --help\n"
	      "      This text.\n",
		stdout);
	for (size_t i = 0; i < KV_LENGTH(groups); i++) {
		printf("\n%s\n", groups[i].title);
		for (size_t k = 0; k < groups[i].n; k++)
			print_option(&srv_option_rows[groups[i].members[k]]);
	}
	fputs("\n"
	      "BYTES may end in KiB, MiB, GiB or TiB: --frame-bytes-max 2MiB. --name=value works, too.\n"
	      "A flag wins over the environment, the environment over the file, the file over the default.\n"
	      "The environment name of an option is TQKV_ and the name in capitals: "
	      "TQKV_FRAME_BYTES_MAX=2MiB;\n"
	      "an empty variable counts as not set. --listen and --pool replace the lists of the file.\n"
	      "\n"
	      "Exit codes: 0 drained and stopped; 1 drained without its snapshot; 2 command line or "
	      "configuration refused;\n"
	      "3 a backend or listener could not start; 4 the device was lost.\n",
		stdout);
}

void srv_options_print_version(void)
{
	printf("tqkvd %s\ncommit %s\ncuda %s\nlibmicrohttpd %s\njansson %s\n", srv_version, srv_commit,
		CUDA_TEXT, MHD_get_version(), jansson_version_str());
}
