/*
 * The files of snapshot_dir: GET /v1/snapshots, DELETE /v1/snapshots/{name}. Answered by the control thread,
 * which may wait for a disk; the loop is not asked. A snapshot that is being read or written meanwhile is not
 * disturbed: a reader keeps its file, and a writer gives its file the name at the end.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/memory.h"
#include "server/checkpoint.h"
#include "server/http_internal.h"
#include "server/routes.h"

#define ENTRIES_MAX  4096u /* looked at */
#define LISTED_MAX   256u
#define NAME_BYTES   65u
#define SUFFIX       ".tqkv"
#define SUFFIX_BYTES (sizeof(SUFFIX) - 1)

struct entry {
	char name[NAME_BYTES];
	uint64_t n_bytes;
	int64_t modified_s;
};

static enum kv_status open_dir(const struct srv_http_request *request, int *fd, struct kv_error *err)
{
	const char *dir = request->options->snapshot_dir;

	if (strcmp(dir, "off") == 0)
		return kv_fail(err, KV_BAD_STATE,
			"there is no snapshot_dir to keep snapshots in; start the daemon with "
			"--snapshot-dir");
	*fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (*fd < 0)
		return kv_fail(err, KV_INTERNAL, "snapshot_dir: %s", strerror(errno));
	return KV_OK;
}

/* False: no snapshot. */
static bool read_entry(int dir_fd, const char *file_name, struct entry *entry)
{
	const size_t n_chars = strlen(file_name);
	struct stat told;

	if (n_chars <= SUFFIX_BYTES || n_chars - SUFFIX_BYTES >= NAME_BYTES ||
		strcmp(file_name + n_chars - SUFFIX_BYTES, SUFFIX) != 0)
		return false;
	memcpy(entry->name, file_name, n_chars - SUFFIX_BYTES);
	entry->name[n_chars - SUFFIX_BYTES] = '\0';
	if (!srv_checkpoint_is_name(entry->name) ||
		fstatat(dir_fd, file_name, &told, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(told.st_mode))
		return false;
	entry->n_bytes = (uint64_t)told.st_size;
	entry->modified_s = told.st_mtim.tv_sec;
	return true;
}

/* Newest first, then by name. */
static int compare(const void *a, const void *b)
{
	const struct entry *left = a, *right = b;

	if (left->modified_s != right->modified_s)
		return left->modified_s > right->modified_s ? -1 : 1;
	return strcmp(left->name, right->name);
}

static enum MHD_Result answer_list(
	struct srv_http_request *request, const struct entry *entries, uint32_t n_entries)
{
	struct srv_text text = { 0 };

	srv_text_open(&text, NULL, '{');
	srv_text_u64(&text, "n_snapshots", n_entries);
	srv_text_open(&text, "snapshots", '[');
	for (uint32_t i = 0; i < n_entries && i < LISTED_MAX; i++) {
		srv_text_open(&text, NULL, '{');
		srv_text_string(&text, "name", entries[i].name);
		srv_text_u64(&text, "n_bytes", entries[i].n_bytes);
		srv_text_i64(&text, "modified_unix_s", entries[i].modified_s);
		srv_text_close(&text, '}');
	}
	srv_text_close(&text, ']');
	srv_text_close(&text, '}');
	srv_text_add(&text, "\n", 1);
	return srv_http_queue_text(request, MHD_HTTP_OK, SRV_TYPE_JSON, &text);
}

enum MHD_Result srv_route_snapshots(struct srv_http_request *request)
{
	struct entry *entries = NULL;
	struct kv_error error = { 0 };
	struct dirent *found;
	uint32_t n_entries = 0;
	int fd = -1;
	enum kv_status status = open_dir(request, &fd, &error);

	if (status != KV_OK)
		return srv_http_refuse(request, status, error.msg);
	DIR *dir = fdopendir(fd);

	entries = kv_alloc(ENTRIES_MAX, sizeof(*entries));
	if (!dir || !entries) {
		if (dir)
			closedir(dir);
		else
			close(fd);
		kv_free(entries);
		return srv_http_refuse(request, KV_NO_MEMORY, NULL);
	}
	while (n_entries < ENTRIES_MAX && (found = readdir(dir)) != NULL)
		n_entries += read_entry(dirfd(dir), found->d_name, &entries[n_entries]);
	closedir(dir);
	qsort(entries, n_entries, sizeof(*entries), compare);
	const enum MHD_Result result = answer_list(request, entries, n_entries);

	kv_free(entries);
	return result;
}

enum MHD_Result srv_route_snapshot_delete(struct srv_http_request *request)
{
	const char *name = request->names[0];
	char file_name[NAME_BYTES + SUFFIX_BYTES];
	struct kv_error error = { 0 };
	int fd = -1;

	if (!srv_checkpoint_is_name(name))
		return srv_http_refuse(request, KV_BAD_ARG,
			"a snapshot's name has 1 to 64 of A-Z a-z 0-9 . _ -, not a dot first");
	const enum kv_status status = open_dir(request, &fd, &error);

	if (status != KV_OK)
		return srv_http_refuse(request, status, error.msg);
	snprintf(file_name, sizeof(file_name), "%.64s" SUFFIX, name);
	const int reason = unlinkat(fd, file_name, 0) < 0 ? errno : 0;

	close(fd);
	if (reason == ENOENT) {
		kv_fail(&error, KV_NOT_FOUND, "there is no snapshot '%.64s'", name);
		return srv_http_refuse(request, KV_NOT_FOUND, error.msg);
	}
	if (reason != 0) {
		kv_fail(&error, KV_INTERNAL, "snapshot '%.64s': %s", name, strerror(reason));
		return srv_http_refuse(request, KV_INTERNAL, error.msg);
	}
	return srv_http_queue(request, MHD_HTTP_NO_CONTENT, NULL, NULL, 0);
}
