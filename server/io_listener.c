#include "server/io_listener.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/io_address.h"
#include "server/lock_file.h"

/* More than the kernel's somaxconn is cut down to it. */
#define BACKLOG         4096
#define LOCK_PATH_BYTES (sizeof(((struct srv_io_listener *)0)->path) + 8)

static const char *file_kind(mode_t mode)
{
	if (S_ISREG(mode))
		return "a regular file";
	if (S_ISDIR(mode))
		return "a directory";
	if (S_ISLNK(mode))
		return "a symbolic link";
	if (S_ISFIFO(mode))
		return "a FIFO";
	if (S_ISSOCK(mode))
		return "a socket";
	return "a device";
}

/* The usual reasons are those of a start without options: the service manager makes the default folder. */
static enum kv_status refuse_lock(const char *path, const char *lock_path, int reason, struct kv_error *err)
{
	const char *slash = strrchr(path, '/');
	const int folder_bytes = slash && slash > path ? (int)(slash - path) : 1;

	if (reason == ENOENT && slash)
		return kv_fail(err, KV_IO_ERROR,
			"unix:%s: the folder %.*s is missing: make it, or name another place with "
			"--listen unix:PATH",
			path, folder_bytes, path);
	if (reason == EACCES)
		return kv_fail(err, KV_IO_ERROR,
			"unix:%s: this user may not make %s: change the folder's permissions, or name "
			"another place with --listen unix:PATH",
			path, lock_path);
	if (reason == EWOULDBLOCK)
		return kv_fail(err, KV_IO_ERROR, "another process listens on unix:%s (it holds %s)", path,
			lock_path);
	return kv_fail(err, KV_IO_ERROR, "lock file %s: %s", lock_path, strerror(reason));
}

static void lock_path_of(const struct srv_io_listener *listener, char lock_path[LOCK_PATH_BYTES])
{
	snprintf(lock_path, LOCK_PATH_BYTES, "%s.lock", listener->path);
}

static enum kv_status take_lock(struct srv_io_listener *listener, struct kv_error *err)
{
	char lock_path[LOCK_PATH_BYTES];

	lock_path_of(listener, lock_path);
	const int fd = srv_lock_file_take(lock_path);

	if (fd < 0)
		return refuse_lock(listener->path, lock_path, -fd, err);
	listener->lock_fd = fd;
	return KV_OK;
}

static void drop_lock(struct srv_io_listener *listener)
{
	char lock_path[LOCK_PATH_BYTES];

	lock_path_of(listener, lock_path);
	srv_lock_file_drop(lock_path, listener->lock_fd);
	listener->lock_fd = -1;
}

/* Only with the lock held: a socket at the path then belongs to nobody who is alive. */
static enum kv_status remove_stale(const char *path, struct kv_error *err)
{
	struct stat found;

	if (lstat(path, &found) < 0) {
		if (errno == ENOENT)
			return KV_OK;
		return kv_fail(err, KV_IO_ERROR, "unix:%s: %s", path, strerror(errno));
	}
	if (!S_ISSOCK(found.st_mode))
		return kv_fail(err, KV_IO_ERROR, "unix:%s: %s is there, which is not removed", path,
			file_kind(found.st_mode));
	if (unlink(path) < 0)
		return kv_fail(
			err, KV_IO_ERROR, "unix:%s: removing the old socket: %s", path, strerror(errno));
	return KV_OK;
}

static enum kv_status bind_unix(struct srv_io_listener *listener, const struct kv_io_address *address,
	const struct sockaddr_storage *to, socklen_t to_bytes, struct kv_error *err)
{
	struct stat made;
	enum kv_status status = take_lock(listener, err);

	if (status == KV_OK)
		status = remove_stale(listener->path, err);
	if (status != KV_OK)
		return status;

	/* Nobody may connect between bind() and chmod(): the file is born private. */
	const mode_t umask_before = umask(0077);
	const int rc = bind(listener->fd, (const struct sockaddr *)to, to_bytes);
	const int reason = errno;

	umask(umask_before);
	if (rc < 0)
		return kv_fail(err, KV_IO_ERROR, "bind unix:%s: %s", listener->path, strerror(reason));
	if (lstat(listener->path, &made) < 0)
		return kv_fail(err, KV_IO_ERROR, "unix:%s: %s", listener->path, strerror(errno));
	listener->socket_dev = made.st_dev;
	listener->socket_ino = made.st_ino;
	if (chmod(listener->path, address->socket_mode & 0777u) < 0)
		return kv_fail(err, KV_IO_ERROR, "chmod unix:%s to %o: %s", listener->path,
			address->socket_mode & 0777u, strerror(errno));
	return KV_OK;
}

