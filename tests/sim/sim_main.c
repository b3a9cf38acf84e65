/*
 * sim: seeded runs of the whole server. Without arguments: the seeds that failed once, then `--runs` others.
 * Every run is a process of its own kind of trouble: a child does many, and when one of them ends it, the
 * parent says which seed it was, how to repeat it, and goes on behind it.
 *
 * FAILURES L20: random OPEN, APPEND, FORK, TRUNCATE, CANCEL, CLOSE and vanishing clients, among the others,
 * against the model (model.h); the audit, by which owners are table entries and blocks in flight are those of
 * batches, holds after every turn in which something happened (sim_world_step()). Enough runs must have met
 * each of them.
 */
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/sim/run.h"
#include "tests/sim/seeds.h"

#define FAILED_MAX  20u
#define RUNS_ENOUGH 1000u /* after so many each operation must have been answered OK */
#define HANG_S      60u   /* a run takes milliseconds, under sanitizers at most seconds */

struct progress {
	uint64_t seed; /* of the run that is going on */
	struct sim_seen seen;
};

struct arguments {
	uint64_t seed, n_runs;
	uint32_t n_turns;
	bool is_verbose, has_seed, is_direct;
};

static int usage(const char *name)
{
	fprintf(stderr,
		"usage: %s [--seed N] [--runs N] [--turns N] [--verbose] [--direct]\n"
		"  --seed N   first seed (default 1; with --seed the list of old failures is left out)\n"
		"  --runs N   how many seeds (default 1000; 1 with --seed)\n"
		"  --turns N  turns of a run (default: drawn from the seed, 50 to 1200)\n"
		"  --verbose  print what the clients send and get\n"
		"  --direct   run in this process, for a debugger\n",
		name);
	return 2;
}

static bool parse(struct arguments *arguments, int argc, char **argv)
{
	static const struct option options[] = { { "seed", required_argument, NULL, 's' },
		{ "runs", required_argument, NULL, 'r' }, { "turns", required_argument, NULL, 't' },
		{ "verbose", no_argument, NULL, 'v' }, { "direct", no_argument, NULL, 'd' },
		{ NULL, 0, NULL, 0 } };
	bool has_runs = false;
	int c;

	*arguments = (struct arguments){ .seed = 1, .n_runs = 1000 };
	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case 's':
			arguments->seed = strtoull(optarg, NULL, 0);
			arguments->has_seed = true;
			break;
		case 'r':
			arguments->n_runs = strtoull(optarg, NULL, 0);
			has_runs = true;
			break;
		case 't':
			arguments->n_turns = (uint32_t)strtoul(optarg, NULL, 0);
			break;
		case 'v':
			arguments->is_verbose = true;
			break;
		case 'd':
			arguments->is_direct = true;
			break;
		default:
			return false;
		}
	}
	if (arguments->has_seed && !has_runs)
		arguments->n_runs = 1;
	return optind == argc;
}

static void run_seed(uint64_t seed, uint32_t n_turns, struct sim_seen *seen)
{
	struct sim_config config = sim_config_random(seed);
	struct sim_rng rng;

	sim_rng_init(&rng, seed, 10);
	config.n_turns = sim_between(&rng, 50, 1200);
	if (n_turns > 0)
		config.n_turns = n_turns;
	sim_run(&config, seen);
}

/* Runs seeds[first..n) in a child; returns the index of the one that failed, or n. */
static uint64_t run_some(const struct arguments *arguments, const uint64_t seeds[], uint64_t first,
	uint64_t n, struct progress *progress)
{
	volatile uint64_t *at = &progress->seed;
	int wait_status = 0;
	const pid_t pid = fork();

	if (pid == 0) {
		for (uint64_t i = first; i < n; i++) {
			*at = i;
			alarm(HANG_S);
			run_seed(seeds ? seeds[i] : arguments->seed + i, arguments->n_turns, &progress->seen);
		}
		exit(0); /* not _exit(): a leak checker looks at the end */
	}
	if (pid < 0 || waitpid(pid, &wait_status, 0) != pid) {
		perror("sim");
		exit(1);
	}
	return WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0 ? n : *at;
}

static uint32_t run_all(const struct arguments *arguments, const char *name, const uint64_t seeds[],
	uint64_t n, struct progress *progress)
{
	uint32_t n_failed = 0;

	for (uint64_t i = 0; i < n && n_failed < FAILED_MAX; i++) {
		i = run_some(arguments, seeds, i, n, progress);
		if (i == n)
			break;
		n_failed++;
		printf("FAILED: seed %" PRIu64 "; repeat it with: %s --direct --seed %" PRIu64,
			seeds ? seeds[i] : arguments->seed + i, name, seeds ? seeds[i] : arguments->seed + i);
		if (arguments->n_turns > 0)
			printf(" --turns %u", arguments->n_turns);
		printf("\n");
		fflush(stdout);
	}
	return n_failed;
}

