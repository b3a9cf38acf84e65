#include "core/system_memory.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEXT_BYTES 8192u /* /proc/meminfo has about 1500, memory.stat about 1500 */
#define PATH_BYTES 1024u

/* A small file of the kernel as text; false when it cannot be read. */
static bool read_text(const char *root, const char *path, char text[static TEXT_BYTES])
{
	char full[PATH_BYTES];

	if (snprintf(full, sizeof(full), "%s%s", root, path) >= (int)sizeof(full))
		return false;

	const int fd = open(full, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return false;

	size_t n_bytes = 0;
	ssize_t rc = 1;

	while (rc > 0 && n_bytes < TEXT_BYTES - 1) {
		rc = read(fd, text + n_bytes, TEXT_BYTES - 1 - n_bytes);
		if (rc > 0)
			n_bytes += (size_t)rc;
	}
	close(fd);
	text[n_bytes] = '\0';
	return rc >= 0;
}

/* The number behind "key" at the beginning of a line; key "" takes the beginning of the text. */
static bool find_number(const char *text, const char *key, uint64_t *out)
{
	const size_t key_bytes = strlen(key);

	for (const char *line = text; line && *line; line = strchr(line, '\n')) {
		if (*line == '\n')
			line++;
		if (strncmp(line, key, key_bytes) != 0)
			continue;

		char *end = NULL;
		const uint64_t value = strtoull(line + key_bytes, &end, 10);

		if (end == line + key_bytes)
			return false; /* "max": no limit */
		*out = value;
		return true;
	}
	return false;
}

/* What one group of version 2 leaves: limit minus use, where file pages that nobody uses do not count as use.
 */
static bool group_left(const char *root, const char *dir, uint64_t *left)
{
	char path[PATH_BYTES], text[TEXT_BYTES];
	uint64_t limit = 0, used = 0, reclaimable = 0;

	snprintf(path, sizeof(path), "%.900s/memory.max", dir);
	if (!read_text(root, path, text) || !find_number(text, "", &limit))
		return false;
	snprintf(path, sizeof(path), "%.900s/memory.current", dir);
	if (!read_text(root, path, text) || !find_number(text, "", &used))
		return false;
	snprintf(path, sizeof(path), "%.900s/memory.stat", dir);
	if (read_text(root, path, text))
		(void)find_number(text, "inactive_file ", &reclaimable);
	used = used > reclaimable ? used - reclaimable : 0;
	*left = limit > used ? limit - used : 0;
	return true;
}

static void take_least(uint64_t *least, uint64_t value)
{
	if (value < *least)
		*least = value;
}

/* Every group from the process's own up to the root may set a limit. */
static void cut_by_groups(const char *root, uint64_t *least)
{
	char text[TEXT_BYTES], dir[PATH_BYTES];
	uint64_t value = 0;

	if (!read_text(root, "/proc/self/cgroup", text))
		return;

	/* "0::/path" is the line of version 2; inside a container the path is that of its own root. */
	char *path = strstr(text, "0::/");

	if (!path || (path != text && path[-1] != '\n'))
		return;
	path += 3;
	path[strcspn(path, "\n")] = '\0';
	for (;;) {
		snprintf(dir, sizeof(dir), "/sys/fs/cgroup%.900s", path);
		if (group_left(root, dir, &value))
			take_least(least, value);

		char *slash = strrchr(path, '/');

		if (!slash)
			return;
		*slash = '\0';
	}
}

/* Version 1, still used by older container hosts. */
static void cut_by_group_v1(const char *root, uint64_t *least)
{
	char text[TEXT_BYTES];
	uint64_t limit = 0, used = 0;

	if (read_text(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", text) &&
		find_number(text, "", &limit) &&
		read_text(root, "/sys/fs/cgroup/memory/memory.usage_in_bytes", text) &&
		find_number(text, "", &used))
		take_least(least, limit > used ? limit - used : 0);
}

bool kv_system_memory_available_below(const char *root, uint64_t *n_bytes)
{
	char text[TEXT_BYTES];
	uint64_t kib = 0, least = 0;

	if (!read_text(root, "/proc/meminfo", text) || !find_number(text, "MemAvailable:", &kib))
		return false;
	least = kib * 1024;
	cut_by_groups(root, &least);
	cut_by_group_v1(root, &least);
	*n_bytes = least;
	return true;
}

bool kv_system_memory_available(uint64_t *n_bytes)
{
	return kv_system_memory_available_below("", n_bytes);
}
