/*
 * Preloaded into tqkvd by a test: counts heap calls of the data path, that is of the loop thread (the
 * process's first) and of the backend's workers ("tqkv-cpu-..."). The count is the first 8 bytes of the file
 * $TQKV_ALLOC_COUNTER.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

void *__libc_malloc(size_t n_bytes);
void *__libc_calloc(size_t n, size_t n_bytes);
void *__libc_realloc(void *ptr, size_t n_bytes);

static _Atomic(atomic_ulong *) counter;

__attribute__((constructor)) static void open_counter(void)
{
	const char *path = getenv("TQKV_ALLOC_COUNTER");
	const int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;

	if (fd < 0)
		return;
	void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	close(fd);
	if (page != MAP_FAILED)
		atomic_store(&counter, page);
}

static void count(void)
{
	atomic_ulong *at = atomic_load(&counter);
	char name[16] = { 0 };

	if (!at)
		return;
	if (gettid() != getpid()) {
		prctl(PR_GET_NAME, name);
		if (strncmp(name, "tqkv-cpu", 8) != 0)
			return;
	}
	atomic_fetch_add(at, 1);
}

void *malloc(size_t n_bytes)
{
	count();
	return __libc_malloc(n_bytes);
}

void *calloc(size_t n, size_t n_bytes)
{
	count();
	return __libc_calloc(n, n_bytes);
}

void *realloc(void *ptr, size_t n_bytes)
{
	count();
	return __libc_realloc(ptr, n_bytes);
}
