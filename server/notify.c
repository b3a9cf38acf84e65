#include "server/notify.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/http_rules.h"
#include "server/log.h"

/* The period that the manager waits for a sign of life, 0 for none or one that is not for this process. */
static uint64_t watchdog_period_ns(void)
{
	const char *period = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
	uint64_t period_us, wanted;

	if (!period || !srv_http_read_u64(period, UINT64_MAX / 1000, &period_us))
		return 0;
	if (pid && (!srv_http_read_u64(pid, INT32_MAX, &wanted) || wanted != (uint64_t)getpid()))
		return 0;
	return period_us * 1000;
}

void srv_notify_init(struct srv_notify *notify)
{
	const char *path = getenv("NOTIFY_SOCKET");
	const size_t n_bytes = path ? strlen(path) : 0;

	memset(notify, 0, sizeof(*notify));
	notify->fd = -1;
	notify->address.sun_family = AF_UNIX;
	if (n_bytes == 0 || n_bytes >= sizeof(notify->address.sun_path))
		return;
	memcpy(notify->address.sun_path, path, n_bytes);
	if (path[0] == '@') /* the abstract name space */
		notify->address.sun_path[0] = '\0';
	notify->address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n_bytes);
	notify->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (notify->fd >= 0)
		notify->watchdog_ns = watchdog_period_ns();
}

void srv_notify_finish(struct srv_notify *notify)
{
	if (notify->fd >= 0)
		close(notify->fd);
	notify->fd = -1;
	notify->watchdog_ns = 0;
}

void srv_notify_send(struct srv_notify *notify, const char *state)
{
	if (notify->fd < 0)
		return;
	if (sendto(notify->fd, state, strlen(state), MSG_NOSIGNAL,
		    (struct sockaddr *)(void *)&notify->address, notify->address_bytes) < 0)
		srv_log(SRV_LOG_WARNING, "notifying the service manager failed: %s", strerror(errno));
}

int64_t srv_notify_turn(struct srv_notify *notify, uint64_t now_ns, int64_t wait_ns)
{
	if (notify->watchdog_ns == 0)
		return wait_ns;
	if (now_ns >= notify->next_ns) {
		srv_notify_send(notify, "WATCHDOG=1");
		notify->next_ns = now_ns + notify->watchdog_ns / 2;
	}
	const uint64_t left_ns = notify->next_ns - now_ns;

	return left_ns < (uint64_t)wait_ns ? (int64_t)left_ns : wait_ns;
}
