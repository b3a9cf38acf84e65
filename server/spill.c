#include "server/spill.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/memory.h"
#include "server/spill_internal.h"

/* ---- the file tier ---- */

#define PROBE_BYTE 0x5A

enum { PROBE_OPEN, PROBE_WRITE, PROBE_READ, PROBE_UNLINK, PROBE_DONE };

static void post_probe(struct srv_spill *spill, struct kv_io_file op)
{
	spill->file.op = op;
	spill->server->io->ops->file_post(spill->server->io, &spill->file.op);
}

static void begin_probe(struct srv_spill *spill)
{
	const struct srv_options *options = spill->server->options;

	snprintf(spill->path, sizeof(spill->path), "%s/tqkvd-%016llx.tier", options->file_tier_dir,
		(unsigned long long)kv_domain_boot_id(spill->server->domain));
	spill->state = SPILL_PROBE;
	spill->probe_step = PROBE_OPEN;
	spill->probe_ns = spill->server->now_ns;
	post_probe(spill,
		(struct kv_io_file){ .kind = KV_IO_FILE_OPEN,
			.path = spill->path,
			.open_flags = O_RDWR | O_CREAT | O_EXCL });
}

static void probe_failed(struct srv_spill *spill, const char *what, int64_t result)
{
	srv_log(SRV_LOG_ERROR, "no file tier: %s %s: %s", what, spill->path,
		result < 0 ? strerror((int)-result) : "what was read is not what was written");
	if (spill->fd >= 0)
		spill->server->io->ops->file_close(spill->server->io, spill->fd);
	spill->fd = -1;
	kv_tier_finish(&spill->tiers[1]);
	spill->state = SPILL_IDLE;
}

static void probe_ends(struct srv_spill *spill)
{
	srv_log(SRV_LOG_INFO, "file tier in %s through %s: %llu bytes, a page written and read in %llu us",
		spill->server->options->file_tier_dir, spill->server->io->ops->file_path,
		(unsigned long long)spill->tiers[1].n_pages * KV_TIER_PAGE_BYTES,
		(unsigned long long)srv_us_since(spill->server->now_ns, spill->probe_ns));
	spill->state = SPILL_IDLE;
}

/* The rest of the page, by the same step again; false: there is none, and the next step begins. */
static bool probe_page(struct srv_spill *spill, struct kv_io_file *next)
{
	spill->page_bytes_done += (uint32_t)spill->file.op.result;
	if (spill->page_bytes_done == KV_TIER_PAGE_BYTES) {
		spill->page_bytes_done = 0;
		return false;
	}
	next->bytes = spill->chunk + spill->page_bytes_done;
	next->n_bytes = KV_TIER_PAGE_BYTES - spill->page_bytes_done;
	next->offset = spill->page_bytes_done;
	spill->probe_step--;
	return true;
}

/* The file has no name while it is used, so that nothing is left of it whatever happens. */
static void probe_goes_on(struct srv_spill *spill)
{
	const struct kv_io_file *op = &spill->file.op;
	struct kv_io_file next = {
		.fd = spill->fd, .bytes = spill->chunk, .n_bytes = KV_TIER_PAGE_BYTES, .path = spill->path
	};

	switch (spill->probe_step++) {
	case PROBE_OPEN:
		if (op->result < 0) {
			probe_failed(spill, "open", op->result);
			return;
		}
		next.fd = spill->fd = (int)op->result;
		next.kind = KV_IO_FILE_UNLINK;
		break;
	case PROBE_WRITE: /* unlinked */
		memset(spill->chunk, PROBE_BYTE, KV_TIER_PAGE_BYTES);
		next.kind = KV_IO_FILE_WRITE;
		break;
	case PROBE_READ: /* written, as a whole or in part */
		if (op->result <= 0) {
			probe_failed(spill, "write", op->result < 0 ? op->result : -EIO);
			return;
		}
		next.kind = KV_IO_FILE_WRITE;
		if (!probe_page(spill, &next)) {
			memset(spill->chunk, 0, KV_TIER_PAGE_BYTES);
			next.kind = KV_IO_FILE_READ;
		}
		break;
	default: /* read, as a whole or in part */
		if (op->result <= 0) {
			probe_failed(spill, "read", op->result);
			return;
		}
		next.kind = KV_IO_FILE_READ;
		if (!probe_page(spill, &next)) {
			if (memcmp(spill->chunk, spill->chunk + 1, KV_TIER_PAGE_BYTES - 1) != 0 ||
				spill->chunk[0] != PROBE_BYTE)
				probe_failed(spill, "read", 0);
			else
				probe_ends(spill);
			return;
		}
		break;
	}
	post_probe(spill, next);
}

