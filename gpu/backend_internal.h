/* What the files of the CUDA backend share. Included by gpu/ only. */
#ifndef GPU_BACKEND_INTERNAL_H
#define GPU_BACKEND_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/backend.h"
#include "core/batch_run.h"
#include "gpu/kernels.h"
#include "gpu/pool_tables.h"

/* Batches on the device or waiting for it. Two per pool is what the loop asks for; beyond this: BUSY_RETRY.
 */
#define KVG_FLIGHTS_MAX 8u
/* Of one batch: op structs, query rows, flags. 24 bytes a row of slots that had to be rewritten fit as well.
 */
#define KVG_STAGING_BYTES (8u << 20)
/* Up to here the first kernel of a batch copies to the device, above it the copy engine does. */
#define KVG_KERNEL_COPY_BYTES (1u << 20)
/* Slots and block tables of one batch that are copied; above this the device reads them in host memory. */
#define KVG_MIRROR_BYTES (8u << 20)
/* Launches of one batch: classes of layers, each in waves that the workspace bounds. */
#define KVG_WAVES_MAX 64u
/* Prepared queries and partial results of one wave. */
#define KVG_QUERIES_BYTES  (64u << 20)
#define KVG_PARTIALS_BYTES (152u << 20)
#define KVG_SUMS_BYTES     (4u << 20)
#define KVG_SCALES_BYTES   (4u << 20)
#define KVG_OFFSETS_BYTES  (4u << 20)
#define KVG_WORKSPACE_BYTES \
	(KVG_QUERIES_BYTES + KVG_PARTIALS_BYTES + KVG_SUMS_BYTES + KVG_SCALES_BYTES + KVG_OFFSETS_BYTES)
#define KVG_JOBS_MAX 16u

struct kv_backend_pool {
	const struct kv_pool_spec *spec;
	struct kvg_image *image;
	struct kv_batch_pages pages;   /* spec only: for kv_batch_end() */
	uint64_t *seen[KV_GROUPS_MAX]; /* a bit per slot, all 0 between submits: finds duplicates */
};

/* What the device tells of one batch, in host memory; times by its own clock. */
struct kvg_report {
	uint64_t begin_ns, copied_ns, end_ns;
	uint32_t ticket; /* the last batch that is over */
	uint32_t reserved[9];
};

/* Everything of one submitted batch. */
struct kvg_flight {
	struct cuda_backend *cuda;
	struct kv_batch *batch;
	struct kvg_report *report;
	uint32_t ticket;  /* its number */
	bool is_wake_set; /* a callback waits for its end */
	uint8_t *staging; /* pinned; its mirror on the device */
	uint8_t *staging_device;
	uint8_t *mirror_device;
	uint64_t staging_used;
	/* Of the batch's own area: bytes [host, host + n) are at mirror_device. */
	const uint8_t *mirrored;
	uint64_t mirrored_bytes;
	const uint64_t *flags; /* [n_results], in staging */
	cudaEvent_t copied, computed;
	struct kvg_rows_params updates, transfers;
	struct kvg_copy_params copies;
	struct kvg_decode_params waves[KVG_WAVES_MAX];
	uint32_t n_waves;
};

struct cuda_backend {
	struct kv_backend base;
	int device;
	char device_name[80];
	uint32_t n_sms;
	int event_fd;
	/* Callbacks wait on a stream of their own: nothing waits for them. */
	cudaStream_t copy_stream, compute_stream, wake_stream;
	struct kvg_report *reports; /* [KVG_FLIGHTS_MAX], pinned */
	uint8_t *workspace;
	uint8_t *arena;
	uint64_t arena_bytes;
	/* A ring: [first, first + n). */
	struct kvg_flight flights[KVG_FLIGHTS_MAX];
	uint32_t flight_first;
	atomic_uint n_flights; /* changed by the loop's thread only */
	uint32_t ticket_last;
	atomic_bool is_lost;
	/* Jobs, and the watch over the device, on a thread of their own. */
	pthread_t thread;
	bool has_thread, has_lock;
	/* The thread looks at the device now and then; it begins with a batch, and ends when there was none
	 * for a while. */
	atomic_bool is_watching;
	pthread_mutex_t mutex; /* guards all below */
	pthread_cond_t work;
	bool is_ending;
	struct kv_job *jobs_waiting, **jobs_waiting_end;
	struct kv_job *jobs_finished, **jobs_finished_end;
	uint32_t n_jobs_waiting;
};

/* Fills the flight's params and staging from flight->batch; refused ops get their result here. */
void kvg_translate(struct cuda_backend *cuda, struct kvg_flight *flight);
/* The same for decodes: rows and waves. */
void kvg_translate_decodes(struct cuda_backend *cuda, struct kvg_flight *flight);
/* Room in the flight's staging, aligned to 16; NULL when it is full. */
void *kvg_stage(struct kvg_flight *flight, uint64_t n_bytes);
/* Device address of something in staging, or in the batch's area. */
const void *kvg_staged_address(const struct kvg_flight *flight, const void *host);
const void *kvg_area_address(const struct kvg_flight *flight, const void *host);
/* Marks an op as refused. */
void kvg_refuse(
	struct kvg_flight *flight, uint32_t result_idx, enum kv_status status, uint32_t layer, uint32_t row);

/* jobs.c */
enum kv_status kvg_jobs_start(struct cuda_backend *cuda, struct kv_error *err);
void kvg_jobs_stop(struct cuda_backend *cuda);
/* A batch is in flight: somebody has to ask how the device is. */
void kvg_jobs_watch(struct cuda_backend *cuda);
bool kvg_job_post(struct kv_backend *base, struct kv_job *job);
struct kv_job *kvg_job_reap(struct kv_backend *base);
void kvg_signal(struct cuda_backend *cuda);
struct cuda_backend *kvg_from_base(struct kv_backend *base);

#endif
