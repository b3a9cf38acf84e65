#include "server/lock_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Each round means that another process removed the file in between; more than a few are no accident. */
#define ROUNDS_MAX 8u

/* Whoever holds it may remove it, so a lock counts only if the file is still the one at the path. */
int srv_lock_file_take(const char *path)
{
	for (uint32_t round = 0; round < ROUNDS_MAX; round++) {
		struct stat opened, named;
		const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

		if (fd < 0)
			return -errno;
		if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
			const int reason = errno;

			close(fd);
			return -reason;
		}
		if (fstat(fd, &opened) == 0 && stat(path, &named) == 0 && opened.st_ino == named.st_ino &&
			opened.st_dev == named.st_dev)
			return fd;
		close(fd);
	}
	return -EBUSY;
}

void srv_lock_file_drop(const char *path, int fd)
{
	if (fd < 0)
		return;
	unlink(path);
	close(fd);
}