static void on_file(struct srv_file *file)
{
	struct srv_spill *spill = kv_container_of(file, struct srv_spill, file);

	if (spill->state == SPILL_PROBE)
		probe_goes_on(spill);
	else
		srv_spill_page_done(spill);
}

/* ---- out and in ---- */

static uint64_t image_bytes(const struct srv_spill *spill, const struct kv_sequence *sequence)
{
	return (uint64_t)srv_spill_n_pages(spill, sequence) * KV_TIER_PAGE_BYTES;
}

/* QUOTA, POOL_FULL. */
static enum kv_status take_image(
	struct srv_spill *spill, const struct kv_sequence *sequence, struct kv_tier_image *image)
{
	struct srv_counters *counters = &spill->server->counters;
	const uint64_t n_bytes = image_bytes(spill, sequence);
	const uint32_t n_pages = (uint32_t)(n_bytes / KV_TIER_PAGE_BYTES), payer = sequence->session->payer;

	if (kv_tenant_check(kv_domain_tenants(spill->server->domain), payer, KV_QUOTA_TIER_BYTES, n_bytes,
		    NULL) != KV_OK) {
		counters->spills_rejected_quota++;
		return KV_QUOTA;
	}
	if (kv_tier_take(&spill->tiers[0], n_pages, payer, image) ||
		(spill->fd >= 0 && spill->state != SPILL_PROBE &&
			kv_tier_take(&spill->tiers[1], n_pages, payer, image)))
		return KV_OK;
	counters->spills_rejected_full++;
	return KV_POOL_FULL;
}

static bool has_tier(const struct srv_spill *spill)
{
	return spill->tiers[0].n_pages > 0 || spill->fd >= 0;
}

enum kv_status srv_spill_out(struct srv_spill *spill, struct kv_sequence *sequence)
{
	struct kv_tier_image image;

	if (sequence->is_evicted)
		return KV_EVICTED;
	switch ((enum kv_residence)sequence->residence) {
	case KV_SPILLING:
	case KV_SPILLED:
		return KV_OK;
	case KV_FETCHING:
		return KV_BUSY_RETRY;
	case KV_BROKEN:
		return KV_CORRUPT;
	case KV_RESIDENT:
		break;
	}
	if (!has_tier(spill) || srv_spill_piece_bytes_max(sequence->pool->spec) > spill->chunk_bytes)
		return KV_BAD_STATE;
	if (kv_sequence_n_entries(sequence, 0) == 0 && sequence->n_items == 0)
		return KV_OK; /* it has nothing to give */
	if (!kv_sequence_may_spill(sequence))
		return KV_BUSY_RETRY;

	const enum kv_status status = take_image(spill, sequence, &image);

	if (status != KV_OK)
		return status;
	kv_sequence_spill_begin(sequence, &image);
	kv_list_push_back(&spill->jobs, &sequence->in_moves);
	return KV_OK;
}

enum kv_status srv_spill_in(struct srv_spill *spill, struct kv_sequence *sequence)
{
	if (sequence->is_evicted)
		return KV_EVICTED;
	switch ((enum kv_residence)sequence->residence) {
	case KV_RESIDENT:
	case KV_FETCHING:
		return KV_OK;
	case KV_SPILLING:
		return KV_BUSY_RETRY;
	case KV_BROKEN:
		return KV_CORRUPT;
	case KV_SPILLED:
		break;
	}
	const enum kv_status status = kv_sequence_fetch_begin(sequence);

	if (status == KV_OK)
		kv_list_push_back(&spill->jobs, &sequence->in_moves);
	return status;
}

enum kv_status srv_spill_item(
	struct srv_spill *spill, struct kv_session *session, uint64_t sequence_id, bool is_out)
{
	struct kv_sequence *sequence = kv_sequence_find(session, sequence_id);

	if (!sequence)
		return KV_NOT_FOUND;
	return is_out ? srv_spill_out(spill, sequence) : srv_spill_in(spill, sequence);
}

void srv_spill_touch(struct srv_spill *spill, struct kv_session *session, uint64_t sequence_id)
{
	struct kv_sequence *sequence = kv_sequence_find(session, sequence_id);

	if (sequence && sequence->residence == KV_SPILLED)
		(void)!srv_spill_in(spill, sequence); /* POOL_FULL: whoever asks again tries again */
}

uint16_t srv_spill_told(const struct kv_sequence *sequence)
{
	if (sequence->is_evicted)
		return KVP_STATE_EVICTED;
	switch ((enum kv_residence)sequence->residence) {
	case KV_RESIDENT:
	case KV_SPILLING:
		return KVP_STATE_RESIDENT;
	case KV_SPILLED:
	case KV_FETCHING:
		return KVP_STATE_SPILLED;
	case KV_BROKEN:
		break;
	}
	return KVP_STATE_EVICTED;
}

