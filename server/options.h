/*
 * Options: one table drives the configuration file (JSON), flags, environment, --help and GET /v1/config.
 *
 * Order of precedence: flag, environment (TQKV_ + name in capitals), file, default. Flag names are the member
 * names with '-' for '_'. Repeatable options (listen, pools) replace the file's list when given as flags.
 * Immutable after parsing; any thread may read.
 */
#ifndef SERVER_OPTIONS_H
#define SERVER_OPTIONS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"
#include "core/io.h"
#include "core/pool_spec.h"

#define SRV_LISTEN_MAX 8u

/*
 * N(name, default, min, max, help): unsigned number. B: bytes, the text may end in KiB, MiB, GiB, TiB.
 * S(name, default, help): text. E(name, default, "a|b|c", help): one of. F(name, help): flag, default off.
 */
#define SRV_OPTION_MAP(N, B, S, E, F)                                                                       \
	S(http, "127.0.0.1:7871",                                                                           \
		"control API address HOST:PORT, port 0 picks a free one, 'off' disables it")                \
	S(http_name, "localhost",                                                                           \
		"name by which others reach the control API: accepted as Host beside the bound address")    \
	S(metrics_listen, "off",                                                                            \
		"second address HOST:PORT for /metrics, /livez and /readyz only, without login, or 'off'")  \
	S(http_certificate_file, "off",                                                                     \
		"PEM file with the control API's certificate, read again by a reload: HTTPS, or 'off'")     \
	S(http_key_file, "off", "PEM file with the key of that certificate, or 'off'")                      \
	S(http_client_ca_file, "off",                                                                       \
		"PEM file with who may sign client certificates: every client needs one, or 'off'")         \
	S(tokens_file, "off",                                                                               \
		"file of lines 'data|read|admin NAME TOKEN [tenant=NUMBER]', 'credential:NAME' or 'off'")   \
	S(unix_uids, "any", "user ids that may use the Unix sockets, with commas between, or 'any'")        \
	E(backend, "auto", "auto|cpu|cpu-scalar|cuda", "which backend serves; cpu-scalar is the exact one") \
	E(io, "auto", "auto|io_uring|epoll", "event loop")                                                  \
	E(log_level, "info", "error|warning|info|debug", "least severe level that is written")              \
	S(memory, "80%", "arena for pools: a size (2GiB) or a share of what is free (80%)")                 \
	N(threads, 0, 0, 1024, "worker threads of the CPU backend, 0 = one per core")                       \
	B(frame_bytes_max, 1048576, 65536, 16777216, "largest frame body in both directions")               \
	N(large_slots, 16, 1, 4096, "request slots of frame_bytes_max in and out")                          \
	N(small_slots, 64, 1, 4096, "request slots of 64 KiB in and out")                                   \
	N(read_ahead_buffers, 256, 4, 32768, "16 KiB receive buffers shared by all connections")            \
	N(reply_buffers, 128, 4, 65536,                                                                     \
		"32 KiB buffers for replies to control operations, shared by all connections")              \
	N(connections_max, 16384, 1, 1048576, "connections at a time")                                      \
	N(sessions_max, 4096, 1, 65535, "sessions at a time")                                               \
	N(sequences_max, 65536, 1, 16777216, "sequences over all pools")                                    \
	N(inflight_requests_max, 64, 1, 65536, "unanswered row requests per connection")                    \
	B(inflight_bytes_max, 33554432, 65536, 1073741824,                                                  \
		"bytes of unanswered row requests per connection")                                          \
	N(lease_ms, 30000, 100, 86400000, "how long a session outlives its last sign of life")              \
	N(restored_lease_ms, 600000, 0, 86400000,                                                           \
		"how long a restored session waits to be attached, 0 = what was left of its lease")         \
	N(alloc_timeout_ms, 0, 0, 3600000,                                                                  \
		"how long OPEN with a reservation waits for blocks, 0 = POOL_FULL at once")                 \
	N(evict_high_percent, 0, 0, 100,                                                                    \
		"with more of a pool in use, idle prefixes and evictable sequences go, 0 = on demand")      \
	N(evict_low_percent, 0, 0, 100, "until so much of the pool is in use, 0 = evict_high_percent")      \
	N(io_timeout_ms, 10000, 10, 3600000,                                                                \
		"a peer that stalls inside a frame for so long is disconnected")                            \
	N(send_timeout_ms, 10000, 10, 3600000,                                                              \
		"a peer that reads nothing of a reply for so long is disconnected")                         \
	N(hello_timeout_ms, 5000, 10, 3600000, "time for HELLO after connecting")                           \
	B(min_rate_bytes_per_s, 65536, 0, 1073741824,                                                       \
		"slowest rate of a peer's payload, and of its reading, 0 = any")                            \
	N(drain_timeout_ms, 10000, 0, 3600000, "after SIGTERM: how long sessions go on")                    \
	N(busy_poll_us, 0, 0, 1000000, "spin so long for events before sleeping")                           \
	N(self_test_interval_ms, 10000, 100, 3600000, "period of the known-answer decode behind /readyz")   \
	N(audit_interval_ms, 60000, 0, 86400000,                                                            \
		"period in which tables and blocks are counted again, 0 = only when asked")                 \
	S(snapshot_dir, "off", "directory for snapshots of sessions, 'off': none can be made")              \
	S(restore, "off", "snapshot to restore before listening; the start fails when that fails")          \
	B(host_tier_bytes, 0, 0, 17592186044416, "host memory for spilled sequences, 0 = none")             \
	S(file_tier_dir, "off", "directory of the file for spilled sequences, 'off': none")                 \
	B(file_tier_bytes, 1073741824, 65536, 17592186044416, "how large that file may become")             \
	N(spill_idle_ms, 0, 0, 4294967295,                                                                  \
		"sequences that idle so long are spilled while a pool is full, 0 = only when asked for")    \
	N(spill_above_percent, 90, 0, 100, "a pool of which so much is used counts as full for that")       \
	F(snapshot_on_drain,                                                                                \
		"write the snapshot 'drain' when draining; the next start restores and removes it")         \
	N(socket_mode, 432, 0, 511, "mode of Unix sockets: octal as 0o660, or a number (432)")              \
	F(insecure, "allow listeners beyond loopback although nothing authenticates those who connect")

