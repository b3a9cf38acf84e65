#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/system_memory.h"
#include "tests/lib/kv_test.h"

static char root[64];

static void begin(void)
{
	snprintf(root, sizeof(root), "/tmp/tqkv-test-memory-XXXXXX");
	ck_assert_ptr_nonnull(mkdtemp(root));
}

static void end(void)
{
	char command[128];

	snprintf(command, sizeof(command), "rm -r %s", root);
	ck_assert_int_eq(system(command), 0);
}

/* Writes a file below the root, directories first. */
static void put(const char *path, const char *text)
{
	char full[256];

	snprintf(full, sizeof(full), "%s%s", root, path);
	for (char *slash = strchr(full + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		mkdir(full, 0700);
		*slash = '/';
	}

	FILE *file = fopen(full, "w");

	ck_assert_ptr_nonnull(file);
	fputs(text, file);
	fclose(file);
}

static uint64_t available(void)
{
	uint64_t n_bytes = 0;

	ck_assert(kv_system_memory_available_below(root, &n_bytes));
	return n_bytes;
}

static const char meminfo[] =
	"MemTotal:       32000 kB\nMemFree:         9000 kB\nMemAvailable:   20000 kB\n";

/* Without control groups it is MemAvailable; the real system answers too, and nothing answers for nothing. */
START_TEST(test_system_memory_meminfo)
{
	uint64_t n_bytes = 0;

	begin();
	ck_assert(!kv_system_memory_available_below(root, &n_bytes));
	put("/proc/meminfo", "MemTotal: 5 kB\n");
	ck_assert(!kv_system_memory_available_below(root, &n_bytes));
	put("/proc/meminfo", meminfo);
	ck_assert_uint_eq(available(), 20000 * 1024);
	ck_assert(kv_system_memory_available(&n_bytes));
	ck_assert_uint_gt(n_bytes, 1 << 20);
	end();
}
END_TEST

/* The tightest group on the way to the root counts, minus what it uses and cannot drop. */
START_TEST(test_system_memory_groups)
{
	begin();
	put("/proc/meminfo", meminfo);
	put("/proc/self/cgroup", "12:cpu:/x\n0::/a/b\n");
	put("/sys/fs/cgroup/a/b/memory.max", "max\n");
	put("/sys/fs/cgroup/a/b/memory.current", "1000000\n");
	ck_assert_uint_eq(available(), 20000 * 1024);
	put("/sys/fs/cgroup/a/memory.max", "9000000\n");
	put("/sys/fs/cgroup/a/memory.current", "4000000\n");
	ck_assert_uint_eq(available(), 5000000);
	put("/sys/fs/cgroup/a/memory.stat", "anon 77\ninactive_file 1500000\nactive_file 3\n");
	ck_assert_uint_eq(available(), 6500000);
	put("/sys/fs/cgroup/a/b/memory.max", "3000000\n");
	ck_assert_uint_eq(available(), 2000000);
	put("/sys/fs/cgroup/a/b/memory.current", "3000001\n");
	ck_assert_uint_eq(available(), 0);
	end();
}
END_TEST

/* In a container the process's group is the root of what it sees. */
START_TEST(test_system_memory_container_root)
{
	begin();
	put("/proc/meminfo", meminfo);
	put("/proc/self/cgroup", "0::/\n");
	put("/sys/fs/cgroup/memory.max", "8000000\n");
	put("/sys/fs/cgroup/memory.current", "1000000\n");
	ck_assert_uint_eq(available(), 7000000);
	end();
}
END_TEST

/* Version 1 of control groups, where no limit is a huge number. */
START_TEST(test_system_memory_version_1)
{
	begin();
	put("/proc/meminfo", meminfo);
	put("/proc/self/cgroup", "5:memory:/\n");
	put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
	put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n");
	ck_assert_uint_eq(available(), 20000 * 1024);
	put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n");
	ck_assert_uint_eq(available(), 3000000);
	end();
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("system_memory");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_system_memory_meminfo);
	tcase_add_test(tcase, test_system_memory_groups);
	tcase_add_test(tcase, test_system_memory_container_root);
	tcase_add_test(tcase, test_system_memory_version_1);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