static void set_option(int fd, int level, int name, int value)
{
	/* Fails only where the option does not exist, and then the connection works without it. */
	(void)setsockopt(fd, level, name, &value, sizeof(value));
}

static enum kv_status bind_tcp(struct srv_io_listener *listener, const struct kv_io_address *address,
	const struct sockaddr_storage *to, socklen_t to_bytes, struct kv_error *err)
{
	/* Accepted sockets inherit all of these. Without keep-alive a peer that lost power would stay for
	 * ever. */
	set_option(listener->fd, SOL_SOCKET, SO_REUSEADDR, 1);
	set_option(listener->fd, SOL_SOCKET, SO_KEEPALIVE, 1);
	set_option(listener->fd, IPPROTO_TCP, TCP_KEEPIDLE, 60);
	set_option(listener->fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
	set_option(listener->fd, IPPROTO_TCP, TCP_KEEPCNT, 6);
	set_option(listener->fd, IPPROTO_TCP, TCP_NODELAY, 1);
	if (to->ss_family == AF_INET6) /* tcp:[::] and tcp:0.0.0.0 may stand side by side */
		set_option(listener->fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
	if (bind(listener->fd, (const struct sockaddr *)to, to_bytes) < 0)
		return kv_fail(err, KV_IO_ERROR, "bind tcp:%s:%u: %s", address->host, address->port,
			strerror(errno));
	return KV_OK;
}

static void describe(const struct srv_io_listener *listener, char *bound, uint32_t bound_bytes_max)
{
	struct sockaddr_storage at = { 0 };
	socklen_t at_bytes = sizeof(at);
	char text[80];

	if (listener->transport == KV_IO_UNIX) {
		snprintf(bound, bound_bytes_max, "unix:%s", listener->path);
		return;
	}
	(void)getsockname(listener->fd, (struct sockaddr *)&at, &at_bytes);
	srv_io_sockaddr_text(&at, text, sizeof(text));
	snprintf(bound, bound_bytes_max, "tcp:%s", text);
}

enum kv_status srv_io_listener_open(struct srv_io_listener *listener, const struct kv_io_address *address,
	char *bound, uint32_t bound_bytes_max, struct kv_error *err)
{
	struct srv_io_listener made = { .fd = -1, .lock_fd = -1, .transport = address->transport };
	struct sockaddr_storage to;
	const socklen_t to_bytes = srv_io_address_to_sockaddr(address, &to);
	enum kv_status status;

	if (to_bytes == 0)
		return kv_fail(err, KV_IO_ERROR, "tcp:%.128s: the host is no literal address", address->host);
	memcpy(made.path, address->path, sizeof(made.path));
	made.fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (made.fd < 0)
		return kv_fail(err, KV_IO_ERROR, "socket: %s", strerror(errno));
	if (made.transport == KV_IO_UNIX)
		status = bind_unix(&made, address, &to, to_bytes, err);
	else
		status = bind_tcp(&made, address, &to, to_bytes, err);
	if (status == KV_OK && listen(made.fd, BACKLOG) < 0)
		status = kv_fail(err, KV_IO_ERROR, "listen: %s", strerror(errno));
	if (status != KV_OK) {
		srv_io_listener_close(&made);
		return status;
	}
	describe(&made, bound, bound_bytes_max);
	*listener = made;
	return KV_OK;
}

void srv_io_listener_close(struct srv_io_listener *listener)
{
	struct stat found;

	if (listener->fd < 0)
		return;
	/* Also ends an accept that io_uring has in flight, which holds the socket beyond close(). */
	(void)shutdown(listener->fd, SHUT_RDWR);
	close(listener->fd);
	listener->fd = -1;
	/* Only our own file: somebody may have put another one there by hand. */
	if (listener->socket_ino != 0 && lstat(listener->path, &found) == 0 &&
		found.st_ino == listener->socket_ino && found.st_dev == listener->socket_dev)
		unlink(listener->path);
	drop_lock(listener);
}

void srv_io_peer_fill(int fd, enum kv_io_transport transport, struct kv_io_peer *peer)
{
	struct sockaddr_storage from = { 0 };
	socklen_t from_bytes = sizeof(from);
	struct ucred cred = { .uid = UINT32_MAX };
	socklen_t cred_bytes = sizeof(cred);

	peer->transport = transport;
	peer->uid = UINT32_MAX;
	if (transport == KV_IO_UNIX) {
		(void)getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &cred_bytes);
		peer->uid = cred.uid;
		snprintf(peer->address, sizeof(peer->address), "unix:uid %u pid %d", cred.uid, (int)cred.pid);
		return;
	}
	/* A peer that is gone already has no address any more: it stays "?" and the first receive says so. */
	(void)getpeername(fd, (struct sockaddr *)&from, &from_bytes);
	srv_io_sockaddr_text(&from, peer->address, sizeof(peer->address));
}