struct srv_options {
#define N_FIELD(name, def, min, max, help) uint32_t name;
#define B_FIELD(name, def, min, max, help) uint64_t name;
#define S_FIELD(name, def, help)           char name[256];
#define E_FIELD(name, def, values, help)   uint32_t name; /* index into values */
#define F_FIELD(name, help)                bool name;
	SRV_OPTION_MAP(N_FIELD, B_FIELD, S_FIELD, E_FIELD, F_FIELD)
#undef N_FIELD
#undef B_FIELD
#undef S_FIELD
#undef E_FIELD
#undef F_FIELD
	struct kv_io_address listen[SRV_LISTEN_MAX];
	uint32_t n_listen;
	json_t *pools; /* array of pool JSON objects; owned */
	bool are_pools_from_flags;
	json_t *tenants; /* array, see tenants.h; owned */
	char config_path[4096];
	bool is_check_only; /* --check-config */
};

enum { SRV_BACKEND_AUTO, SRV_BACKEND_CPU, SRV_BACKEND_CPU_SCALAR, SRV_BACKEND_CUDA };
enum { SRV_IO_AUTO, SRV_IO_URING, SRV_IO_EPOLL };

/* Result of reading the command line. */
enum srv_options_outcome { SRV_OPTIONS_RUN, SRV_OPTIONS_EXIT_OK, SRV_OPTIONS_USAGE };

/* Defaults only, as if nothing was given (default listeners included). */
KV_MUST_CHECK enum kv_status srv_options_init(struct srv_options *options, struct kv_error *err);
/* --help and --version print to stdout (EXIT_OK); USAGE: err names the option, the value and what was
 * expected. */
KV_MUST_CHECK enum srv_options_outcome srv_options_parse(struct srv_options *options, int argc, char **argv,
	const struct kv_files *files, struct kv_error *err);
/* Merges a configuration text; BAD_CONFIG names line, column or member. */
KV_MUST_CHECK enum kv_status srv_options_merge_json(struct srv_options *options, const char *text,
	uint64_t n_bytes, const char *source, struct kv_error *err);
void srv_options_finish(struct srv_options *options);
/* Puts where pools[idx] was declared in front of an error: the file or the flag. */
void srv_options_wrap_pool(const struct srv_options *options, size_t idx, struct kv_error *err);
/*
 * Puts the variable in front of an error that begins with the name of a text option, when the option's value
 * is that of the environment: TQKV_HTTP is also where tqkvctl and Python look, and may have been set for
 * them.
 */
void srv_options_tell_environment(const struct srv_options *options, struct kv_error *err);
/* The configuration as GET /v1/config returns it (same schema as the file). json_decref() it. */
json_t *srv_options_to_json(const struct srv_options *options);
/* "2GiB" or "80%" of free_bytes, rounded down to 4096. */
KV_MUST_CHECK enum kv_status srv_options_memory_bytes(
	const struct srv_options *options, uint64_t free_bytes, uint64_t *n_bytes, struct kv_error *err);

#endif