const char *srv_spill_state_name(const struct kv_sequence *sequence)
{
	if (sequence->is_evicted)
		return "evicted";
	switch ((enum kv_residence)sequence->residence) {
	case KV_RESIDENT:
		return "resident";
	case KV_SPILLING:
		return "spilling";
	case KV_SPILLED:
		return "spilled";
	case KV_FETCHING:
		return "fetching";
	case KV_BROKEN:
		break;
	}
	return "lost";
}

const char *srv_spill_tier_name(const struct srv_spill *spill, const struct kv_sequence *sequence)
{
	return !sequence->image.tier ? NULL : sequence->image.tier == &spill->tiers[0] ? "host" : "file";
}

/* ---- policy ---- */

/* Is so much of the pool used, ring blocks included, that idle sequences have to go? */
static bool is_tight(const struct srv_spill *spill, const struct kv_pool *pool)
{
	for (uint32_t g = 0; g < pool->spec->n_tables; g++) {
		const struct kv_block_counts *counts = &pool->blocks[g].counts;

		if ((uint64_t)(counts->n_total - counts->n_free) * 100 >=
			(uint64_t)counts->n_total * spill->server->options->spill_above_percent)
			return true;
	}
	return false;
}

/* What came back was wanted: it stays as if it were used, and long enough to be asked for again. */
static bool is_idle(const struct srv_server *server, const struct kv_sequence *sequence)
{
	const uint64_t idle_ns = server->options->spill_idle_ms * KV_NS_PER_MS;
	const uint64_t stay_ns = idle_ns > SRV_SPILL_STAY_NS ? idle_ns : SRV_SPILL_STAY_NS;

	return server->now_ns - sequence->used_ns >= idle_ns &&
		(sequence->fetched_ns == 0 || server->now_ns - sequence->fetched_ns >= stay_ns);
}

static void look_at(struct srv_spill *spill, struct kv_sequence *sequence)
{
	const struct srv_server *server = spill->server;

	if (sequence->residence != KV_RESIDENT || !is_idle(server, sequence) ||
		sequence->session->n_outstanding > 0 || !is_tight(spill, sequence->pool))
		return;
	/* A tenant whose quota is used up has been told nothing, so nothing is counted as refused. */
	if (!kv_tenant_has_room(kv_domain_tenants(server->domain), sequence->session->payer,
		    KV_QUOTA_TIER_BYTES, image_bytes(spill, sequence)))
		return;
	(void)!srv_spill_out(spill, sequence);
}

/* Walks all sequences, some a scan. */
static void scan(struct srv_spill *spill)
{
	struct kv_domain *domain = spill->server->domain;

	for (uint32_t i = 0; i < SRV_SPILL_SCAN_MAX; i++) {
		struct kv_session *session = NULL;
		struct kv_sequence *sequence = NULL;

		if (kv_session_find(domain, spill->scan_session, &session) == KV_OK)
			sequence = kv_sequence_next(session, spill->scan_sequence);
		if (sequence) {
			spill->scan_sequence = sequence->id + 1;
			look_at(spill, sequence);
			if (sequence->id < UINT64_MAX)
				continue;
		}
		session = kv_session_next(domain, &spill->scan_slot);
		spill->scan_session = session ? session->handle : 0;
		spill->scan_sequence = 0;
		if (!session) {
			spill->scan_slot = 0;
			return;
		}
	}
}

void srv_spill_turn(struct srv_spill *spill)
{
	const struct srv_server *server = spill->server;

	if (srv_spill_next_ns(spill) <= server->now_ns && !server->is_lost) {
		spill->next_scan_ns = server->now_ns + SRV_SPILL_SCAN_NS;
		if (kv_list_is_empty(&spill->jobs))
			scan(spill);
	}
	srv_spill_begin_job(spill);
}

bool srv_spill_has_work(const struct srv_spill *spill)
{
	return spill->state == SPILL_IDLE && !kv_list_is_empty(&spill->jobs) && !spill->server->is_lost;
}

bool srv_spill_is_busy(const struct srv_spill *spill)
{
	return !kv_list_is_empty(&spill->jobs);
}

uint64_t srv_spill_next_ns(const struct srv_spill *spill)
{
	if (spill->server->options->spill_idle_ms == 0 || !has_tier(spill))
		return UINT64_MAX;
	return spill->next_scan_ns;
}

void srv_spill_lose(struct srv_spill *spill)
{
	spill->mover.lane = NULL;
}

/* ---- what is known ---- */

