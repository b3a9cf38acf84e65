/*
 * Files in memory behind core/io.h: short reads and writes, random latency, a disk that is full, errors.
 * Names are whole paths; there is one directory, "dir", whose descriptor can be opened and synced.
 *
 * It asserts that an operation is touched by nobody until its event, and counts descriptors.
 */
#ifndef TESTS_SIM_FAKE_FILES_H
#define TESTS_SIM_FAKE_FILES_H

#include "core/io.h"
#include "tests/sim/sim.h"

#define SIM_FILES_MAX 16u

struct sim_files_options {
	uint64_t delay_ns_max;
	uint64_t disk_bytes_max;  /* over all files; 0: no bound */
	uint32_t short_per_mille; /* reads and writes that do less */
	uint32_t fail_per_mille;  /* -EIO */
	uint32_t flip_per_mille;  /* reads of which one bit is wrong */
};

struct sim_file {
	char path[256];
	uint8_t *bytes;
	uint64_t n_bytes, n_bytes_max;
	uint64_t n_bytes_synced; /* of what a crash leaves, at least */
	bool is_used, is_unlinked;
	uint32_t n_open;
};

struct sim_files {
	struct sim_files_options options;
	struct sim_clock *clock;
	struct sim_rng rng;
	struct sim_file files[SIM_FILES_MAX];
	struct {
		struct kv_io_file *file;
		uint64_t due_ns;
		uint32_t crc;
	} posted[KV_IO_FILES_MAX];
	uint32_t n_posted, n_open;
	int64_t fail_countdown; /* the operation after so many more fails with fail_errno, once; negative:
				   never */
	int fail_errno;
	bool has_failed;
	uint64_t n_full; /* writes that found the disk full */
};

void sim_files_init(struct sim_files *files, const struct sim_files_options *options, struct sim_clock *clock,
	uint64_t seed);
void sim_files_finish(struct sim_files *files);
void sim_files_post(struct sim_files *files, struct kv_io_file *file);
void sim_files_close(struct sim_files *files, int fd);
/* Operations that are over now; returns how many. */
uint32_t sim_files_collect(struct sim_files *files, struct kv_io_event events[], uint32_t n_max);
uint64_t sim_files_next_ns(const struct sim_files *files);
/* What was written since a file was synced is lost, from somewhere on. */
void sim_files_crash(struct sim_files *files);
/* By path; NULL: there is none. */
struct sim_file *sim_files_find(struct sim_files *files, const char *path);
/* Replaces or makes a file. */
void sim_files_put(struct sim_files *files, const char *path, const uint8_t *bytes, uint64_t n_bytes);

#endif