static void print_seen(const struct sim_seen *seen)
{
	printf("%" PRIu64 " turns, %" PRIu64 " requests; items by status:", seen->n_turns, seen->n_requests);
	for (uint32_t i = 0; i < 1000; i++) {
		if (seen->n_statuses[i] > 0)
			printf(" %s %" PRIu64, kv_status_name(i), seen->n_statuses[i]);
	}
	printf("\n%" PRIu64 " devices lost, %" PRIu64 " drained, %" PRIu64 " sessions expired, %" PRIu64
	       " connections closed for slowness, %" PRIu64 " waits for slots\n",
		seen->n_lost, seen->n_drained, seen->n_expired, seen->n_closed_slow, seen->n_slot_waits);
	printf("%" PRIu64 " audits in pieces, %" PRIu64 " looks of OPEN for room\n", seen->n_audits,
		seen->n_open_waits);
	printf("%" PRIu64 " blocks published, %" PRIu64 " prefixes matched, %" PRIu64
	       " blocks evicted, %" PRIu64 " expired; %" PRIu64 " sequences evicted\n",
		seen->n_published, seen->n_hits, seen->n_nodes_evicted, seen->n_nodes_expired,
		seen->n_evicted);
	printf("%" PRIu64 " snapshots written, %" PRIu64 " restored, %" PRIu64 " found damaged, %" PRIu64
	       " writes to a full disk\n",
		seen->n_saved, seen->n_restored, seen->n_refused, seen->n_full);
	printf("in one turn at most: %u control requests, %u rows in one, %u blocks released, %u batches of "
	       "a "
	       "pool sealed, %u of a pool in flight\n",
		seen->maxima.n_controls, seen->maxima.n_rows, seen->maxima.n_released,
		seen->maxima.n_batches_begun, seen->maxima.n_in_flight);
}

/* False: the runs were too easy. */
static bool has_met_all(const struct sim_seen *seen)
{
	static const uint16_t opcodes[] = { KVP_OP_OPEN, KVP_OP_ATTACH, KVP_OP_CLOSE, KVP_OP_APPEND,
		KVP_OP_DECODE, KVP_OP_APPEND_DECODE, KVP_OP_READ, KVP_OP_TRUNCATE, KVP_OP_FREE, KVP_OP_FORK,
		KVP_OP_CANCEL, KVP_OP_PUBLISH, KVP_OP_MATCH, KVP_OP_PIN, KVP_OP_UNPIN, KVP_OP_SPILL,
		KVP_OP_PREFETCH, KVP_OP_UPDATE_SLOTS, KVP_OP_DECODE_TABLE };
	bool has_met = seen->n_resets > 0;

	printf("answered OK:");
	for (uint32_t i = 0; i < KV_LENGTH(opcodes); i++) {
		printf(" %s %" PRIu64, kvp_opcode_name(opcodes[i]), seen->n_done[opcodes[i]]);
		has_met = has_met && seen->n_done[opcodes[i]] > 0;
	}
	printf("; %" PRIu64 " clients vanished\n", seen->n_resets);
	return has_met;
}

int main(int argc, char **argv)
{
	static const uint64_t old_seeds[] = { SIM_OLD_SEEDS };
	struct arguments arguments;
	uint32_t n_failed = 0;

	if (!parse(&arguments, argc, argv))
		return usage(argv[0]);
	struct progress *progress =
		mmap(NULL, sizeof(*progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (progress == MAP_FAILED) {
		perror("sim");
		return 1;
	}
	sim_is_verbose = arguments.is_verbose;
	if (arguments.is_direct) {
		for (uint64_t i = 0; i < arguments.n_runs; i++)
			run_seed(arguments.seed + i, arguments.n_turns, &progress->seen);
	} else {
		if (!arguments.has_seed)
			n_failed = run_all(&arguments, argv[0], old_seeds, KV_LENGTH(old_seeds), progress);
		n_failed += run_all(&arguments, argv[0], NULL, arguments.n_runs, progress);
	}
	print_seen(&progress->seen);
	const bool is_enough = has_met_all(&progress->seen) || arguments.n_runs < RUNS_ENOUGH;

	if (!is_enough)
		printf("not every operation was met\n");
	printf("%" PRIu64 " runs from seed %" PRIu64 ", %u failed\n", arguments.n_runs, arguments.seed,
		n_failed);
	munmap(progress, sizeof(*progress));
	return n_failed == 0 && is_enough ? 0 : 1;
}