void srv_spill_gauges(const struct srv_spill *spill, struct srv_gauges *out)
{
	out->host_tier_bytes = (uint64_t)spill->tiers[0].n_pages * KV_TIER_PAGE_BYTES;
	out->host_tier_used_bytes = (uint64_t)spill->tiers[0].n_used * KV_TIER_PAGE_BYTES;
	out->file_tier_bytes = spill->fd >= 0 ? (uint64_t)spill->tiers[1].n_pages * KV_TIER_PAGE_BYTES : 0;
	out->file_tier_used_bytes = (uint64_t)spill->tiers[1].n_used * KV_TIER_PAGE_BYTES;
	for (uint32_t i = 0; i < kv_domain_n_pools(spill->server->domain); i++)
		out->n_spilled += kv_domain_pool_at(spill->server->domain, i)->n_spilled;
}

enum kv_status srv_spill_audit(struct srv_spill *spill, struct kv_error *err)
{
	uint64_t n_counted[2] = { 0, 0 };

	for (uint32_t i = 0; i < kv_domain_n_pools(spill->server->domain); i++) {
		uint64_t n_pages[2] = { 0, 0 };

		kv_sequence_count_pages(kv_domain_pool_at(spill->server->domain, i), spill->tiers, n_pages);
		n_counted[0] += n_pages[0];
		n_counted[1] += n_pages[1];
	}
	for (uint32_t t = 0; t < 2; t++) {
		if (n_counted[t] != spill->tiers[t].n_used)
			return kv_fail(err, KV_INTERNAL, "audit: %s tier: %u pages in use, counted %llu",
				t == 0 ? "host" : "file", spill->tiers[t].n_used,
				(unsigned long long)n_counted[t]);
	}
	return KV_OK;
}

/* ---- life ---- */

static enum kv_status make_tiers(struct srv_spill *spill, struct kv_error *err)
{
	struct srv_server *server = spill->server;
	const struct srv_options *options = server->options;
	const bool has_file = strcmp(options->file_tier_dir, "off") != 0;
	struct kv_tenants *tenants = kv_domain_tenants(server->domain);
	enum kv_status status = kv_tier_init(&spill->tiers[0], options->host_tier_bytes, tenants, err);

	if (status == KV_OK && has_file)
		status = kv_tier_init(&spill->tiers[1], options->file_tier_bytes, tenants, err);
	if (status != KV_OK)
		return status;
	spill->host_bytes = (uint64_t)spill->tiers[0].n_pages * KV_TIER_PAGE_BYTES;
	if (spill->host_bytes > 0)
		spill->host = server->backend->ops->host_alloc(server->backend, spill->host_bytes);
	if (spill->host_bytes > 0 || has_file)
		spill->chunk = server->backend->ops->host_alloc(server->backend, spill->chunk_bytes);
	if ((spill->host_bytes > 0 && !spill->host) || ((spill->host_bytes > 0 || has_file) && !spill->chunk))
		return kv_fail(
			err, KV_NO_MEMORY, "host tier of %llu bytes", (unsigned long long)spill->host_bytes);
	if (has_file)
		begin_probe(spill);
	return KV_OK;
}

enum kv_status srv_spill_create(struct srv_server *server, struct srv_spill **out, struct kv_error *err)
{
	struct srv_spill *spill = kv_alloc(1, sizeof(*spill));

	if (!spill)
		return kv_fail(err, KV_NO_MEMORY, "tiers");
	spill->server = server;
	spill->fd = -1;
	spill->chunk_bytes = SRV_SPILL_CHUNK_BYTES;
	spill->file.done = on_file;
	spill->mover.seal = srv_spill_on_seal;
	spill->mover.done = srv_spill_on_moved;
	kv_list_init(&spill->jobs);
	/* Any piece of the configured pools fits; a pool that is made later and where one does not is never
	 * spilled. */
	for (uint32_t i = 0; i < kv_domain_n_pools(server->domain); i++) {
		const uint64_t n_bytes =
			srv_spill_piece_bytes_max(kv_domain_pool_at(server->domain, i)->spec);

		if (n_bytes > spill->chunk_bytes)
			spill->chunk_bytes = n_bytes;
	}
	spill->chunk_bytes = kv_round_up_u64(spill->chunk_bytes, KV_TIER_PAGE_BYTES);
	const enum kv_status status = make_tiers(spill, err);

	if (status != KV_OK) {
		srv_spill_destroy(spill);
		return status;
	}
	server->movers[1] = &spill->mover;
	*out = spill;
	return KV_OK;
}

void srv_spill_destroy(struct srv_spill *spill)
{
	if (!spill)
		return;
	struct srv_server *server = spill->server;

	if (spill->host)
		server->backend->ops->host_free(server->backend, spill->host, spill->host_bytes);
	if (spill->chunk)
		server->backend->ops->host_free(server->backend, spill->chunk, spill->chunk_bytes);
	if (spill->fd >= 0)
		close(spill->fd); /* the io, which opened it, is gone already */
	kv_tier_finish(&spill->tiers[0]);
	kv_tier_finish(&spill->tiers[1]);
	kv_free(spill);
}
