/*
 * Notify: tells a service manager how the daemon is, as sd_notify(3) describes it: one datagram per message
 * to the socket that NOTIFY_SOCKET names. Where the variable is not set, nothing happens.
 *
 * With WATCHDOG_USEC set (and WATCHDOG_PID ours or unset), "WATCHDOG=1" goes out twice per period, from the
 * event loop: a loop that stands still says nothing, and the manager restarts the daemon. Loop thread only.
 */
#ifndef SERVER_NOTIFY_H
#define SERVER_NOTIFY_H

#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

struct srv_notify {
	int fd; /* -1: nobody asked */
	struct sockaddr_un address;
	socklen_t address_bytes;
	uint64_t watchdog_ns, next_ns; /* watchdog_ns 0: none */
};

/* Reads the environment. Never fails: a manager that cannot be told is none. srv_notify_finish() it. */
void srv_notify_init(struct srv_notify *notify);
void srv_notify_finish(struct srv_notify *notify);
/* "READY=1", "STOPPING=1", ... */
void srv_notify_send(struct srv_notify *notify, const char *state);
/*
 * Once per turn: sends the watchdog's message when half a period has passed, and returns for how long the
 * loop may sleep before it is due again, at most wait_ns.
 */
int64_t srv_notify_turn(struct srv_notify *notify, uint64_t now_ns, int64_t wait_ns);

#endif
